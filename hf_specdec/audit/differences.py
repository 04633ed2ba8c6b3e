"""Where two texts part, and whether rounding can be the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.readings import stock_logits
from hf_specdec.bench.difference import candidates, common_text, compared_scores

TIE, FAULT = "tie", "fault"
NOISE_FACTOR = 2.0
"""A gap of so many times the noise of stock's own readings is a tie, ..."""
CEILING_FACTOR = 2.0
"""... unless it is above so many times what is a tie everywhere: a bound without end would excuse anything."""
_EXACT = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Difference:
    """The first place at which a text differs from the reference.

    Attributes:
        index: of the token.
        units: gap between the two candidates, the reference's score minus the other's, in units of rounding of the
            logits; below 0 where a fresh forward prefers the other one; None if one text ends or a score is not
            finite.
        kind: "tie" or "fault".
        noise: range of that gap over stock's own readings of the common text, in the same units; None where every
            difference is a fault, and where it could not be measured.
        taken_by_stock: whether stock takes the other token in one of those readings; None where there are none.
    """

    index: int
    units: float | None
    kind: str
    noise: float | None = None
    taken_by_stock: bool | None = None


def tie_bound(tie_units: float) -> str:
    """The largest gap of a tie, in words."""
    ceiling = CEILING_FACTOR * tie_units
    return f"{tie_units:g} units of rounding, in noisy places {NOISE_FACTOR:g} times the noise up to {ceiling:g} units"


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
    of the compared scores. It does not know what was rounded on the way to the logits; `stock_logits` shows that.

    Args:
        model: the target.
        prompt: int64 `[1, P]`.
        reference, other: new tokens.
        index: of the first difference.
        temperature: of both; above 0 the candidates are compared with the keyed noise added.
        seed: of that noise.
        tie_units: the largest gap that counts as a tie wherever it is. Where stock's own readings scatter,
            `NOISE_FACTOR` times their noise does, too, up to `CEILING_FACTOR` times this number.
    """
    if index == min(len(reference), len(other)):
        return Difference(index, None, FAULT)  # rounding moves a choice, it ends no text
    text, pair = common_text(prompt, reference, index), (reference[index], other[index])
    found = candidates(model, text, pair, temperature=temperature, seed=seed, index=index)
    if not found.scores.isfinite().all():
        return Difference(index, None, FAULT)
    scale = (temperature or 1.0) / spacing(float(found.logits.abs().max()), model.dtype)
    gap = float(found.scores[0] - found.scores[1]) * scale
    if is_exact(model):
        return Difference(index, gap, FAULT)
    scores = compared_scores(stock_logits(model, text), temperature, seed, index)
    noise = _range((scores[:, pair[0]] - scores[:, pair[1]]) * scale)
    kind = TIE if abs(gap) <= _bound(tie_units, noise or 0.0) else FAULT
    return Difference(index, gap, kind, noise, bool((scores.argmax(dim=-1) == pair[1]).any()))


def _bound(tie_units: float, noise: float) -> float:
    return min(max(tie_units, NOISE_FACTOR * noise), CEILING_FACTOR * tie_units)


def _range(readings: Tensor) -> float | None:
    """None if there is but one, or one is not finite."""
    found = float(readings.max() - readings.min())
    return found if len(readings) > 1 and math.isfinite(found) else None


def spacing(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of a format around a value."""
    size = max(abs(value), torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(size))
