"""What Ctrl-C in a training says: that nothing up to the last checkpoint is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from hf_specdec.cli.console import message_console

if TYPE_CHECKING:
    from hf_specdec.training.folders import RunFolder

INTERRUPTED = 130


@contextmanager
def stopping(folder: RunFolder, shown: bool) -> Iterator[None]:
    """Turn Ctrl-C into words and exit status 130.

    Args:
        folder: of the run.
        shown: whether to say anything; one process of a distributed run should.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if shown:
            there = folder.last_checkpoint() is not None
            words = (
                f"Stopped. The same command goes on from the last checkpoint in {folder.path}."
                if there
                else "Stopped before the first checkpoint. The same command begins the training again."
            )
            message_console().print(Text(words), soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from interrupt
