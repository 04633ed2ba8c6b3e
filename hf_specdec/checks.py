"""Numbers that users give: of which kind they must be."""

from __future__ import annotations

import math
from typing import TypeGuard

from hf_specdec.errors import ArgumentError


def require_whole(**settings: object) -> None:
    """Check numbers that count something.

    Raises:
        ArgumentError: names the one that is not a whole number of at least 1.
    """
    for name, value in settings.items():
        if not is_whole(value) or value < 1:
            raise ArgumentError(f"{name}={value!r} must be a whole number of at least 1")


def require_seed(**settings: object) -> None:
    """Check seeds.

    Raises:
        ArgumentError: names the one that is not a whole number.
    """
    for name, value in settings.items():
        if not is_whole(value):
            raise ArgumentError(f"{name}={value!r} must be a whole number")


def require_positive(**settings: object) -> None:
    """Check numbers that need not be whole.

    Raises:
        ArgumentError: names the one that is not finite and above 0.
    """
    for name, value in settings.items():
        if not is_finite(value) or value <= 0:
            raise ArgumentError(f"{name}={value!r} must be above 0 and finite")


def require_not_negative(**settings: object) -> None:
    """Check numbers that may be 0.

    Raises:
        ArgumentError: names the one that is not finite, or below 0.
    """
    for name, value in settings.items():
        if not is_finite(value) or value < 0:
            raise ArgumentError(f"{name}={value!r} must be a finite number, 0 or above")


def require_share(**settings: object) -> None:
    """Check numbers above 0, and at most 1.

    Raises:
        ArgumentError: names the one that is not.
    """
    for name, value in settings.items():
        if not is_finite(value) or not 0 < value <= 1:
            raise ArgumentError(f"{name}={value!r} must be above 0 and at most 1")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number, and neither NaN nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
