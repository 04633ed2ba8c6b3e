"""Reading option values that are more than a number or a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
import typer

from hf_specdec.bench import HEADED, takes_heads, with_settings
from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.registry import create_drafter


class Dtype(StrEnum):
    """Number formats that a model can be loaded in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    def resolve(self) -> torch.dtype:
        """The format as torch knows it."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


class Verification(StrEnum):
    """How drafted tokens are checked when sampling."""

    keyed = "keyed"
    rejection = "rejection"
    typical = "typical"


def build_strategy(name: str, arguments: str | None, heads: MedusaHeads | None = None) -> Drafter:
    """The strategy `name` with the settings in `arguments`, written `name=value,name=value`, and with `heads`, if any.

    Raises:
        typer.BadParameter: an unknown strategy or setting, a wrong value, a malformed list, or heads that do not fit.
    """
    with _blaming("--strategy"):
        strategy = create_drafter(name)
    settings = parse_settings(arguments) if arguments else {}
    with _blaming("--strategy-args"):
        strategy = with_settings(strategy, settings)
    with _blaming("--heads"):
        return strategy if heads is None else strategy.with_heads(heads)


def build_named_strategy(name: str, arguments: str | None, heads: MedusaHeads | None) -> Drafter:
    """As `build_strategy`, where a list of strategies shares the heads: `name_heads` is `name` with heads.

    Raises:
        typer.BadParameter: as `build_strategy`, or no heads where they are needed.
    """
    if not takes_heads(name):
        return build_strategy(name, arguments)
    if heads is None:
        raise typer.BadParameter(f"strategy {name} drafts with trained heads", param_hint="--heads")
    return build_strategy(name.removesuffix(HEADED), arguments, heads)


@contextmanager
def _blaming(option: str) -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def parse_settings(text: str) -> dict[str, Any]:
    """Read `name=value,name=value`; values are Python literals, anything else is a string.

    Raises:
        typer.BadParameter: a part without a name or without a value.
    """
    settings: dict[str, Any] = {}
    # Only a comma before the next name separates, so that a value may be a tuple.
    for part in re.split(r",(?=\s*\w+\s*=)", text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name.isidentifier() and equals and value):
            raise typer.BadParameter(f"{part!r} is not of the form name=value", param_hint="--strategy-args")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings


def resolve_device(name: str | None) -> torch.device:
    """The device called `name`; by default the first accelerator if there is one.

    Raises:
        typer.BadParameter: no such device.
    """
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    # A build without CUDA asserts; what is no device at all is a RuntimeError.
    except (RuntimeError, AssertionError) as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from error
