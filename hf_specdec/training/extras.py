"""The packages of the `train` extra, asked for before anything else is imported."""

from __future__ import annotations

import importlib.util

from hf_specdec.training.records import TrainingDependencyError

_PACKAGES = ("accelerate", "matplotlib")


def require_extras() -> None:
    """Check that accelerate and matplotlib can be imported.

    Raises:
        TrainingDependencyError: one of them is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingDependencyError(f"training needs {' and '.join(missing)}: pip install 'hf_specdec[train]'")
