"""Markdown tables: pure functions of measured rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from hf_specdec.bench.arms import STOCK, STOCK_ASSISTED, STOCK_PROMPT_LOOKUP
from hf_specdec.bench.provenance import Provenance
from hf_specdec.bench.rows import BatchRow, MemoryRow, Results, SpeedRow

OVERALL = "overall"
_MISSING = "-"


@dataclass(frozen=True)
class Summary:
    """Medians over the prompts of one task (or of all: `OVERALL`) for one arm.

    The ratios are medians of per-prompt ratios of tokens per second; None where the arm compared with was not run.
    The share of drafting is None where no row knows it.
    """

    task: str
    arm: str
    prompts: int
    tokens_per_second: float
    tokens_per_forward: float
    host_share: float
    draft_share: float | None
    identical: int
    ratio_to_stock: float | None
    ratio_to_stock_prompt_lookup: float | None
    ratio_to_stock_assisted: float | None


def summarize(rows: Sequence[SpeedRow]) -> list[Summary]:
    """One summary for each task and arm, tasks and arms in order of appearance, `OVERALL` last."""
    by_key = {(row.prompt_id, row.task, row.arm): row for row in rows}

    def ratio(chosen: list[SpeedRow], base: str) -> float | None:
        pairs = [(row, by_key.get((row.prompt_id, row.task, base))) for row in chosen]
        return _median(row.tokens_per_second / other.tokens_per_second for row, other in pairs if other is not None)

    summaries = []
    for task in [*_unique(row.task for row in rows), OVERALL]:
        for arm in _unique(row.arm for row in rows):
            chosen = [row for row in rows if row.arm == arm and task in (row.task, OVERALL)]
            if not chosen:
                continue
            summaries.append(
                Summary(
                    task=task,
                    arm=arm,
                    prompts=len(chosen),
                    tokens_per_second=median(row.tokens_per_second for row in chosen),
                    tokens_per_forward=median(row.tokens_per_forward for row in chosen),
                    host_share=median(row.host_share for row in chosen),
                    draft_share=_median(row.draft_share for row in chosen),
                    identical=sum(row.identical for row in chosen),
                    ratio_to_stock=ratio(chosen, STOCK),
                    ratio_to_stock_prompt_lookup=ratio(chosen, STOCK_PROMPT_LOOKUP),
                    ratio_to_stock_assisted=ratio(chosen, STOCK_ASSISTED),
                )
            )
    return summaries


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """The overall table: one line for each arm."""
    header = [
        "arm",
        "tokens/s",
        "to stock",
        "to stock prompt lookup",
        "to stock assisted",
        "tokens per forward",
        "host share",
        "drafting",
        "identical",
    ]
    lines = [
        [
            summary.arm,
            f"{summary.tokens_per_second:.1f}",
            _ratio(summary.ratio_to_stock),
            _ratio(summary.ratio_to_stock_prompt_lookup),
            _ratio(summary.ratio_to_stock_assisted),
            f"{summary.tokens_per_forward:.2f}",
            f"{summary.host_share:.0%}",
            _share(summary.draft_share),
            f"{summary.identical}/{summary.prompts}",
        ]
        for summary in summarize(rows)
        if summary.task == OVERALL
    ]
    return markdown_table(header, lines)


def total_table(rows: Sequence[SpeedRow]) -> str:
    """Sums over all prompts, one line for each arm. Long texts count for more here, and outliers count at all."""
    stock = [row for row in rows if row.arm == STOCK]
    lines = []
    for arm in _unique(row.arm for row in rows):
        chosen = [row for row in rows if row.arm == arm]
        seconds = sum(row.seconds for row in chosen)
        draft_seconds = [row.draft_seconds for row in chosen if row.draft_seconds is not None]
        lines.append(
            [
                arm,
                str(sum(row.new_tokens for row in chosen)),
                f"{seconds:.1f}",
                _ratio(_seconds_per_token(stock) / _seconds_per_token(chosen) if stock else None),
                f"{sum(row.new_tokens for row in chosen) / sum(row.target_forwards for row in chosen):.2f}",
                f"{1.0 - sum(row.forward_seconds for row in chosen) / seconds:.0%}",
                _share(sum(draft_seconds) / seconds if len(draft_seconds) == len(chosen) else None),
            ]
        )
    header = ["arm", "tokens", "seconds", "to stock", "tokens per forward", "host share", "drafting"]
    return markdown_table(header, lines)


def task_table(rows: Sequence[SpeedRow]) -> str:
    """Ratio of tokens per second to stock plain generation, then tokens per forward: arms by tasks; the worst task."""
    summaries = {(summary.task, summary.arm): summary for summary in summarize(rows)}
    tasks = _unique(task for task, _ in summaries)
    lines = []
    for arm in _unique(arm for _, arm in summaries):
        cells = [summaries.get((task, arm)) for task in tasks]
        worst = min(
            (cell.ratio_to_stock for cell in cells[:-1] if cell is not None and cell.ratio_to_stock is not None),
            default=None,
        )
        lines.append([arm, *(_task_cell(cell) for cell in cells), _ratio(worst)])
    return markdown_table(["arm", *tasks, "worst task"], lines)


def difference_table(rows: Sequence[SpeedRow]) -> str:
    """Every text that differs from stock plain generation, with the gap of the scores at its first differing token."""
    lines = [
        [row.task, row.prompt_id, row.arm, str(row.first_difference), _gap(row.score_gap)]
        for row in rows
        if not row.identical
    ]
    return markdown_table(["task", "prompt", "arm", "first difference", "score gap"], lines)


def batch_table(rows: Sequence[BatchRow]) -> str:
    """One line for each arm: a batch beside the same prompts one by one."""
    header = ["arm", "rows", "batch tokens/s", "single tokens/s", "batch to single", "identical"]
    lines = [
        [
            row.arm,
            str(row.rows),
            f"{row.new_tokens / row.batch_seconds:.1f}",
            f"{row.new_tokens / row.single_seconds:.1f}",
            _ratio(row.single_seconds / row.batch_seconds),
            f"{row.identical_rows}/{row.rows}",
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


def memory_table(rows: Sequence[MemoryRow]) -> str:
    """One line for each arm: what generation adds to the memory of a process that has loaded its models."""
    header = ["arm", "context tokens", "memory", "loaded MiB", "peak MiB", "growth MiB"]
    lines = [
        [
            row.arm,
            str(row.context_tokens),
            row.kind,
            *(f"{count / 2**20:.0f}" for count in (row.loaded_bytes, row.peak_bytes, row.growth_bytes)),
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


def provenance_lines(provenance: Provenance) -> str:
    """What was measured and where, as a Markdown list."""
    versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
    preparation = provenance.preparation_seconds.items()
    return "\n".join(
        [
            f"- model: {provenance.model}, {provenance.dtype}, attention {provenance.attention}",
            f"- draft: {provenance.draft or 'none'}",
            f"- machine: {provenance.device}, {provenance.cores} cores, {provenance.threads} threads",
            f"- versions: {versions}",
            f"- seed {provenance.seed}, {provenance.date}",
            f"- command: `{provenance.command}`",
            *(f"- before the first prompt: {what}, {took:.1f} s" for what, took in preparation),
        ]
    )


def report(results: Results) -> str:
    """The whole run as Markdown: provenance and a table for each part that was measured."""
    parts = [provenance_lines(results.provenance)]
    if results.speed:
        parts += [
            "Medians over all prompts; the ratios are medians of per-prompt ratios of tokens per second.",
            speed_table(results.speed),
            "Totals: all tokens, all seconds, all forwards; the ratio is stock's seconds per token over the arm's.",
            total_table(results.speed),
            "Ratio to stock plain generation by task, with tokens per forward in brackets.",
            task_table(results.speed),
        ]
        if not all(row.identical for row in results.speed):
            parts += ["Texts that differ from stock plain generation.", difference_table(results.speed)]
    if results.batch:
        parts += ["One batch beside the same prompts one by one.", batch_table(results.batch)]
    if results.memory:
        parts += ["Memory of a fresh process.", memory_table(results.memory)]
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *lines])


def _task_cell(summary: Summary | None) -> str:
    if summary is None:
        return _MISSING
    return f"{_ratio(summary.ratio_to_stock)} ({summary.tokens_per_forward:.2f})"


def _seconds_per_token(rows: Sequence[SpeedRow]) -> float:
    return sum(row.seconds for row in rows) / sum(row.new_tokens for row in rows)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _share(value: float | None) -> str:
    return _optional(lambda number: f"{number:.1%}", value)


def _optional(form: Callable[[float], str], value: float | None) -> str:
    return _MISSING if value is None else form(value)


def _ratio(value: float | None) -> str:
    return _optional(lambda number: f"{number:.2f}x", value)


def _gap(value: float | None) -> str:
    return _optional(lambda number: f"{number:.4f}", value)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
