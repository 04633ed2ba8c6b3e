"""Arguments of heads and drafts that must be something in particular."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_specdec.errors import ArgumentError


def checked_token_map(token_map: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    """The tokens that can be guessed, as int64 on the CPU.

    Raises:
        ArgumentError: it is no list of different tokens of the vocabulary.
    """
    try:
        token_map = torch.as_tensor(token_map)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"token_map must be a list of tokens, as a tensor or a sequence of whole numbers, not "
            f"{type(token_map).__name__}: {error}"
        ) from error
    integral = not (token_map.is_floating_point() or token_map.is_complex() or token_map.dtype == torch.bool)
    if token_map.ndim != 1 or not len(token_map) or not integral:
        raise ArgumentError(
            f"token_map must be a list of tokens, not {token_map.dtype} of shape {list(token_map.shape)}"
        )
    token_map = token_map.to("cpu", torch.int64, copy=True)
    if int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size:
        raise ArgumentError(
            f"token_map holds tokens from {int(token_map.min())} to {int(token_map.max())}, but the vocabulary has "
            f"{vocab_size}"
        )
    if len(set(token_map.tolist())) < len(token_map):
        raise ArgumentError("token_map holds a token twice")
    return token_map


def checked_base_model(base_model: str | None) -> str | None:
    """The name of a target, or None.

    Raises:
        ArgumentError: something else.
    """
    if base_model is not None and not isinstance(base_model, str):
        raise ArgumentError(f"base_model={base_model!r} must be the name of the target as a text, or None")
    return base_model


def checked_notes(notes: Mapping[str, str] | None) -> dict[str, str]:
    """Sections of a model card, as a new dictionary.

    Raises:
        ArgumentError: they are not texts under titles.
    """
    if notes is None:
        return {}
    if not isinstance(notes, Mapping) or not all(isinstance(text, str) for item in notes.items() for text in item):
        raise ArgumentError(f"notes={notes!r} must map titles to texts, such as {{'Training data': 'What it was.'}}")
    return dict(notes)


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating type, or None for "as it is".

    Raises:
        ArgumentError: neither a floating type nor the name of one.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(f"dtype={dtype!r} must be a floating type such as torch.bfloat16, its name, or 'auto'")
    return found
