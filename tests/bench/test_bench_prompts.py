from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hf_specdec import ArgumentError
from hf_specdec.bench import Prompt, encode_prompt, read_prompts, select_prompts

FOLDER = Path(__file__).parents[2] / "evals" / "speed"


def test_mt_bench_subjects_become_one_task(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"question_id": 161, "category": "qa", "turns": ["why"]},
    ]
    file.write_text("\n".join(map(json.dumps, questions)) + "\n\n")
    assert read_prompts(file) == [Prompt("mt_bench", "81", "first"), Prompt("qa", "161", "why")]


@pytest.mark.parametrize(
    "line", ["no json", '{"category": "qa"}', '{"question_id": 1, "category": "qa", "turns": []}']
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["why"]}\n' + line)
    with pytest.raises(ArgumentError, match=r"questions.jsonl, line 2"):
        read_prompts(file)


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """A byte order mark is none of the text, and a line separator within a text is."""
    path = tmp_path / "prompts.jsonl"
    record = {"question_id": 1, "category": "qa", "turns": ["one\u2028two\x85three"]}
    path.write_text(json.dumps(record, ensure_ascii=False) + "\r\n\n", encoding="utf-8-sig")
    assert [prompt.text for prompt in read_prompts(path)] == record["turns"]


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ArgumentError, match="no file at"):
        read_prompts(path)
    path.write_bytes(b"{\xff}")
    with pytest.raises(ArgumentError, match=r"prompts\.jsonl is not a text in UTF-8"):
        read_prompts(path)


def test_selection_takes_the_first_short_prompts_of_each_task(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [
        Prompt("qa", "1", "boat " * 50),
        Prompt("qa", "2", "gull"),
        Prompt("rag", "3", "sea"),
        Prompt("qa", "4", "wind"),
        Prompt("qa", "5", "sail"),
    ]
    chosen = select_prompts(prompts, tiny_tokenizer, per_task=2, max_tokens=20)
    assert [prompt.prompt_id for prompt in chosen] == ["2", "4", "3"]


def test_encoding_uses_the_chat_template_unless_told_otherwise(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert tiny_tokenizer.decode(encode_prompt(tiny_tokenizer, "the boat")[0]) == "<user> the boat <model>"
    assert tiny_tokenizer.decode(encode_prompt(tiny_tokenizer, "the boat", chat=False)[0]) == "the boat"


def test_chat_without_a_template_is_refused(tiny_model_folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, "the boat").shape == (1, 2)
    with pytest.raises(ArgumentError, match="--no-chat"):
        encode_prompt(tokenizer, "the boat", chat=True)


def test_the_built_in_prompts_cover_every_task() -> None:
    tasks = Counter(prompt.task for prompt in read_prompts(FOLDER / "prompts.jsonl"))
    assert tasks == dict.fromkeys(["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"], 2)


def test_the_repeated_prompts_ask_everything_three_times_wording_by_wording() -> None:
    prompts = read_prompts(FOLDER / "prompts_repeated.jsonl")
    assert [(prompt.task, prompt.prompt_id) for prompt in prompts] == [
        (f"wording {wording}", str(question)) for wording in (1, 2, 3) for question in range(1, 21)
    ]
    assert len({prompt.text for prompt in prompts}) == 60


def test_the_structured_prompts_cover_code_lists_tables_and_records() -> None:
    tasks = Counter(prompt.task for prompt in read_prompts(FOLDER / "prompts_structured.jsonl"))
    assert tasks == {"code": 5, "list": 2, "table": 1, "json": 2}
