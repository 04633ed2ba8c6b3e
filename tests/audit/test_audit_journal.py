from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import audits
import hf_specdec
import zoo
from hf_specdec import ArgumentError, Assisted, Drafter, NoDraft, PromptLookup
from hf_specdec.audit.arms import describe
from hf_specdec.audit.differences import TIE, Difference
from hf_specdec.audit.documents import encode_documents
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
    journal = Journal(path, IDENTITY)
    journal.add("a", 1)
    path.write_bytes(path.read_bytes() + b'{"key": "b", "val')
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


def test_what_others_write_meanwhile_is_read(tmp_path: Path) -> None:
    """And what another one left half written when it was killed is cut off, whoever comes next."""
    path = tmp_path / "journal.jsonl"
    one, other = Journal(path, IDENTITY), Journal(path, IDENTITY)
    one.add("a", 1)
    assert "a" not in other
    with other.claim("some job") as mine:
        assert mine
        assert other["a"] == 1
    with path.open("ab") as file:
        file.write(b'{"key": "b", ')
    other.add("c", 3)
    one.add("d", 4)
    assert one["c"] == 3
    assert len(Journal(path, IDENTITY)) == 3


def test_of_a_piece_that_two_have_done_the_first_counts(tmp_path: Path) -> None:
    """All processes must say the same, also where rounding differs between them."""
    path = tmp_path / "journal.jsonl"
    one, other = Journal(path, IDENTITY), Journal(path, IDENTITY)
    assert one.add("a", 1) == 1
    assert other.add("a", 2) == 1
    assert (one["a"], other["a"], Journal(path, IDENTITY)["a"]) == (1, 1, 1)


def test_another_audit_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, IDENTITY)
    with pytest.raises(ArgumentError, match="differs in: dtype, seed"):
        Journal(path, IDENTITY | {"seed": 2, "dtype": "float32"})


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for text in ("hello\n", "my notes, with no newline", "line 1\nline 2", "{}", "\xff\n"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ArgumentError, match="no journal"):
            Journal(path, IDENTITY)
        assert path.read_text(encoding="latin-1") == text


def test_other_weights_are_another_audit(tmp_path: Path) -> None:
    """Of the same name and shape, such as after a further training."""
    model = audits.make()
    arguments = {"strategies": {"none": NoDraft()}, "changes": {"temperatures": (0.0,), "max_new_tokens": 4}}
    audits.audit(tmp_path, model, **arguments)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] += 1
    with pytest.raises(ArgumentError, match="differs in: weights"):
        audits.audit(tmp_path, model, **arguments)
    model = audits.make()
    audits.audit(tmp_path, model, **arguments)
    model.generation_config.eos_token_id = 5
    with pytest.raises(ArgumentError, match="differs in: weights"):
        audits.audit(tmp_path, model, **arguments)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of all that is computed."""
    keys: list[str] = []
    add = Journal.add

    def noted(self: Journal, key: str, value: object) -> object:
        keys.append(key)
        return add(self, key, value)

    monkeypatch.setattr(Journal, "add", noted)
    return keys


def test_what_is_added_later_leaves_the_rest_as_it_is(tmp_path: Path, pieces: list[str]) -> None:
    """A strategy, a temperature, a document, more tokens: each time only what is new is computed."""
    model = audits.make()
    strategies: dict[str, Drafter] = {"none": NoDraft()}
    changes: dict[str, object] = {
        "temperatures": (1.0,), "law_tokens": 100, "control_tokens": 100, "max_new_tokens": 8, "rows": 8,
    }  # fmt: skip
    documents = audits.DOCUMENTS[:3]

    def new(part: str) -> list[str]:
        pieces.clear()
        audits.audit(tmp_path, model, strategies, changes=changes, documents=documents)
        assert len(set(pieces)) == len(pieces)
        return [key for key in pieces if part not in key]

    assert new("?")
    assert new("?") == []
    strategies["lookup"] = PromptLookup(max_ngram=2)
    assert new("lookup, ") == []
    assert pieces
    strategies["lookup"] = PromptLookup(max_ngram=3)  # of the same name
    assert new("lookup, ") == []
    assert pieces
    changes["temperatures"] = (1.0, 1.5)
    assert new("1.5") == []
    assert pieces
    changes["law_tokens"] = 150
    assert {key.split(",")[0] for key in new("?")} == {"('law'"}
    changes["alpha"] = 1e-2
    assert new("?") == []


def test_other_code_is_another_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was edited without a new version."""
    model = audits.make()
    arguments = {"strategies": {"none": NoDraft()}, "changes": {"temperatures": (0.0,), "max_new_tokens": 4}}
    audits.audit(tmp_path / "run", model, **arguments)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("edited = True\n")
    monkeypatch.setattr(hf_specdec, "__file__", str(package / "__init__.py"))
    with pytest.raises(ArgumentError, match="differs in: code"):
        audits.audit(tmp_path / "run", model, **arguments)


