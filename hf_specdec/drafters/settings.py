"""Draft settings that transformers defines: this call's value, else the draft model's own, else the default."""

from __future__ import annotations

from typing import Any

from hf_specdec.drafters.base import DraftContext


def draft_setting(context: DraftContext, name: str) -> Any:
    """The value of a generation setting such as `num_assistant_tokens` for this call.

    What the caller gave with this very call wins over the draft model's `generation_config`, which wins over
    transformers' default. Neither config is changed.
    """
    own = getattr(context.draft_model.generation_config, name) if context.draft_model is not None else None
    return own if own is not None and name not in context.explicit else getattr(context.config, name)
