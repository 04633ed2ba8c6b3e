"""Speed at batch size 1: every arm on every prompt, side by side in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.bench.arms import STOCK, Setup, check_arms, run_arm
from hf_specdec.bench.clock import ForwardClock, synchronize
from hf_specdec.bench.difference import first_difference, score_gap
from hf_specdec.bench.prompts import Prompt, encode_prompt
from hf_specdec.bench.rows import SpeedRow

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class _Measured:
    tokens: list[int]
    seconds: float
    clock: ForwardClock
    draft_seconds: float | None


def measure_speed(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], arms: Sequence[str]
) -> Iterator[SpeedRow]:
    """Yield a row for each prompt and arm, greedily generated, one prompt at a time.

    All arms run on a prompt before the next prompt comes, so that a machine which slows down slows all of them, and
    their order turns by one with each prompt. Stock plain generation always runs: the others are compared with it.
    Before the first prompt each arm generates a few tokens that are not counted, after that prompt read backwards, so
    that an arm which remembers has not seen it when its turn comes.

    Raises:
        ArgumentError: an arm that cannot run.
    """
    arms = list(dict.fromkeys([STOCK, *arms]))
    check_arms(arms, setup)
    for index, prompt in enumerate(prompts):
        input_ids = encode_prompt(tokenizer, prompt.text).to(setup.model.device)
        if index == 0:
            for arm in arms:
                warm_up = replace(setup, max_new_tokens=min(_WARM_UP_TOKENS, setup.max_new_tokens))
                _measure(arm, warm_up, input_ids.flip(1))
        turn = index % len(arms)
        measured = {arm: _measure(arm, setup, input_ids) for arm in [*arms[turn:], *arms[:turn]]}
        reference = measured[STOCK].tokens
        for arm in arms:
            one = measured[arm]
            yield SpeedRow(
                task=prompt.task,
                prompt_id=prompt.prompt_id,
                arm=arm,
                prompt_tokens=input_ids.shape[1],
                new_tokens=len(one.tokens),
                seconds=one.seconds,
                forward_seconds=one.clock.forward_seconds,
                target_forwards=one.clock.target_forwards,
                draft_forwards=one.clock.draft_forwards,
                first_difference=first_difference(reference, one.tokens),
                score_gap=score_gap(setup.model, input_ids, reference, one.tokens),
                draft_seconds=one.draft_seconds,
            )


def _measure(arm: str, setup: Setup, input_ids: torch.Tensor) -> _Measured:
    torch.manual_seed(setup.seed)
    with ForwardClock(setup.model, setup.draft) as clock:
        synchronize(setup.model.device)
        started = perf_counter()
        output = run_arm(arm, setup, input_ids, torch.ones_like(input_ids))
        synchronize(setup.model.device)
        seconds = perf_counter() - started
    return _Measured(output.tokens[0].tolist(), seconds, clock, output.draft_seconds)
