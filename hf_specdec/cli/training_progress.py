"""How a training is going, on standard error: bars, and a line for each evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_specdec.cli.console import message_console

# What evaluations of the two Trainers log.
_MEASURED = {"eval_loss": "loss", "eval_kl": "divergence"}
_RATES = ("_top1", "_acceptance_")


class TrainingBars(TrainerCallback):
    """A callback of the Trainer, and a context in which its bars are shown.

    Args:
        reading: what the bar of texts is called.
        shown: whether to show anything; one process of a distributed run should.
    """

    def __init__(self, reading: str, shown: bool = True) -> None:
        self._reading = reading
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, *times, console=message_console(), disable=not shown)
        self._tasks: dict[str, TaskID] = {}
        self._shown = shown

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def count_texts(self, done: int, total: int) -> None:
        """Tell how many texts the target has read, of how many."""
        self._update(self._reading, done, total)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **further: Any
    ) -> None:
        """Move the bar."""
        self._update("Training", state.global_step, state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **further: Any,
    ) -> None:
        """Show the loss beside the bar, and an evaluation on a line that stays."""
        logs = logs or {}
        if "loss" in logs:
            self._update("Training", state.global_step, state.max_steps, f"loss {logs['loss']:.3f}")
        measured = next((name for name in _MEASURED if name in logs), None)
        if measured is not None and self._shown:
            rates = [f"{logs[name]:.3f}" for name in logs if any(part in name for part in _RATES)]
            line = (
                f"step {state.global_step} of {state.max_steps}: held-out {_MEASURED[measured]} {logs[measured]:.3f}"
            )
            self._bars.console.print(Text(line + (f", guesses right {' '.join(rates)}" if rates else "")))

    def _update(self, name: str, done: int, total: int, note: str | None = None) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note="")
        task = self._tasks[name]
        self._bars.update(task, completed=done, total=total)
        if note is not None:
            self._bars.update(task, note=note)
