"""The error for the case that the optional packages are not there."""

from __future__ import annotations

from hf_specdec.errors import SpecDecError


class LmEvalMissingError(SpecDecError, ImportError):
    """A package that the lm-eval model is made from is not installed."""
