"""Packages of optional extras, asked for before anything that needs them is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from hf_specdec.errors import SpecDecError


def require_packages(names: Sequence[str], purpose: str, extra: str, error: type[SpecDecError]) -> None:
    """Check that packages can be imported.

    Args:
        names: of the packages.
        purpose: what needs them.
        extra: what brings them.
        error: raised with the names of those that are missing, and the command that installs them.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise error(f"{purpose} needs {' and '.join(missing)}: pip install 'hf_specdec[{extra}]'")
