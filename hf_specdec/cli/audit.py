"""`hf-specdec audit`: are outputs unchanged?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specdec.bench import takes_heads
from hf_specdec.cli.audit_progress import audit_progress
from hf_specdec.cli.console import command, message_console, output_console
from hf_specdec.cli.names import command_line, public_name
from hf_specdec.cli.options import Dtype, build_named_strategy, resolve_device
from hf_specdec.drafters import Drafter
from hf_specdec.drafts import load_assistant
from hf_specdec.heads import MedusaHeads

if TYPE_CHECKING:
    from hf_specdec.audit import AuditResults

ALL = "all"


@command
def audit(
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of the model.")],
    tasks: Annotated[list[str], typer.Option(help="Files of documents: path or path:count.")],
    output: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder of the report; a run that was stopped goes on from there."),
    ],
    assistant: Annotated[str | None, typer.Option(help="Folder or hub id of the draft model.")] = None,
    heads: Annotated[str | None, typer.Option(help="Folder or hub id of trained heads.")] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            help="Names, as name or name:setting=value,...; all that can run if not given. With heads: auto_heads."
        ),
    ] = None,
    temperatures: Annotated[
        list[float] | None, typer.Option(min=0.0, help="0 0.7 1 if not given; 0 is greedy decoding.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format; differences are faults in float32.")] = Dtype.float32,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first accelerator if any.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longer prompts keep their last tokens.")
    ] = None,
    law_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of each law test at least.")] = 20_000,
    control_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens of each control at least.")] = 4_000,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch in which law tests sample.")] = 8,
    tie_units: Annotated[
        float,
        typer.Option(min=0.0, help="In 16 bit: gap of a tie, in units of rounding; in noisy places up to twice that."),
    ] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; by default if there is one.")] = None,
) -> None:
    """Prove that outputs are unchanged: compare strategies with stock generate, and write a report.

    The same command may run several times at once: the processes share the work, and each ends with the report.

    Exit status 1 if a check fails. Needs the extra `bench`.
    """
    from hf_specdec.audit import AuditSettings, Names, read_all_documents, run_audit, write_report

    settings = AuditSettings(
        temperatures=(0.0, 0.7, 1.0) if temperatures is None else tuple(temperatures),
        max_new_tokens=max_new_tokens,
        law_tokens=law_tokens,
        control_tokens=control_tokens,
        rows=rows,
        seed=seed,
        tie_units=tie_units,
    )
    documents = read_all_documents(tasks)
    loaded = None if heads is None else MedusaHeads.from_pretrained(heads)
    chosen = _strategies(strategies or [ALL], loaded)
    place = resolve_device(device)
    target = _load(model, dtype, place)
    draft = None if assistant is None else load_assistant(assistant, target, dtype=dtype.resolve())
    with audit_progress() as report:
        results = run_audit(
            target,
            AutoTokenizer.from_pretrained(model),
            documents,
            output,
            strategies=chosen,
            assistant=draft,
            heads=loaded if chosen is None else None,
            settings=settings,
            names=Names(public_name(model), None if assistant is None else public_name(assistant), command_line()),
            chat=chat,
            max_prompt_tokens=max_prompt_tokens,
            progress=report,
        )
    write_report(results, output)
    _print_checks(results, output)
    if not results.passed:
        raise typer.Exit(1)


def _load(name: str, dtype: Dtype, place: torch.device) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.resolve())
    model.to(place)  # type: ignore[arg-type]
    return model


def _strategies(names: list[str], heads: MedusaHeads | None) -> dict[str, Drafter] | None:
    """By the name that they were given; None for all."""
    if names == [ALL]:
        return None
    if ALL in names:
        raise typer.BadParameter(f"{ALL!r} stands alone", param_hint="--strategies")
    chosen: dict[str, Drafter] = {}
    for name in names:
        if name in chosen:
            raise typer.BadParameter(f"{name!r} is named twice", param_hint="--strategies")
        chosen[name] = _strategy(name, heads)
    if heads is not None and not any(map(_takes_heads, names)):
        raise typer.BadParameter("none of the strategies uses heads: add medusa or auto_heads", param_hint="--heads")
    return chosen


def _strategy(name: str, heads: MedusaHeads | None) -> Drafter:
    strategy, _, arguments = name.partition(":")
    try:
        return build_named_strategy(strategy, arguments or None, heads)
    except typer.BadParameter as error:
        if error.param_hint != "--heads":  # all the rest is said in this one option
            error.param_hint = "--strategies"
        raise


def _takes_heads(name: str) -> bool:
    return takes_heads(name.partition(":")[0])


def _print_checks(results: AuditResults, output: Path) -> None:
    table = Table(box=None, show_header=False)
    for check in results.checks:
        outcome = Text("passed", style="green") if check.passed else Text("FAILED", style="bold red")
        table.add_row(outcome, Text(check.name), Text(check.detail, style="dim"))
    output_console().print(table)
    message_console().print(Text(f"Report: {output / 'audit.html'}"))
