"""The packages of the `train` extra, asked for before anything else is imported."""

from __future__ import annotations

from hf_specdec.extras import require_packages
from hf_specdec.training.records import TrainingDependencyError

_PACKAGES = ("accelerate", "matplotlib")


def require_extras() -> None:
    """Check that accelerate and matplotlib can be imported.

    Raises:
        TrainingDependencyError: one of them is missing.
    """
    require_packages(_PACKAGES, "training", "train", TrainingDependencyError)
