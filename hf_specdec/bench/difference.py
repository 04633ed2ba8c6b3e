"""Where two generated texts part, and how close the model's call was at that place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_specdec.noise import gumbel
from hf_specdec.sampling import noise_device


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token at which the sequences part, a missing token included; None when they are equal."""
    for index, (left, right) in enumerate(zip(reference, other, strict=False)):
        if left != right:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


@torch.no_grad()
def score_gap(
    model: PreTrainedModel,
    prompt_ids: torch.Tensor,
    reference: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> float | None:
    """Score of `reference`'s token minus score of `other`'s where the two part, from one forward over the common text.

    In half precision a forward of one row and a forward of several rows round differently, and greedy texts may part
    where two candidates are nearly equal: a gap near zero. A gap beyond rounding is a fault.

    Args:
        model: the model that generated both.
        prompt_ids: [1, prompt length], the common prompt.
        reference: new tokens of the reference.
        other: new tokens of the text that is compared with it.
        temperature: at 0 the raw logits are compared; above it what keyed sampling compares, which is
            logits / temperature + noise.
        seed: the seed of that noise.

    Returns:
        The gap in units of the scores; None when the texts are equal or one is the beginning of the other.
    """
    index = first_difference(reference, other)
    if index is None or index >= min(len(reference), len(other)):
        return None
    common = torch.tensor([list(reference[:index])], dtype=prompt_ids.dtype, device=prompt_ids.device)
    text = torch.cat([prompt_ids, common], dim=1)
    scores = model(text, logits_to_keep=1).logits[:, -1].float()
    if temperature > 0:
        noise = gumbel(seed, 0, index, scores.shape[-1], noise_device(scores.device))
        scores = scores.to(noise.device) / temperature + noise
    return float(scores[0, reference[index]] - scores[0, other[index]])
