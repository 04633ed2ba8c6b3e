"""The packages of the `bench` extra, asked for before anything else is imported."""

from __future__ import annotations

from hf_specdec.errors import SpecDecError
from hf_specdec.extras import require_packages

_PACKAGES = ("scipy", "matplotlib")


class AuditDependencyError(SpecDecError, ImportError):
    """A package that the audit computes or draws with is not installed."""


def require_extras() -> None:
    """Check that scipy and matplotlib can be imported.

    Raises:
        AuditDependencyError: one of them is missing.
    """
    require_packages(_PACKAGES, "the audit", "bench", AuditDependencyError)
