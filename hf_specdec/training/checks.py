"""Settings that must be something in particular."""

from __future__ import annotations

from hf_specdec.errors import ArgumentError


def require_whole(**settings: object) -> None:
    """Check numbers that count something.

    Raises:
        ArgumentError: names the one that is not a whole number of at least 1.
    """
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"{name}={value!r} must be a whole number of at least 1")
