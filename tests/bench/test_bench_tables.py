from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hf_specdec import ArgumentError
from hf_specdec.bench import (
    BatchRow,
    MemoryRow,
    Provenance,
    Results,
    SpeedRow,
    read_results,
    report,
    summarize,
    write_results,
)
from hf_specdec.bench.tables import (
    batch_table,
    difference_table,
    memory_table,
    speed_table,
    task_table,
    total_table,
)

STORED = Path(__file__).parents[2] / "evals" / "speed" / "results"
PROVENANCE = Provenance(
    model="tiny",
    draft=None,
    dtype="float32",
    attention="sdpa",
    device="some processor",
    cores=2,
    threads=2,
    versions={"python": "3.11", "torch": "2.13"},
    seed=0,
    date="2026-01-01T00:00:00+00:00",
    command="python run.py",
)


def row(task: str, prompt_id: str, arm: str, seconds: float, forwards: int, **changes: object) -> SpeedRow:
    plain = SpeedRow(
        task=task,
        prompt_id=prompt_id,
        arm=arm,
        prompt_tokens=10,
        new_tokens=12,
        seconds=seconds,
        forward_seconds=seconds / 4,
        target_forwards=forwards,
        draft_forwards=0,
        first_difference=None,
        score_gap=None,
    )
    return replace(plain, **changes)


ROWS = [
    row("qa", "1", "stock", 4.0, 12),
    row("qa", "1", "tree", 1.0, 4, draft_seconds=0.5),
    row("qa", "2", "stock", 6.0, 12),
    row("qa", "2", "tree", 3.0, 6, draft_seconds=0.3, first_difference=5, score_gap=0.0125),
    row("rag", "3", "stock", 12.0, 12),
    row("rag", "3", "tree", 4.0, 3, draft_seconds=0.8),
]


def test_derived_figures() -> None:
    one = ROWS[1]
    assert one.identical
    assert one.tokens_per_second == 12.0
    assert one.tokens_per_forward == 3.0
    assert one.host_share == 0.75
    assert one.draft_share == 0.5
    assert ROWS[0].draft_share is None


def test_summaries_are_medians_of_paired_ratios() -> None:
    summaries = {(one.task, one.arm): one for one in summarize(ROWS)}
    assert list(summaries) == [(task, arm) for task in ("qa", "rag", "overall") for arm in ("stock", "tree")]
    # The ratios of the three prompts are 4, 2 and 3; the ratio of the two medians of tokens per second would be 2.
    assert summaries["overall", "tree"].ratio_to_stock == 3.0
    assert summaries["qa", "tree"].ratio_to_stock == 3.0
    assert summaries["overall", "stock"].ratio_to_stock == 1.0
    assert summaries["overall", "tree"].ratio_to_stock_assisted is None
    assert summaries["overall", "tree"].identical == 2
    assert summaries["overall", "tree"].tokens_per_forward == 3.0
    assert summaries["overall", "tree"].draft_share == 0.2
    assert summaries["overall", "stock"].draft_share is None


def test_speed_table() -> None:
    assert speed_table(ROWS).splitlines() == [
        "| arm | tokens/s | to stock | to stock prompt lookup | to stock assisted | tokens per forward | host share "
        "| drafting | identical |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| stock | 2.0 | 1.00x | - | - | 1.00 | 75% | - | 3/3 |",
        "| tree | 4.0 | 3.00x | - | - | 3.00 | 75% | 20.0% | 2/3 |",
    ]


def test_totals_are_not_medians() -> None:
    assert total_table(ROWS).splitlines() == [
        "| arm | tokens | seconds | to stock | tokens per forward | host share | drafting |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| stock | 36 | 22.0 | 1.00x | 1.00 | 75% | - |",
        "| tree | 36 | 8.0 | 2.75x | 2.77 | 75% | 20.0% |",
    ]


def test_the_ratio_of_totals_is_for_equal_lengths() -> None:
    """Texts may part and end at different lengths."""
    rows = [row("qa", "1", "stock", 4.0, 12), row("qa", "1", "tree", 4.0, 4, new_tokens=24)]
    assert total_table(rows).splitlines()[-1].startswith("| tree | 24 | 4.0 | 2.00x |")


def test_rows_of_older_files_do_not_say_how_long_they_drafted(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    write_results(file, Results(PROVENANCE, ROWS))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line.pop("draft_seconds", None)
        line.pop("preparation_seconds", None)
    file.write_text("\n".join(map(json.dumps, lines)))
    results = read_results(file)
    assert {one.draft_seconds for one in results.speed} == {None}
    assert results.provenance == PROVENANCE
    assert speed_table(results.speed).splitlines()[-1] == "| tree | 4.0 | 3.00x | - | - | 3.00 | 75% | - | 2/3 |"


@pytest.mark.parametrize("file", sorted(STORED.glob("*.jsonl")), ids=lambda file: file.stem)
def test_stored_tables_are_made_of_the_stored_rows(file: Path) -> None:
    assert file.with_suffix(".md").read_text(encoding="utf-8") == report(read_results(file))


def test_task_table_and_differences() -> None:
    assert task_table(ROWS).splitlines()[::2] == [
        "| arm | qa | rag | overall | worst task |",
        "| stock | 1.00x (1.00) | 1.00x (1.00) | 1.00x (1.00) | 1.00x |",
    ]
    assert task_table(ROWS).splitlines()[-1] == "| tree | 3.00x (2.50) | 3.00x (4.00) | 3.00x (3.00) | 3.00x |"
    slower = [*ROWS, row("code", "4", "stock", 1.0, 12), row("code", "4", "tree", 2.0, 12)]
    assert task_table(slower).splitlines()[-1].endswith("| 0.50x |")
    assert "before the first prompt" not in report(Results(PROVENANCE, ROWS))
    assert difference_table(ROWS).splitlines()[2:] == ["| qa | 2 | tree | 5 | 0.0125 |"]


def test_batch_and_memory_tables() -> None:
    batch = BatchRow("tree", rows=8, new_tokens=80, batch_seconds=2.0, single_seconds=8.0, identical_rows=8)
    assert batch_table([batch]).splitlines()[-1] == "| tree | 8 | 40.0 | 10.0 | 4.00x | 8/8 |"
    memory = MemoryRow("tree", 4096, 32, "resident", loaded_bytes=300 * 2**20, peak_bytes=350 * 2**20)
    assert memory_table([memory]).splitlines()[-1] == "| tree | 4096 | resident | 300 | 350 | 50 |"


def test_results_survive_a_file_and_give_the_same_report(tmp_path: Path) -> None:
    results = Results(
        replace(PROVENANCE, preparation_seconds={"the table was filled": 31.04}),
        ROWS,
        [BatchRow("tree", 8, 80, 2.0, 8.0, 8)],
        [MemoryRow("tree", 4096, 32, "resident", 2**20, 2**21)],
    )
    file = tmp_path / "new" / "speed.jsonl"
    write_results(file, results)
    assert read_results(file) == results
    assert report(read_results(file)) == report(results)
    text = report(results)
    for fact in (
        "some processor, 2 cores",
        "`python run.py`",
        "| qa | 2 | tree |",
        "| tree | 8 |",
        "4096",
        "filled, 31.0 s",
    ):
        assert fact in text


def test_a_report_shows_only_what_was_measured() -> None:
    text = report(Results(PROVENANCE, ROWS[:2]))
    for absent in ("differ", "batch", "Memory"):
        assert absent not in text


def test_a_file_without_provenance_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("")
    with pytest.raises(ArgumentError, match=r"other.jsonl"):
        read_results(tmp_path / "other.jsonl")
