"""Rotary embeddings whose frequencies depend on the longest position of a forward."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from hf_specdec.errors import UnsupportedModelError


def check_rope(model: PreTrainedModel, first_position: int, last_position: int) -> None:
    """Refuse a call in which a guess could change the rotation of the tokens before it.

    With "longrope" a forward that reaches past a limit rotates all its tokens by other frequencies; with "dynamic"
    each position past the limit has frequencies of its own. Blocks are exact where the whole call stays on one side.

    Args:
        model: the target.
        first_position: smallest position id that a forward of this call ends at.
        last_position: largest position id that the call may reach.

    Raises:
        UnsupportedModelError: the call may cross the limit.
    """
    for rope_type, limit in _limits(model):
        beyond = last_position >= limit
        if beyond and (rope_type == "dynamic" or first_position < limit):
            raise UnsupportedModelError(
                f"{type(model).__name__} has {rope_type!r} rotary embeddings, whose frequencies change at position "
                f"{limit}: this call may reach {last_position}, where drafts cannot be verified exactly; keep prompt "
                "and max_new_tokens below it, or use stock generate"
            )


def _limits(model: PreTrainedModel) -> list[tuple[str, int]]:
    config = model.config.get_text_config(decoder=True)
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else [one for one in parameters.values() if isinstance(one, dict)]
    limits = {
        "longrope": lambda one: one["original_max_position_embeddings"],
        "dynamic": lambda one: config.max_position_embeddings,
    }
    return [(one["rope_type"], limits[one["rope_type"]](one)) for one in sets if one.get("rope_type") in limits]
