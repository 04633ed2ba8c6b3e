"""Reading option values that are more than a number or a word."""

from __future__ import annotations

import ast
import re
from enum import StrEnum
from typing import Any

import torch
import typer

from hf_specdec.bench import with_settings
from hf_specdec.drafters import Drafter
from hf_specdec.errors import ArgumentError
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


def build_strategy(name: str, arguments: str | None) -> Drafter:
    """The strategy `name` with the settings in `arguments`, written `name=value,name=value`.

    Raises:
        typer.BadParameter: an unknown strategy or setting, a wrong value or a malformed list.
    """
    try:
        strategy = create_drafter(name)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--strategy") from error
    settings = parse_settings(arguments) if arguments else {}
    try:
        return with_settings(strategy, settings)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--strategy-args") from error


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
        return torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(str(error).splitlines()[0], param_hint="--device") from error
