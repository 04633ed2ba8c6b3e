"""What stock `generate` makes of one place when it rounds otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.generation import inputs_for
from hf_specdec.compat import num_positions
from hf_specdec.sampling import in_double

# Multiples of 16, which kernels take at a time, would leave most roundings as they are.
PADDINGS = (0, 1, 2, 3, 5, 8, 13, 21)


def stock_logits(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Logits behind a text as stock `generate` computes them when the text stands behind columns of padding.

    Padding is masked, so in exact arithmetic it changes nothing, and stock puts it before the shorter prompts of every
    batch. What it does change is how sums are cut into parts, and with that every rounding behind them. Nothing of a
    strategy enters, so a strategy's fault cannot widen what is found here.

    Args:
        model: the target.
        text: token ids, int64 `[1, L]`.

    Returns:
        float64 `[R, V]`, a row for each number of columns that leaves the text within the model's positions; the first
        without padding.
    """
    room = num_positions(model)
    fitting = [columns for columns in PADDINGS if room is None or text.shape[1] + columns <= room]
    return torch.stack([_logits(model, text, columns) for columns in fitting])


def _logits(model: PreTrainedModel, text: Tensor, columns: int) -> Tensor:
    generate: Any = model.generate
    inputs = inputs_for(model, [text], columns)
    output = generate(**inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return in_double(output.logits[0][0])
