"""Where two texts part, and whether rounding can be the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.readings import stock_gaps
from hf_specdec.bench.difference import candidates

TIE, FAULT = "tie", "fault"
NOISE_FACTOR = 2.0
"""A gap of so many times the noise of stock's own readings is a tie: a further reading hardly ever goes beyond."""
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Difference:
    """The first place at which a text differs from the reference.

    Attributes:
        index: of the token.
        units: gap between the two candidates' scores, in units of rounding of the logits; None if one text ends.
        kind: "tie" or "fault".
        noise: how far that gap moves among stock's own readings of the common text, largest minus smallest, in the
            same units; None where every difference is a fault.
        taken_by_stock: whether in one of those readings the reference's token is not better than the other one.
    """

    index: int
    units: float | None
    kind: str
    noise: float | None = None
    taken_by_stock: bool = False


def tie_bound(tie_units: float) -> str:
    """The largest gap of a tie, in words."""
    return f"{tie_units:g} units of rounding or {NOISE_FACTOR:g} times the noise of stock's own readings"


def is_exact(model: PreTrainedModel) -> bool:
    """Whether texts must be equal token for token: in 32 bit and more, without quantised layers."""
    return model.dtype in _EXACT and "quantization_config" not in vars(model.config)


def classify(
    model: PreTrainedModel,
    prompt: Tensor,
    reference: Sequence[int],
    other: Sequence[int],
    index: int,
    *,
    temperature: float,
    seed: int,
    tie_units: float,
) -> Difference:
    """The first difference of two texts that differ.

    In 16 bit a forward over several tokens rounds otherwise than a forward over one, so the better of two nearly equal
    candidates may change. The gap is measured by a fresh forward over the common text. A unit of rounding is the
    distance of neighbouring numbers of the model's format at the size of the larger logit of the two, in the scale
    of the compared scores. It does not know what was rounded on the way to the logits; `stock_gaps` measures that.

    Args:
        model: the target.
        prompt: int64 `[1, P]`.
        reference, other: new tokens.
        index: of the first difference.
        temperature: of both; above 0 the candidates are compared with the keyed noise added.
        seed: of that noise.
        tie_units: the largest gap that counts as a tie wherever it is; where stock's own readings scatter more,
            `NOISE_FACTOR` times their noise does.
    """
    found = candidates(model, prompt, reference, other, temperature=temperature, seed=seed)
    if found is None:
        return Difference(index, None, FAULT)  # rounding moves a choice, it does not end a text
    unit = spacing(float(found.logits.abs().max()), model.dtype)
    gap = float(found.scores[0] - found.scores[1]) * (temperature or 1.0) / unit
    if is_exact(model):
        return Difference(index, abs(gap), FAULT)
    text = torch.cat([prompt, prompt.new_tensor([reference[:index]])], dim=1)
    readings = stock_gaps(model, text, (reference[index], other[index])) / unit
    noise = float(readings.max() - readings.min())
    kind = TIE if abs(gap) <= max(tie_units, NOISE_FACTOR * noise) else FAULT
    return Difference(index, abs(gap), kind, noise, bool(gap + (readings - readings[0]).min() <= 0))


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of a format around a value."""
    size = max(abs(value), torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(size))
