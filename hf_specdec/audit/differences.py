"""Where two texts part, and whether rounding can be the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.bench.difference import candidates, first_difference

TIE, FAULT = "tie", "fault"
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Difference:
    """The first place at which a text differs from the reference.

    Attributes:
        index: of the token.
        units: gap between the two candidates' scores, in units of rounding of the logits; None if one text ends.
        kind: "tie" or "fault".
    """

    index: int
    units: float | None
    kind: str


def is_exact(model: PreTrainedModel) -> bool:
    """Whether texts must be equal token for token: in 32 bit and more, without quantised layers."""
    return model.dtype in _EXACT and "quantization_config" not in vars(model.config)


def compare(
    model: PreTrainedModel,
    prompt: Tensor,
    reference: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float,
    seed: int,
    tie_units: float,
) -> Difference | None:
    """The first difference of two texts, classified; None if there is none.

    In 16 bit a forward over several tokens rounds otherwise than a forward over one, so the better of two nearly equal
    candidates may change. The gap is measured by a fresh forward over the common text. A unit of rounding is the
    distance of neighbouring numbers of the model's format at the size of the larger logit of the two, in the scale
    of the compared scores.

    Args:
        model: the target.
        prompt: int64 `[1, P]`.
        reference, other: new tokens.
        temperature: of both; above 0 the candidates are compared with the keyed noise added.
        seed: of that noise.
        tie_units: the largest gap that counts as a tie.
    """
    index = first_difference(reference, other)
    if index is None:
        return None
    found = candidates(model, prompt, reference, other, temperature=temperature, seed=seed)
    if found is None:
        return Difference(index, None, FAULT)  # rounding moves a choice, it does not end a text
    gap = abs(float(found.scores[0] - found.scores[1])) * (temperature or 1.0)
    units = gap / spacing(float(found.logits.abs().max()), model.dtype)
    return Difference(index, units, TIE if units <= tie_units and not is_exact(model) else FAULT)


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of a format around a value."""
    size = max(abs(value), torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(size))
