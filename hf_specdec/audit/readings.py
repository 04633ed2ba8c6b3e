"""How far stock `generate`'s own rounding moves the gap of two candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.generation import inputs_for
from hf_specdec.compat import num_positions

# Multiples of 16, which kernels take at a time, would leave most roundings as they are.
PADDINGS = (0, 1, 2, 3, 5, 8, 13, 21)


def stock_gaps(model: PreTrainedModel, text: Tensor, pair: tuple[int, int]) -> Tensor:
    """The gap of two candidates as stock `generate` computes it when the text stands behind columns of padding.

    Padding is masked, so in exact arithmetic it changes nothing, and stock puts it before the shorter prompts of every
    batch. What it does change is how sums are cut into parts, and with that every rounding behind them. Nothing of a
    strategy enters, so a strategy's fault cannot widen what is found here.

    Args:
        model: the target.
        text: token ids up to the place, int64 `[1, L]`.
        pair: two tokens.

    Returns:
        Logit of the first token minus that of the second, float64 `[R]`, one for each number of columns that leaves
        the text within the model's positions; the first without padding.
    """
    room = num_positions(model)
    fitting = [columns for columns in PADDINGS if room is None or text.shape[1] + columns <= room]
    return torch.stack([_gap(model, text, columns, pair) for columns in fitting])


def _gap(model: PreTrainedModel, text: Tensor, columns: int, pair: tuple[int, int]) -> Tensor:
    generate: Any = model.generate
    inputs = inputs_for(model, [text], columns)
    output = generate(**inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    logits: Tensor = output.logits[0][0, list(pair)].cpu().double()
    return logits[0] - logits[1]
