"""Weights and losses that must be finite."""

from __future__ import annotations

from torch import nn

from hf_specdec.errors import SpecDecError


class NonFiniteTrainingError(SpecDecError, RuntimeError):
    """A training came to NaN or infinite numbers, from which nothing can be learned."""


def non_finite_weight(module: nn.Module) -> str | None:
    """The name of the first parameter that holds NaN or infinite numbers, or None."""
    return next((name for name, weight in module.named_parameters() if not weight.isfinite().all()), None)
