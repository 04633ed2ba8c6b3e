"""How far an audit is: bars in a terminal, lines in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hf_specdec.cli.console import message_console

if TYPE_CHECKING:
    from hf_specdec.audit.jobs import Progress as Report


@contextmanager
def audit_progress() -> Iterator[Report]:
    """A bar for each stage, on standard error; lines where that is no terminal."""
    console = message_console()
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage.capitalize(), total=total)
            bars.update(tasks[stage], completed=done)

        yield report


def _lines(console: Console) -> Report:
    """A line for each further tenth of a stage: a log shows no bars, and a run of hours should not seem dead."""
    said: Counter[str] = Counter()

    def report(stage: str, done: int, total: int) -> None:
        tenths = 10 * done // total
        if tenths > said[stage]:
            said[stage] = tenths
            console.print(f"{stage.capitalize()}: {10 * tenths} %")

    return report
