"""What a call made is freed when it ends, by counting references: circles wait, and with them memory of a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import strategies
import texts
from hf_specdec import generate

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "keyed": {"do_sample": True, "seed": 3},
    "rejection": {"do_sample": True, "seed": 3, "verification": "rejection"},
}


@pytest.fixture(autouse=True)
def no_search_for_circles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors() -> set[int]:
    return {id(one) for one in gc.get_objects() if issubclass(type(one), torch.Tensor)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(strategies.STRATEGIES))
def test_no_tensor_outlives_its_call(target: PreTrainedModel, draft: PreTrainedModel, name: str, mode: str) -> None:
    batch = texts.padded((7, 12, 4))
    expected = texts.greedy(target, **batch, max_new_tokens=10)

    def call() -> None:
        arguments = strategies.STRATEGIES[name](draft, texts.rows_without_padding(batch, expected))
        generate(target, **batch, max_new_tokens=10, pad_token_id=texts.PAD, **MODES[mode], **arguments)

    call()  # what a model or a process is measured for once stays
    gc.collect()
    before = tensors()
    call()
    assert tensors() <= before
