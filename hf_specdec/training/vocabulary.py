"""The tokens that a draft may guess: those that the target says most often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_specdec.errors import ArgumentError
from hf_specdec.training.texts import Example


def frequent_tokens(
    examples: Sequence[Example], size: int, *, vocab_size: int | None = None, always: Iterable[int] = ()
) -> Tensor:
    """The most frequent tokens of the answers, int64 `[size]`, the most frequent first.

    A draft that guesses only these has a much smaller output matrix. The text stays the same: the target may still say
    any token, and one that cannot be guessed costs an unaccepted guess.

    Should the answers hold fewer different tokens, those of the prompts follow, then the lowest ids.

    Args:
        examples: texts of the target.
        size: D, how many tokens.
        vocab_size: V of the target; by default one more than the largest token that occurs.
        always: tokens to include however rare, such as the target's EOS tokens.

    Raises:
        ArgumentError: `size` is not between 1 and V, or smaller than the number of tokens in `always`.
    """
    answers = _counts(one.input_ids[max(one.num_prompt, 0) :] for one in examples)
    prompts = _counts(one.input_ids[: one.num_prompt] for one in examples)
    known = max(len(answers), len(prompts)) if vocab_size is None else vocab_size
    forced = sorted(set(always))
    if not max(len(forced), 1) <= size <= known:
        raise ArgumentError(
            f"size={size!r} of the draft vocabulary must be at least {max(len(forced), 1)} and at most the target's "
            f"{known} tokens"
        )
    if max(len(answers), len(prompts), max(forced, default=0) + 1) > known:
        raise ArgumentError(f"the examples hold tokens beyond the target's vocabulary of {known}")
    answers.resize(known)
    prompts.resize(known)
    ranking = np.lexsort((np.arange(known), -prompts, -answers))
    needed = np.isin(ranking, forced)
    others = np.flatnonzero(~needed)[: size - len(forced)]
    chosen = np.sort(np.concatenate([np.flatnonzero(needed), others]))
    return torch.from_numpy(ranking[chosen].astype(np.int64))


def coverage(examples: Sequence[Example], token_map: Tensor) -> float:
    """Share of the answers' tokens that are in `token_map`: no draft with this vocabulary guesses more of them."""
    counts = _counts(one.input_ids[one.num_prompt :] for one in examples)
    held = token_map.cpu().numpy()
    return float(counts[held[held < len(counts)]].sum() / max(counts.sum(), 1))


def _counts(texts: Iterable[list[int]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    arrays = [np.asarray(text, dtype=np.int64) for text in texts]
    return np.bincount(np.concatenate([*arrays, np.empty(0, dtype=np.int64)]))
