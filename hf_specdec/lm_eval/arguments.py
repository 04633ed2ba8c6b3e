"""`--model_args`: which of them are settings of the strategy, which go on to lm-eval's own model, which are wrong."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any

from lm_eval.models.huggingface import HFLM

from hf_specdec.bench import with_settings
from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.registry import create_drafter, drafter_names

LM_EVAL_ARGUMENTS = frozenset(inspect.signature(HFLM.__init__).parameters) - {"self", "kwargs"}


def build_strategy(
    strategy: object, heads: str | MedusaHeads | None, arguments: dict[str, Any]
) -> tuple[Drafter, dict[str, Any]]:
    """The strategy with its settings, and the arguments that are none.

    Args:
        strategy: a registered name or a `Drafter`.
        heads: folder or hub id of trained heads, `MedusaHeads`, or None.
        arguments: model arguments by name.

    Raises:
        ArgumentError: an unknown strategy, a wrong value, or a setting that only other strategies have.
    """
    drafter = create_drafter(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(drafter, Drafter):
        raise ArgumentError(f"strategy must be a name or a Drafter object, not {_kind(strategy)}")
    known = known_settings(drafter)
    settings = {name: value for name, value in arguments.items() if name in known - LM_EVAL_ARGUMENTS}
    rest = {name: value for name, value in arguments.items() if name not in settings}
    drafter = with_settings(drafter, settings)
    if heads is None:
        return drafter, rest
    return drafter.with_heads(MedusaHeads.from_pretrained(heads) if isinstance(heads, str) else heads), rest


def setting_names(drafter: Drafter) -> set[str]:
    """The settings that a strategy has."""
    if not dataclasses.is_dataclass(drafter):
        return set()
    return {field.name for field in dataclasses.fields(drafter) if field.init}


def known_settings(drafter: Drafter) -> set[str]:
    """The settings that this or any registered strategy has."""
    return setting_names(drafter).union(*(setting_names(create_drafter(name)) for name in drafter_names()))


def named_or_loaded(argument: str, value: object, kind: type | UnionType, called: str = "a loaded model") -> Any:
    """A model argument, checked.

    Args:
        argument: its name.
        value: as given.
        kind: class of loaded objects, with None if there need be none.
        called: what messages call such an object.

    Returns:
        A folder or hub id as a string, a loaded object as it is.

    Raises:
        ArgumentError: something else.
    """
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if not isinstance(value, kind):
        raise ArgumentError(f"{argument} must be a folder, a hub id or {called}, not {_kind(value)}")
    return value


def check_for_model_object(arguments: dict[str, Any], drafter: Drafter) -> None:
    """Refuse what lm-eval would pass on to `from_pretrained`, for a model that is loaded already.

    Raises:
        ArgumentError: names the first one.
    """
    for name in arguments:
        if name not in LM_EVAL_ARGUMENTS:
            raise ArgumentError(
                f"model argument {name!r} is unknown{_suggestion(name, drafter)}; with a loaded model as pretrained= "
                "nothing is passed on to from_pretrained"
            )


@contextmanager
def unknown_arguments_named(arguments: dict[str, Any], drafter: Drafter) -> Iterator[None]:
    """Lm-eval passes what it does not know on to `from_pretrained`; what nobody knows in the end is named here.

    Raises:
        ArgumentError: instead of the model class's TypeError.
    """
    try:
        yield
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[1] not in arguments or found[1] in LM_EVAL_ARGUMENTS:
            raise
        raise ArgumentError(
            f"model argument {found[1]!r} is unknown{_suggestion(found[1], drafter)}: strategy {drafter.name} has no "
            "such setting, and neither lm-eval nor from_pretrained takes it"
        ) from error


def _kind(value: object) -> str:
    """Of what type it is: the text of a model would fill the screen."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _suggestion(name: str, drafter: Drafter) -> str:
    nearest = difflib.get_close_matches(name, [*setting_names(drafter), *LM_EVAL_ARGUMENTS], n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
