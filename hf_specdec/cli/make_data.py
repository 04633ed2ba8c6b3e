"""`hf-specdec make-data`: let a model answer prompts, to train on its answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.cli.console import command, message_console
from hf_specdec.cli.options import Dtype, build_strategy, resolve_device
from hf_specdec.cli.training_stop import INTERRUPTED

if TYPE_CHECKING:
    from hf_specdec.training.answers import Progress as Report


@command
def make_data(
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of the model.")],
    data: Annotated[str, typer.Option(help="Prompts: a file, a folder, or a data set of the hub as name:split.")],
    output: Annotated[Path, typer.Option(help="File of answers (.jsonl); a run that was stopped goes on from there.")],
    strategy: Annotated[
        str | None, typer.Option(help="How to generate; auto for up to 4 rows and none above if not given.")
    ] = None,
    strategy_args: Annotated[str | None, typer.Option(help="Its settings: name=value,name=value.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are answered together.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; above it, sample.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first accelerator if any.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; by default if there is one.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many prompts only, the first ones.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Leave longer prompts out.")] = None,
) -> None:
    """Let a model answer prompts, and write its answers to a file to train on.

    Needs the extra `train`.
    """
    from hf_specdec.training.answers import AnswerSettings, make_answers

    if strategy is None and strategy_args is not None:
        raise typer.BadParameter("settings need --strategy", param_hint="--strategy-args")
    drafter = None if strategy is None else build_strategy(strategy, strategy_args)
    if drafter is not None and drafter.needs_draft_model:
        raise typer.BadParameter(
            f"{strategy} drafts with a second model, which this command has not", param_hint="--strategy"
        )
    settings = AnswerSettings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    place = resolve_device(device)
    number_format = "auto" if dtype is None else dtype.resolve()
    target = AutoModelForCausalLM.from_pretrained(model, dtype=number_format).to(place)  # type: ignore[arg-type]
    with _progress() as report:
        try:
            counts = make_answers(
                target,
                AutoTokenizer.from_pretrained(model),
                data,
                output,
                settings,
                strategy=drafter,
                batch_size=batch_size,
                chat=chat,
                limit=limit,
                max_prompt_tokens=max_prompt_tokens,
                progress=report,
            )
        except KeyboardInterrupt as interrupt:
            words = (
                f"Stopped. {output} is whole; the same command goes on with it."
                if output.exists()
                else "Stopped before the first answers. The same command begins again."
            )
            message_console().print(Text(words), soft_wrap=True)
            raise typer.Exit(INTERRUPTED) from interrupt
    words = f"{counts.num_answers} answers in {output}: {counts.num_new} new ones, {counts.num_new_tokens} tokens"
    if counts.num_left_out:
        words += f"; {counts.num_left_out} prompts left out as too long"
    message_console().print(Text(words), soft_wrap=True)


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on standard error, with the speed of this run."""
    columns = (
        TextColumn("Answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=message_console()) as bar:
        task = bar.add_task("", total=None, speed="")

        def report(done: int, total: int, tokens: int) -> None:
            if tokens == 0:  # nothing ran yet: a run that goes on is not credited with what it found
                bar.reset(task, total=total, completed=done, speed="")
                return
            seconds = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, speed=f"{tokens / max(seconds, 1e-9):.0f} tokens/s")

        yield report
