"""Arguments of heads and drafts that must be something in particular."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdec.errors import ArgumentError


def checked_token_map(token_map: Tensor, vocab_size: int) -> Tensor:
    """The tokens that can be guessed, as int64 on the CPU.

    Raises:
        ArgumentError: it is no list of different tokens of the vocabulary.
    """
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
