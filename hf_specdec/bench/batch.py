"""One batch of prompts against the same prompts one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.bench.arms import Setup, check_arms, run_arm
from hf_specdec.bench.clock import synchronize
from hf_specdec.bench.prompts import encode_prompt
from hf_specdec.bench.rows import BatchRow
from hf_specdec.errors import ArgumentError

_WARM_UP_TOKENS = 4


def measure_batch(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], arms: Sequence[str]
) -> list[BatchRow]:
    """Generate `texts` greedily with each arm, as one left-padded batch and one by one, and compare time and tokens.

    Stock prompt lookup and stock assisted generation refuse batches and cannot be arms here.

    Raises:
        ArgumentError: an arm that cannot run.
    """
    check_arms(arms, setup)
    refused = [arm for arm in arms if arm.startswith("stock_")]
    if refused:
        raise ArgumentError(f"arm {refused[0]!r} runs at batch size 1 only")
    device = setup.model.device
    encoded = [encode_prompt(tokenizer, text).to(device) for text in texts]
    batch_ids, batch_mask = _left_pad(encoded, _padding_token(setup))
    rows = []
    for arm in arms:
        warm_up = replace(setup, max_new_tokens=min(_WARM_UP_TOKENS, setup.max_new_tokens))
        run_arm(arm, warm_up, batch_ids, batch_mask)
        batch_tokens, batch_seconds = _timed(arm, setup, batch_ids, batch_mask)
        singles = [_timed(arm, setup, input_ids, torch.ones_like(input_ids)) for input_ids in encoded]
        single_tokens = [trim(tokens[0].tolist(), setup) for tokens, _ in singles]
        pairs = zip((trim(row, setup) for row in batch_tokens.tolist()), single_tokens, strict=True)
        rows.append(
            BatchRow(
                arm=arm,
                rows=len(texts),
                new_tokens=sum(map(len, single_tokens)),
                batch_seconds=batch_seconds,
                single_seconds=sum(seconds for _, seconds in singles),
                identical_rows=sum(together == alone for together, alone in pairs),
            )
        )
    return rows


def trim(tokens: list[int], setup: Setup) -> list[int]:
    """`tokens` up to its first end-of-sequence token, that one included: without the padding of a finished row."""
    ends = _end_tokens(setup)
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


def _end_tokens(setup: Setup) -> set[int]:
    declared = setup.model.generation_config.eos_token_id
    if declared is None:
        return set()
    return set(declared) if isinstance(declared, list) else {declared}


def _padding_token(setup: Setup) -> int:
    declared = setup.model.generation_config.pad_token_id
    if declared is not None:
        return int(declared)
    # Padding is masked out, so any token does.
    return min(_end_tokens(setup), default=0)


def _left_pad(encoded: Sequence[torch.Tensor], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Join prompts of [1, length] into ids and mask of [rows, longest length]."""
    longest = max(ids.shape[1] for ids in encoded)
    batch_ids = encoded[0].new_full((len(encoded), longest), padding)
    mask = torch.zeros_like(batch_ids)
    for row, ids in enumerate(encoded):
        batch_ids[row, longest - ids.shape[1] :] = ids[0]
        mask[row, longest - ids.shape[1] :] = 1
    return batch_ids, mask


def _timed(arm: str, setup: Setup, input_ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, float]:
    synchronize(setup.model.device)
    started = perf_counter()
    tokens = run_arm(arm, setup, input_ids, mask).tokens
    synchronize(setup.model.device)
    return tokens, perf_counter() - started
