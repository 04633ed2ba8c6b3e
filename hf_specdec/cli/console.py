"""What all commands share towards the terminal: two consoles, JSON, and errors without a traceback."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from hf_specdec.errors import SpecDecError

P = ParamSpec("P")


def output_console() -> Console:
    """The console of results: standard output."""
    return Console(highlight=False)


def message_console() -> Console:
    """The console of everything that is not a result: standard error."""
    return Console(stderr=True, highlight=False)


def print_json(record: dict[str, Any]) -> None:
    """Write one JSON object and nothing else to standard output."""
    typer.echo(json.dumps(record, indent=2, ensure_ascii=False))


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors that a user can cure into one line on standard error and exit status 1."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        # A terminal program's lines should be its own: loading bars of the libraries would break into panels and JSON.
        transformers_logging.disable_progress_bar()
        try:
            function(*args, **kwargs)
        # OSError is what transformers raises for a model that is not there.
        except (SpecDecError, OSError) as error:
            # One line, however long: whoever reads it by program must find the words together.
            message_console().print(Text.assemble(("Error: ", "bold red"), str(error)), soft_wrap=True)
            raise typer.Exit(1) from error

    return wrapped
