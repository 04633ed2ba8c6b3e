"""The methods that are compared: stock generation in three forms, registered strategies, objects of the caller."""

from __future__ import annotations

import ast
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.drafters import Drafter, Medusa
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.registry import create_drafter

STOCK = "stock"
STOCK_PROMPT_LOOKUP = "stock_prompt_lookup"
STOCK_ASSISTED = "stock_assisted"
_STOCK_ARMS = (STOCK, STOCK_PROMPT_LOOKUP, STOCK_ASSISTED)
DEFAULT_ARMS = (*_STOCK_ARMS, "none", "prompt_lookup", "assisted", "tree")

# Behind the name of a strategy that can do without heads: the strategy with heads.
HEADED = "_heads"

# The value that Hugging Face's own documentation uses.
_STOCK_LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Setup:
    """What all arms of one run share.

    Attributes:
        model: the target.
        draft: the draft model of the arms that need one.
        draft_tokens: tokens of each drafted chain.
        max_new_tokens: tokens to generate at most.
        seed: of everything random.
        strategies: further arms by name. Their objects serve all prompts of a run, so what an object keeps from call
            to call (a store, a table) it has learned from the earlier prompts.
        heads: trained heads of the arms that use some; see `takes_heads`.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | None
    draft_tokens: int
    max_new_tokens: int
    seed: int = 0
    strategies: Mapping[str, Drafter] = dataclasses.field(default_factory=dict)
    heads: MedusaHeads | None = None


class ArmOutput(NamedTuple):
    """What an arm generated."""

    tokens: torch.Tensor
    """The new tokens, int64 `[rows, new tokens]`."""
    draft_seconds: float | None
    """Time in drafting; None for stock arms, which do not say."""


def split_arms(text: str) -> list[str]:
    """The arms in a list separated by commas; commas within brackets belong to a setting."""
    return re.split(r",(?![^(\[]*[)\]])", text)


def with_settings(drafter: Drafter, settings: Mapping[str, Any]) -> Drafter:
    """A drafter like `drafter` with some settings changed.

    Raises:
        ArgumentError: a setting that it does not have, or a wrong value.
    """
    known: list[str] = []
    if dataclasses.is_dataclass(drafter):
        known = [field.name for field in dataclasses.fields(drafter) if field.init]
    for name in settings:
        if name not in known:
            raise ArgumentError(
                f"strategy {drafter.name} has no setting {name!r}; it has: {', '.join(known) or 'none'}"
            )
    return dataclasses.replace(drafter, **settings) if settings else drafter  # type: ignore[type-var]


def takes_heads(name: str) -> bool:
    """Whether a strategy of this name gets heads: "medusa", or the name of any other with `_heads` behind it."""
    return name == Medusa.name or (name.endswith(HEADED) and name not in hf_specdec.drafter_names())


def named_strategy(name: str, settings: Mapping[str, Any], heads: MedusaHeads | None) -> Drafter:
    """A registered strategy with these settings; with the heads if `takes_heads` says so.

    Raises:
        ArgumentError: an unknown name or setting, a wrong value, or no heads where they are needed.
    """
    if not takes_heads(name):
        return with_settings(create_drafter(name), settings)
    drafter = with_settings(create_drafter(name.removesuffix(HEADED)), settings)
    if heads is None:
        raise ArgumentError(f"strategy {name!r} drafts with trained heads, and none were given")
    return drafter.with_heads(heads)


def check_arms(arms: Sequence[str], setup: Setup) -> None:
    """Refuse arms that cannot run, before any of them does.

    Raises:
        ArgumentError: an unknown name, a setting that is unknown or wrong, or an arm with a draft model or heads
            where there are none.
        SpecDecError: a strategy that does not fit the target.
    """
    for arm in arms:
        drafter = _drafter(arm, setup)
        if setup.draft is None and _needs_draft(arm, drafter):
            raise ArgumentError(f"arm {arm!r} needs a draft model")
        if drafter is not None:
            drafter.check(setup.model)


def run_arm(arm: str, setup: Setup, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> ArmOutput:
    """Generate greedily.

    Args:
        arm: a stock arm, a name in `setup.strategies`, or a registered strategy, which may have settings:
            `lookahead:window=7:ngram=4`, `auto_heads:nodes=32`.
        setup: the models and limits of the run.
        input_ids: int64 [rows, length], left-padded.
        attention_mask: int64 [rows, length].
    """
    arguments: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "do_sample": False,
        "max_new_tokens": setup.max_new_tokens,
        # For all arms alike: strategies give their statistics with it, and it costs each of them the same.
        "return_dict_in_generate": True,
    }
    drafter = _drafter(arm, setup)
    if arm == STOCK_PROMPT_LOOKUP:
        arguments["prompt_lookup_num_tokens"] = _STOCK_LOOKUP_TOKENS
    elif drafter is not None:
        arguments |= {"strategy": drafter, "seed": setup.seed}
    stock: Callable[..., Any] = setup.model.generate  # type: ignore[assignment]
    generate: Callable[..., Any] = stock if drafter is None else partial(hf_specdec.generate, setup.model)
    if not _needs_draft(arm, drafter):
        output = generate(**arguments)
    elif setup.draft is None:
        raise ArgumentError(f"arm {arm!r} needs a draft model")
    else:
        with constant_draft_length(setup.draft, setup.draft_tokens):
            output = generate(**arguments, assistant_model=setup.draft)
    return ArmOutput(
        output.sequences[:, input_ids.shape[1] :], None if drafter is None else output.speculation.seconds_draft
    )


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


def _drafter(arm: str, setup: Setup) -> Drafter | None:
    """The strategy of an arm; None for stock arms."""
    if arm in _STOCK_ARMS:
        return None
    if arm in setup.strategies:
        return setup.strategies[arm]
    name, *settings = arm.split(":")
    if (name.removesuffix(HEADED) if takes_heads(name) else name) not in hf_specdec.drafter_names():
        known = [*_STOCK_ARMS, *setup.strategies, *hf_specdec.drafter_names()]
        raise ArgumentError(f"arm {arm!r} is unknown; known arms: {', '.join(known)}")
    return named_strategy(name, dict(_setting(arm, part) for part in settings), setup.heads)


def _setting(arm: str, text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise ArgumentError(
            f"arm {arm!r}: {text!r} is not of the form name=value, with a number or another Python literal as value"
        ) from error


def _needs_draft(arm: str, drafter: Drafter | None) -> bool:
    return arm == STOCK_ASSISTED if drafter is None else drafter.needs_draft_model
