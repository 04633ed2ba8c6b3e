"""Prompts, and stock `generate` as the reference that every strategy is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import zoo
from hf_specdec import KeyedSampler

SEED = 11
PAD = 0
NEW_TOKENS = 24

# In transformers' own order. They act when sampling, so the greedy reference must be given them by hand.
_WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "top_h": TopHLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
SAMPLING = {"temperature": 0.8, "top_k": 20}


def prompt(length: int, seed: int = 0) -> Tensor:
    """Random tokens, the second half repeating the first where possible: int64 `[1, length]`."""
    tokens = torch.randint(5, zoo.VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))
    half = length // 2
    tokens[:, length - half :] = tokens[:, :half]
    return tokens


def padded(lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts of several lengths, as `input_ids` and `attention_mask`."""
    rows = [prompt(length, seed + row) for row, length in enumerate(lengths)]
    width = max(lengths)
    return {
        "input_ids": torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0), value=PAD) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - length) + [1] * length for length in lengths]),
    }


def inputs(ids: Tensor) -> dict[str, Tensor]:
    """A batch without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def greedy(model: PreTrainedModel, **settings: Any) -> Any:
    """Stock greedy decoding, whether or not the model is enabled."""
    return type(model).generate(model, **{"do_sample": False, "pad_token_id": PAD} | settings)


def sampled(model: PreTrainedModel, seed: int | Sequence[int] = SEED, **settings: Any) -> Any:
    """Stock `generate` with keyed noise: warpers, then the noise, as the last processors of greedy decoding."""
    warpers = [_WARPERS[name](settings.pop(name)) for name in _WARPERS if name in settings]
    own: list[LogitsProcessor] = list(settings.pop("logits_processor", []))
    processors = LogitsProcessorList([*own, *warpers, *settings.pop("after_warpers", []), KeyedSampler(seed)])
    return greedy(model, logits_processor=processors, **settings)


def rows_without_padding(batch: dict[str, Tensor], sequences: Tensor) -> list[list[int]]:
    """The token ids of each row of a result, left padding dropped."""
    new = sequences.shape[1] - batch["input_ids"].shape[1]
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, new), value=1).bool()
    return [row[keep].tolist() for row, keep in zip(sequences, mask, strict=True)]
