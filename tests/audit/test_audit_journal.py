from __future__ import annotations

from pathlib import Path

import pytest

import audits
from hf_specdec import ArgumentError, NoDraft, PromptLookup
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.work import Work

IDENTITY = {"seed": 1, "temperatures": (0.0, 1.0)}


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal.jsonl"
    journal = Journal(path, IDENTITY)
    assert journal.add("a", {"pair": (1, 2)}) == {"pair": [1, 2]}
    again = Journal(path, IDENTITY)
    assert len(again) == 1
    assert again["a"] == {"pair": [1, 2]}
    assert "b" not in again


def test_a_line_that_was_being_written_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, IDENTITY).add("a", 1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "b", "val')
    journal = Journal(path, IDENTITY)
    assert "a" in journal
    assert "b" not in journal
    journal.add("c", 2)
    assert Journal(path, IDENTITY)["c"] == 2


def test_killed_before_the_first_line_was_complete(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"aud')
    assert len(Journal(path, IDENTITY)) == 0
    assert len(Journal(path, IDENTITY)) == 0


def test_another_audit_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, IDENTITY)
    with pytest.raises(ArgumentError, match="differs in: dtype, seed"):
        Journal(path, IDENTITY | {"seed": 2, "dtype": "float32"})


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ArgumentError, match="no journal"):
        Journal(path, IDENTITY)


def test_a_killed_audit_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in every stage; nothing runs twice, and the results are those of a run in one go."""
    model = audits.make()
    strategies = {"none": NoDraft(), "lookup": PromptLookup(max_ngram=2)}
    changes = {"law_tokens": 200, "control_tokens": 200, "max_new_tokens": 8}
    whole = audits.audit(tmp_path / "whole", model, strategies, changes=changes)

    pieces: list[str] = []
    add = Journal.add

    def noted(self: Journal, key: str, value: object) -> object:
        pieces.append(key)
        return add(self, key, value)

    monkeypatch.setattr(Journal, "add", noted)
    for stage in ("token identity", "law of sampled tokens", "negative controls"):

        def kill(now: str, done: int, total: int, stage: str = stage) -> None:
            if now == stage and 2 * done > total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            audits.audit(tmp_path / "killed", model, strategies, changes=changes, progress=kill)
    resumed = audits.audit(tmp_path / "killed", model, strategies, changes=changes)

    assert len(set(pieces)) == len(pieces)
    assert resumed.tests == whole.tests
    assert resumed.identity == whole.identity
    assert resumed.controls == whole.controls


def test_a_finished_audit_runs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = audits.make()
    changes = {"temperatures": (0.0,), "max_new_tokens": 4}
    first = audits.audit(tmp_path, model, {"none": NoDraft()}, changes=changes)

    def refuse(*arguments: object) -> None:
        raise AssertionError("ran again")

    monkeypatch.setattr(Work, "_generate", refuse)
    assert audits.audit(tmp_path, model, {"none": NoDraft()}, changes=changes).checks == first.checks
