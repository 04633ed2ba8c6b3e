"""Draft settings that transformers defines: this call's value, else the draft model's own, else the default."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from hf_specdec.checks import is_whole
from hf_specdec.drafters.base import DraftContext
from hf_specdec.errors import ArgumentError


def draft_setting(context: DraftContext, name: str) -> Any:
    """The value of a generation setting such as `num_assistant_tokens` for this call.

    What the caller gave with this very call wins over the draft model's `generation_config`, which wins over
    transformers' default. Neither config is changed.
    """
    own = getattr(context.draft_model.generation_config, name) if context.draft_model is not None else None
    return own if own is not None and name not in context.explicit else getattr(context.config, name)


def require_whole(owner: object, *names: str) -> None:
    """Check settings of a strategy object that count something.

    Raises:
        ArgumentError: names the setting that is not a whole number of at least 1.
    """
    for name in names:
        value = getattr(owner, name)
        if not is_whole(value) or value < 1:
            raise ArgumentError(f"{type(owner).__name__}({name}={value!r}) must be a whole number of at least 1")


def eos_tokens(config: GenerationConfig) -> frozenset[int]:
    """The tokens that end a text, however `eos_token_id` names them; empty if there are none."""
    ids = config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