def test_strategies_of_others_are_known_by_code_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code or settings, another arm, whose texts are made anew."""
    monkeypatch.syspath_prepend(tmp_path)
    described = []
    for number, word in enumerate(("one", "two")):
        lines = (
            "from hf_specdec import Drafter",
            f"WORD = {word!r}",
            "class Mine(Drafter):",
            "    def __init__(self, size): self.size, self._call = size, object()",
            "    def propose(self, context): raise NotImplementedError",
        )
        (tmp_path / f"mine_{number}.py").write_text("\n".join(lines))
        module = importlib.import_module(f"mine_{number}")
        described += [describe(module.Mine(size)) for size in (1, 2, 2)]
    assert described[1] == described[2]
    assert len(set(described)) == 4
    assert described[0].startswith("Mine(size=1), code ")
    assert describe(NoDraft()) == "NoDraft()"


def test_another_draft_model_is_another_arm(tmp_path: Path, pieces: list[str]) -> None:
    model = audits.make()
    changes = {"temperatures": (0.0,), "max_new_tokens": 8}
    strategies = {"none": NoDraft(), "assisted": Assisted()}
    for noise in (0.05, 0.1):
        pieces.clear()
        draft = zoo.make_draft(model, noise=noise)
        results = audits.audit(tmp_path, model, strategies, assistant=draft, changes=changes)
        assert results.strategies["assisted"].startswith("Assisted(")
        assert "draft model" in results.strategies["assisted"]
    assert len(pieces) == len(audits.DOCUMENTS)
    assert all("assisted, " in key for key in pieces)


def test_a_place_is_read_once_for_all_strategies(
    tmp_path: Path, pieces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew for another token, another end, another temperature, another document."""
    read: list[list[int]] = []

    def classify(model: object, prompt: object, reference: object, text: list[int], index: int, **options: Any) -> Any:
        read.append(text[index:])
        return Difference(index, 1.0, TIE, 0.5)

    monkeypatch.setattr("hf_specdec.audit.work.classify", classify)
    documents = encode_documents(audits.DOCUMENTS[:2], audits.TOKENIZER, chat=False)
    journal = Journal(tmp_path / "journal.jsonl", IDENTITY)
    work = Work(audits.make(), audits.TOKENIZER, documents, [], audits.settings(max_new_tokens=4), journal)
    for _ in range(2):
        for one in documents:
            for temperature in (0.0, 1.0):
                for text in ([5, 6, 7], [5, 6, 8], [5, 6]):
                    found = work._difference(temperature, one, text, 2)
                    assert found == {"index": 2, "units": 1.0, "kind": TIE, "noise": 0.5, "taken_by_stock": None}
    assert read == [[7], [8], []] * 4
    assert len([key for key in pieces if key.startswith("('difference'")]) == 12


def test_a_killed_audit_goes_on_where_it_stopped(tmp_path: Path, pieces: list[str]) -> None:
    """Killed in every stage; nothing runs twice, and the results are those of a run in one go."""
    model = audits.make()
    strategies = {"none": NoDraft(), "lookup": PromptLookup(max_ngram=2)}
    changes = {"law_tokens": 200, "control_tokens": 200, "max_new_tokens": 8}
    whole = audits.audit(tmp_path / "whole", model, strategies, changes=changes)

    pieces.clear()
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
