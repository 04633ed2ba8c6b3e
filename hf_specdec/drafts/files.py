"""Distilled drafts on disk and on the hub: without what they share with their target."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_specdec.atomic import replace_file
from hf_specdec.drafts.cut import build_cut, check_layers
from hf_specdec.drafts.distilled import as_dtype, bind, head_prefix, own_tensors, shared_weights
from hf_specdec.drafts.output import ReducedOutput
from hf_specdec.drafts.record import MODEL_TYPE, DraftRecord
from hf_specdec.errors import DraftModelError

_CONFIG, _WEIGHTS, _TOKEN_MAP = "config.json", "model.safetensors", "token_map"


def save_draft(draft: PreTrainedModel, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors: layers, norm and token map, nothing that is the target's.

    Args:
        draft: what `make_draft` or `load_draft` returned.
        folder: made if need be; the files in it are replaced.
        dtype: of what is written.

    Raises:
        ArgumentError: no distilled draft.
    """
    record = DraftRecord.of(draft)
    weights = {name: as_dtype(value.cpu(), dtype).contiguous() for name, value in own_tensors(draft).items()}
    head = draft.get_output_embeddings()
    if isinstance(head, ReducedOutput):
        weights[_TOKEN_MAP] = head.token_map.to("cpu", torch.int32)  # half the size, and every vocabulary fits
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record.to_dict(), indent=2) + "\n"
    replace_file(path / _WEIGHTS, lambda place: save_file(weights, place, metadata={"format": "pt"}))
    replace_file(path / _CONFIG, lambda place: place.write_text(text, encoding="utf-8"))


def load_draft(name: str | os.PathLike[str], target: PreTrainedModel) -> PreTrainedModel:
    """A distilled draft bound to its target: a model of the target's class, for `assistant_model=` of any generate.

    Its embeddings share memory with the target's; of the output matrix it holds the rows of its vocabulary.

    Args:
        name: folder or hub id.
        target: the model that it was made for, quantised or not, which is not changed.

    Raises:
        ArgumentError: what lies there is no distilled draft.
        DraftModelError: it was made for another model, or the target's output matrix is quantised.
    """
    folder = _local_folder(name)
    record = DraftRecord.from_dict(json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
    record.check(target)
    check_layers(target, record.layers)
    weights = shared_weights(target)
    if not all(value.is_floating_point() for value in weights.values()):
        raise DraftModelError(
            f"embeddings or output matrix of this {type(target).__name__} are quantised, so a draft cannot share "
            "them; leave them out when you quantise the model"
        )
    stored = {
        key: as_dtype(value.to(target.device), target.dtype) for key, value in load_file(folder / _WEIGHTS).items()
    }
    token_map = stored.pop(_TOKEN_MAP, None)
    # Own rows have the names of the target's whole matrix, which is put in first.
    outputs = {key: stored.pop(key) for key in list(stored) if key.startswith(head_prefix(target))}
    draft = build_cut(target, record.layers, weights | stored)
    bind(draft, record, None if token_map is None else token_map.long())
    draft.load_state_dict(outputs, strict=False)
    return draft


def load_assistant(name: str | os.PathLike[str], target: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    """Whatever model lies there, on the target's device: a distilled draft, or a model of its own.

    Args:
        name: folder or hub id.
        target: the model that it is to draft for.
        settings: for `AutoModelForCausalLM.from_pretrained`, if it is a model of its own.

    Raises:
        DraftModelError: a distilled draft of another model.
        OSError: nothing is there.
    """
    config, _ = PreTrainedConfig.get_config_dict(name)
    if config.get("model_type") == MODEL_TYPE:
        return load_draft(name, target)
    model: Any = AutoModelForCausalLM.from_pretrained(name, **settings)
    placed: PreTrainedModel = model.to(target.device)
    return placed


def _local_folder(name: str | os.PathLike[str]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(str(name), allow_patterns=[_CONFIG, _WEIGHTS]))
