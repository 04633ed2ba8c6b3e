from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import audits
from hf_specdec import ArgumentError
from hf_specdec.audit import AuditSettings, Document, read_all_documents, read_documents
from hf_specdec.audit.documents import encode_documents, mixed
from hf_specdec.audit.metrics import is_right


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def question(number: int, category: str) -> dict[str, object]:
    return {"question_id": number, "category": category, "turns": [f"turn {number}", "later"]}


def test_spec_bench_takes_the_tasks_in_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", *(question(i, "qa" if i < 4 else "rag") for i in range(6)), question(9, "stem"))
    documents = read_documents(path, 5)
    assert [one.document_id for one in documents] == ["q/0", "q/4", "q/9", "q/1", "q/5"]
    assert documents[2] == Document("mt_bench", "q/9", "turn 9")
    assert len(read_documents(path)) == 7


def test_gsm8k_knows_the_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "gsm.jsonl", {"question": "How many?", "answer": "So it is\n#### 1,200"})
    assert read_documents(path) == [Document("gsm", "gsm/1", "How many?", "1,200")]


def test_bare_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "Sail"}, {"prompt": "Row"})
    assert [one.text for one in read_all_documents([f"{path}:1"])] == ["Sail"]
    assert len(read_all_documents([str(path)])) == 2


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "at least one file"),
        (["{folder}/none.jsonl"], "no file at"),
        (["{folder}/p.jsonl:many"], "number of documents"),
        (["{folder}/p.jsonl:0"], "number of documents"),
        (["{folder}/p.jsonl:²"], "number of documents"),
        (["{folder}/p.jsonl:3"], "holds 1 documents, not 3"),
        (["{folder}/bad.jsonl"], "bad.jsonl, line 2"),
        (["{folder}/half.jsonl"], "half.jsonl, line 1: .*surrogates not allowed"),
        (["{folder}/p.jsonl", "{folder}/p.jsonl:1"], "p is given twice"),
        (["{folder}/same.jsonl"], "same.jsonl, line 2: same/2 is taken"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, sources: list[str], message: str) -> None:
    write(tmp_path / "p.jsonl", {"prompt": "Sail"})
    write(tmp_path / "bad.jsonl", {"prompt": "Sail"}, {"prompt": 3})
    write(tmp_path / "half.jsonl", {"prompt": "\ud800"})
    write(tmp_path / "same.jsonl", question(2, "qa"), {"prompt": "Row"})
    with pytest.raises(ArgumentError, match=message):
        read_all_documents([source.format(folder=tmp_path) for source in sources])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "test.jsonl", {"prompt": folder})
    write(tmp_path / "other.jsonl", {"prompt": "c"})
    sources = [str(tmp_path / name) for name in ("a/test.jsonl", "b/test.jsonl:1", "other.jsonl")]
    assert [(one.document_id, one.text) for one in read_all_documents(sources)] == [
        ("a/test/1", "a"), ("b/test/1", "b"), ("other/1", "c"),
    ]  # fmt: skip


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """A byte order mark, both kinds of line end, and signs inside a text that Python too takes for line ends."""
    text = "one\u2028two\u0085three"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), "", json.dumps({"prompt": "Row"})]
    path = tmp_path / "p.jsonl"
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert read_documents(path) == [Document("p", "p/1", text), Document("p", "p/3", "Row")]


def test_other_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "Möwe"}'.encode("latin-1"))
    with pytest.raises(ArgumentError, match=r"p.jsonl is not a text in UTF-8: .* at byte 13"):
        read_documents(path)


@pytest.mark.parametrize("number", [0, -1, 1.0, True])
def test_numbers_below_one_are_refused(number: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "Sail"}, {"prompt": "Row"})
    with pytest.raises(ArgumentError, match="count="):
        read_documents(path, number)
    with pytest.raises(ArgumentError, match="max_prompt_tokens="):
        encode_documents(read_documents(path), audits.TOKENIZER, chat=False, max_prompt_tokens=number)


def test_documents_that_cannot_be_continued() -> None:
    for documents, message in (
        ([], "at least one document"),
        ([Document("a", "1", "")], "document 1 is empty"),
        ([Document("a", "1", "x"), Document("b", "1", "y")], "two documents are called '1'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            encode_documents(documents, audits.TOKENIZER, chat=False)


def test_long_prompts_keep_their_end() -> None:
    (one,) = encode_documents([Document("a", "1", "abcdef")], audits.TOKENIZER, chat=False, max_prompt_tokens=2)
    assert audits.TOKENIZER.decode(one.input_ids[0]) == "ef"


def test_the_key_follows_text_and_encoding() -> None:
    document = Document("a", "1", "abc")
    keys = {
        encode_documents([one], audits.TOKENIZER, chat=chat)[0].key
        for one, chat in ((document, False), (document, True), (Document("a", "1", "abd"), False))
    }
    assert len(keys) == 3


def test_tasks_are_mixed_in_proportion() -> None:
    documents = [Document("many", f"m{i}", "x") for i in range(6)] + [Document("few", f"f{i}", "x") for i in range(3)]
    names = [one.document.document_id for one in mixed(encode_documents(documents, audits.TOKENIZER, chat=False))]
    assert names == ["m0", "f0", "m1", "m2", "f1", "m3", "m4", "f2", "m5"]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so 12 + 6 = 18", True),
        ("$18.00.", True),
        ("18 or 19", False),
        ("eighteen", False),
        ("1,8", True),
        ("-18", False),
    ],
)
def test_marks(text: str, right: bool) -> None:
    assert is_right(text, "18") is right


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": ()},
        {"temperatures": (0.5, 0.5)},
        {"temperatures": (-1.0,)},
        {"temperatures": (0.5, float("nan"))},
        {"temperatures": (float("inf"),)},
        {"temperatures": 0.5},
        {"temperatures": ("warm",)},
        {"law_tokens": 0},
        {"rows": 1.5},
        {"seed": "a"},
        {"alpha": 1.0},
        {"alpha": "x"},
        {"tie_units": -1.0},
        {"tie_units": float("inf")},
        {"tie_units": "x"},
    ],
)
def test_settings_are_checked(changes: dict[str, object]) -> None:
    (name,) = changes
    with pytest.raises(ArgumentError, match=name):
        AuditSettings(**changes)


def test_seeds_depend_on_the_piece_of_work_alone() -> None:
    settings = AuditSettings()
    assert settings.seed_of("law", 0.7, 3) == AuditSettings(rows=2).seed_of("law", 0.7, 3)
    assert (
        len({settings.seed_of("law", 0.7, i) for i in range(100)} | {AuditSettings(seed=1).seed_of("law", 0.7, 0)})
        == 101
    )
