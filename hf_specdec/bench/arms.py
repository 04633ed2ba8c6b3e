"""The methods that are compared: stock generation in three forms, and every registered strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.errors import ArgumentError
from hf_specdec.registry import create_drafter

STOCK = "stock"
STOCK_PROMPT_LOOKUP = "stock_prompt_lookup"
STOCK_ASSISTED = "stock_assisted"
_STOCK_ARMS = (STOCK, STOCK_PROMPT_LOOKUP, STOCK_ASSISTED)
DEFAULT_ARMS = (*_STOCK_ARMS, "none", "prompt_lookup", "assisted", "tree")

# The value that Hugging Face's own documentation uses.
_STOCK_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Setup:
    """What all arms of one run share."""

    model: PreTrainedModel
    draft: PreTrainedModel | None
    draft_tokens: int
    max_new_tokens: int
    seed: int = 0


def arm_names() -> list[str]:
    """Every arm: the three stock ones, then the registered strategies."""
    return [*_STOCK_ARMS, *hf_specdec.drafter_names()]


def check_arms(arms: Sequence[str], *, has_draft: bool) -> None:
    """Refuse arms that cannot run.

    Raises:
        ArgumentError: an unknown name, or an arm with a draft model where there is none.
    """
    for arm in arms:
        if arm not in arm_names():
            raise ArgumentError(f"arm {arm!r} is unknown; known arms: {', '.join(arm_names())}")
        if not has_draft and _needs_draft(arm):
            raise ArgumentError(f"arm {arm!r} needs a draft model")


def run_arm(arm: str, setup: Setup, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Generate greedily.

    Args:
        arm: one of `arm_names()`.
        setup: the models and limits of the run.
        input_ids: int64 [rows, length], left-padded.
        attention_mask: int64 [rows, length].

    Returns:
        The new tokens, int64 [rows, new tokens].
    """
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "do_sample": False,
        "max_new_tokens": setup.max_new_tokens,
    }
    if arm == STOCK_PROMPT_LOOKUP:
        arguments["prompt_lookup_num_tokens"] = _STOCK_LOOKUP_TOKENS
    elif arm not in _STOCK_ARMS:
        arguments |= {"strategy": arm, "seed": setup.seed}
    stock: Callable[..., Any] = setup.model.generate  # type: ignore[assignment]
    generate = stock if arm in _STOCK_ARMS else partial(hf_specdec.generate, setup.model)
    if not _needs_draft(arm):
        text = generate(**arguments)
    elif setup.draft is None:
        raise ArgumentError(f"arm {arm!r} needs a draft model")
    else:
        with constant_draft_length(setup.draft, setup.draft_tokens):
            text = generate(**arguments, assistant_model=setup.draft)
    return torch.as_tensor(text)[:, input_ids.shape[1] :]


@contextmanager
def constant_draft_length(draft: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Make assisted generation, stock or ours, draft `tokens` tokens each round, and trees as many levels.

    The draft's own configuration comes back after. The confidence threshold is switched off: with it a round's length
    depends on the draft's probabilities, and two runs are not comparable.
    """
    kept = draft.generation_config
    config = copy.deepcopy(kept)
    config.num_assistant_tokens = tokens
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    draft.generation_config = config
    try:
        yield
    finally:
        draft.generation_config = kept


def _needs_draft(arm: str) -> bool:
    return arm == STOCK_ASSISTED or (arm not in _STOCK_ARMS and create_drafter(arm).needs_draft_model)
