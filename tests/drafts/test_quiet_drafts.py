"""Making and loading drafts prints nothing, and leaves transformers as talkative as it was."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_specdec import DraftModelError, load_draft, make_draft, save_draft
from hf_specdec.drafts.quiet import quiet_loading


@pytest.fixture(autouse=True)
def talkative() -> Iterator[None]:
    """Bars and warnings are on, as for a user who changed nothing."""
    bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.enable_progress_bar()
    transformers_logging.set_verbosity_warning()
    yield
    transformers_logging.set_verbosity(level)
    if not bars:
        transformers_logging.disable_progress_bar()


def test_silence(target: PreTrainedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_draft(make_draft(target, [0], token_map=torch.arange(9)), tmp_path)
    load_draft(tmp_path, target)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.5.other": torch.zeros(3)}
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    (tmp_path / "model.safetensors").unlink()  # `load_file` maps it
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DraftModelError, match="lacks"):  # transformers would print a LOAD REPORT
        load_draft(tmp_path, target)

    assert capfd.readouterr() == ("", "")


def test_the_state_afterwards(target: PreTrainedModel) -> None:
    logger = logging.getLogger("transformers.modeling_utils")

    def hook(factory: Any, args: Any, settings: Any) -> Any:
        return factory(*args, **settings)

    outside = transformers_logging.set_tqdm_hook(hook)
    filters, level = list(logger.filters), transformers_logging.get_verbosity()
    make_draft(target, [0])
    with pytest.raises(RuntimeError, match="inside"), quiet_loading():
        raise RuntimeError("inside")

    assert transformers_logging.set_tqdm_hook(outside) is hook
    assert logger.filters == filters
    assert transformers_logging.get_verbosity() == level
    assert transformers_logging.is_progress_bar_enabled()


def test_other_threads_keep_their_bars() -> None:
    """Through the user's own hook, if there is one."""
    shown: dict[str, bool] = {}

    def bar(name: str) -> None:
        shown[name] = not transformers_logging.tqdm([1], leave=False).disable

    for hook in (None, lambda factory, args, settings: factory(*args, **settings)):
        outside = transformers_logging.set_tqdm_hook(hook)
        with quiet_loading():
            bar("own")
            other = threading.Thread(target=bar, args=("other",))
            other.start()
            other.join()
        transformers_logging.set_tqdm_hook(outside)
        assert shown == {"own": False, "other": True}
