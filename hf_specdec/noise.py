"""Gumbel noise that is a function of (seed, row, step, token) and of nothing else.

A counter-based generator (the splitmix64 finaliser of Steele, Lea and Flood 2014) instead of a stateful one: any
subset of tokens can be asked for, on any device, in any order, and the answer never changes. Adding this noise to log
probabilities and taking the argmax is a sample from the distribution (Gumbel 1954); taking the k largest is a sample
without replacement.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def gumbel(seed: int, row: int, step: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Gumbel(0, 1) noise for one position.

    Args:
        seed: any int.
        row: row of the batch.
        step: number of tokens generated for that row before this one.
        vocab_size: V.
        device: where to compute; the bits are the same everywhere.

    Returns:
        float64 `[V]`.
    """
    start = _signed(_key(seed, row, step))
    bits = _mix_tensor(_counters(vocab_size, str(device)) + start)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # 52 bits and a half: never 0, never 1, no rounding
    return uniform.log_().neg_().log_().neg_()


def _key(seed: int, row: int, step: int) -> int:
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state ^ row) + _GOLDEN)
    return _mix((state ^ step) + _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix_tensor(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shift(bits, 27)) * _signed(_SECOND)
    return bits ^ _shift(bits, 31)


@lru_cache(maxsize=8)
def _counters(vocab_size: int, device: str) -> Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * _signed(_GOLDEN)
