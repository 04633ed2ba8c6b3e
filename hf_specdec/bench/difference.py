"""Where two generated texts part, and how close the model's call was at that place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.compat import forward_parameters
from hf_specdec.noise import gumbel
from hf_specdec.sampling import in_double


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token at which the sequences part, a missing token included; None when they are equal."""
    for index, (left, right) in enumerate(zip(reference, other, strict=False)):
        if left != right:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


class Candidates(NamedTuple):
    """The two tokens at which texts part, the reference's first.

    Attributes:
        logits: the model's own, float64 `[2]`.
        scores: what was compared, float64 `[2]`: the logits, or above temperature 0 logits / temperature + noise.
    """

    logits: Tensor
    scores: Tensor


def common_text(prompt_ids: Tensor, reference: Sequence[int], index: int) -> Tensor:
    """Prompt and the new tokens before number `index`, int64 `[1, P + index]`."""
    return torch.cat([prompt_ids, prompt_ids.new_tensor([reference[:index]])], dim=1)


@torch.no_grad()
def candidates(
    model: PreTrainedModel, text: Tensor, pair: tuple[int, int], *, temperature: float, seed: int, index: int
) -> Candidates:
    """Both tokens where two texts part, by one fresh forward over the common text.

    Args:
        model: the model that generated both.
        text: what both begin with, int64 `[1, L]`.
        pair: the tokens behind it.
        temperature: of both.
        seed: of the keyed noise of both.
        index: of these tokens among the new ones.
    """
    keep = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
    output = model(input_ids=text.to(model.device), use_cache=False, return_dict=True, **keep)
    logits = in_double(output.logits[0, -1])
    both = list(pair)
    return Candidates(logits[both], compared_scores(logits, temperature, seed, index)[both])


def compared_scores(logits: Tensor, temperature: float, seed: int, index: int) -> Tensor:
    """What decides about new token number `index`: logits, above temperature 0 logits / temperature + keyed noise.

    Args:
        logits: float64 `[..., V]`.
        temperature, seed: of the text.
        index: of the token among the new ones.
    """
    if temperature == 0:
        return logits
    return logits / temperature + gumbel(seed, 0, index, logits.shape[-1], logits.device)


def score_gap(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    reference: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> float | None:
    """Score of `reference`'s token minus score of `other`'s where the two part.

    In half precision a forward of one row and a forward of several rows round differently, and greedy texts may part
    where two candidates are nearly equal: a gap near zero. A gap beyond rounding is a fault.

    Args:
        model: the model that generated both.
        prompt_ids: int64 `[1, P]`, the common prompt.
        reference, other: new tokens.
        temperature: at 0 the raw logits are compared; above it what keyed sampling compares, which is
            logits / temperature + noise.
        seed: the seed of that noise.

    Returns:
        The gap in units of the scores; None when the texts are equal or one is the beginning of the other.
    """
    index = first_difference(reference, other)
    if index is None or index == min(len(reference), len(other)):
        return None
    text, pair = common_text(prompt_ids, reference, index), (reference[index], other[index])
    found = candidates(model, text, pair, temperature=temperature, seed=seed, index=index)
    return float(found.scores[0] - found.scores[1])
