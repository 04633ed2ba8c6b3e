"""Names of strategies: built in, registered by hand, or found through an entry-point group."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from hf_specdec.errors import ArgumentError

if TYPE_CHECKING:
    from hf_specdec.drafters.base import Drafter

ENTRY_POINT_GROUP = "hf_specdec.drafters"

_factories: dict[str, Callable[[], Drafter]] = {}


def register_drafter(name: str, factory: Callable[[], Drafter]) -> None:
    """Make `strategy=name` build a drafter.

    Args:
        name: the strategy's name; must be new.
        factory: a class or function that is called without arguments and returns a `Drafter` with default settings.

    Raises:
        ArgumentError: the name is taken or is not a plain identifier.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError(f"strategy name {name!r} must be a plain identifier such as 'my_strategy'")
    if not callable(factory):
        raise ArgumentError(f"factory of strategy {name!r} must be a class or function, not {factory!r}")
    if name in _factories:
        raise ArgumentError(f"strategy name {name!r} is already registered; choose another one")
    _factories[name] = factory


def drafter_names() -> list[str]:
    """All strategy names that `create_drafter` accepts, sorted, third-party entry points included."""
    return sorted(_factories.keys() | {point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def create_drafter(name: str) -> Drafter:
    """Build the drafter called `name` with its default settings.

    Raises:
        ArgumentError: no such strategy; the message suggests the nearest name.
    """
    if name in _factories:
        return _factories[name]()
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        factory: Callable[[], Drafter] = point.load()
        return factory()
    known = drafter_names()
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ArgumentError(f"strategy={name!r} is unknown; {hint}known strategies: {', '.join(known)}")
