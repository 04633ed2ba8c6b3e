"""The packages of the `bench` extra, asked for before anything else is imported."""

from __future__ import annotations

import importlib.util

from hf_specdec.errors import SpecDecError

_PACKAGES = ("scipy", "matplotlib")


class AuditDependencyError(SpecDecError, ImportError):
    """A package that the audit computes or draws with is not installed."""


def require_extras() -> None:
    """Check that scipy and matplotlib can be imported.

    Raises:
        AuditDependencyError: one of them is missing.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise AuditDependencyError(f"the audit needs {' and '.join(missing)}: pip install 'hf_specdec[bench]'")
