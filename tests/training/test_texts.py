from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from hf_specdec.errors import ArgumentError
from hf_specdec.training import records
from hf_specdec.training.records import TrainingDependencyError, read_records
from hf_specdec.training.texts import Example, read_examples, split_examples

ROWS = [{"prompt": "the sun", "answer": "follows the sea"}, {"prompt": "a gull", "answer": "sleeps"}]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ 'model' if message['role'] == 'assistant' else 'user' }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """With a template that marks each turn."""
    return with_template(tiny_tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def plain(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    return with_template(tiny_tokenizer, None)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", unk_token="<unk>")
    copy.chat_template = template
    return copy


def words(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


def halves(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[str, str]:
    """The prompt and what is learned."""
    return (
        words(tokenizer, example.input_ids[: example.num_prompt]),
        words(tokenizer, example.input_ids[example.num_prompt :]),
    )


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class TestRecords:
    def write(self, path: Path, rows: list[dict[str, Any]]) -> None:
        if path.suffix == ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        elif path.suffix == ".csv":
            lines = ["prompt,answer", *(f'"{row["prompt"]}",{row["answer"]}' for row in rows)]
            path.write_text("\n".join(lines), encoding="utf-8")
        else:
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
    def test_files(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"data{suffix}"
        self.write(path, ROWS)
        assert [record.values for record in read_records(path)] == ROWS
        assert [record.values for record in read_records(str(path), limit=1)] == ROWS[:1]

    def test_json_may_hold_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "data.json"
        path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
        assert [record.values for record in read_records(path)] == ROWS

    def test_texts_stand_one_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "data.txt"
        path.write_text("the sun\n\n  the sea\n", encoding="utf-8")
        found = read_records(path)
        assert [record.values for record in found] == [{"text": "the sun"}, {"text": "  the sea"}]
        assert [record.where for record in found] == ["data.txt, line 1", "data.txt, line 3"]

    def test_folders_in_the_order_of_names(self, tmp_path: Path) -> None:
        (tmp_path / "more").mkdir()
        self.write(tmp_path / "more" / "b.jsonl", ROWS[:1])
        self.write(tmp_path / "a.csv", ROWS[1:])
        (tmp_path / "notes.md").write_text("nothing to read", encoding="utf-8")
        assert [record.values for record in read_records(tmp_path)] == [ROWS[1], ROWS[0]]

    def test_saved_data_sets(self, tmp_path: Path) -> None:
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
        assert [record.values for record in read_records(tmp_path / "one")] == ROWS
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "several")
        with pytest.raises(ArgumentError, match="several holds several splits; name the folder of one"):
            read_records(tmp_path / "several")
        assert [record.values for record in read_records(tmp_path / "several" / "train")] == ROWS

    def test_damaged_saved_data_sets_are_named(self, tmp_path: Path) -> None:
        datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "talks")
        for content in ("{", "{}", "[]"):
            (tmp_path / "talks" / "state.json").write_text(content, encoding="utf-8")
            with pytest.raises(ArgumentError, match="talks looks like a saved data set and cannot be loaded: "):
                read_records(tmp_path / "talks")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.csv", "prompt,answer\na,b\n"),
            ("a.jsonl", '{"prompt": "a", "answer": "b"}\n'),
            ("a.json", '[{"prompt": "a", "answer": "b"}]'),
            ("b.json", '{"prompt": "a", "answer": "b"}\n'),
        ],
    )
    def test_a_byte_order_mark_is_no_part_of_a_name(self, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert [record.values for record in read_records(tmp_path / name)] == [{"prompt": "a", "answer": "b"}]

    def test_a_byte_order_mark_is_no_part_of_a_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("the sun\n", encoding="utf-8-sig")
        assert read_records(tmp_path / "a.txt")[0].values == {"text": "the sun"}

    def test_rows_in_memory(self) -> None:
        assert [record.values for record in read_records(ROWS)] == ROWS
        found = read_records(datasets.Dataset.from_list(ROWS))
        assert [record.values for record in found] == ROWS
        assert found[1].where == "row 2"

    @pytest.mark.parametrize(
        ("name", "limit", "asked"),
        [
            ("owner/talks", None, ("owner/talks", None, "train", False)),
            ("owner/talks:test", 1, ("owner/talks", None, "test", True)),
            ("owner/talks:english:test", None, ("owner/talks", "english", "test", False)),
        ],
    )
    def test_data_sets_of_the_hub(
        self, monkeypatch: pytest.MonkeyPatch, name: str, limit: int | None, asked: tuple[Any, ...]
    ) -> None:
        calls = []

        def load_dataset(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
            calls.append((name, configuration, split, streaming))
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        found = read_records(name, limit)
        assert calls == [asked]
        assert [record.values for record in found] == ROWS[:limit]
        assert found[0].where == f"{name}, row 1"

    def test_a_name_that_is_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'talks' doesn't exist\non the hub")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(
            ArgumentError, match=r"'talks' is no file or folder here, .* loaded: Dataset 'talks' doesn't"
        ):
            read_records("talks")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl, line 2: not JSON: Expecting value"),
            ("a.jsonl", "\n[1]\n", r"a.jsonl, line 2: expected a JSON object .* not \[1\]"),
            ("a.json", "[1, 2", "a.json: not JSON"),
            ("a.json", '[{"a": 1}, 2]', "a.json, element 2: expected a JSON object .* not 2"),
            ("a.csv", "a,b\n1,2\n1\n", "a.csv, line 3: not as many fields as the header has columns"),
            ("a.csv", "a,b\n1,2,3\n", "a.csv, line 2: not as many fields"),
            ("a.csv", 'a,b\n1,"2" 3\n', "a.csv, line 2: not CSV"),
            ("a.parquet", "a,b\n", "a.parquet: not a parquet file"),
            ("a.txt", b"\xff\xfe", "a.txt is not a text in UTF-8: invalid start byte at byte 0"),
            ("a.jsonl", "\n", "a.jsonl holds no rows"),
            ("a.xml", "<a/>", "a.xml: expected a file that ends in .jsonl, .json, .csv, .parquet, .txt"),
        ],
    )
    def test_what_cannot_be_read_is_named(self, tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ArgumentError, match=message):
            read_records(tmp_path / name)

    def test_what_is_not_there_is_named(self, tmp_path: Path) -> None:
        for missing in (tmp_path / "talks", str(tmp_path / "talks"), "talks.jsonl"):
            with pytest.raises(ArgumentError, match="there is no file or folder .*talks"):
                read_records(missing)
        with pytest.raises(ArgumentError, match="holds no file that ends in .jsonl"):
            read_records(tmp_path)
        with pytest.raises(ArgumentError, match="the data set holds no rows"):
            read_records([])
        with pytest.raises(ArgumentError, match="row 1 of the data set must be a dictionary by column, not 'the sun'"):
            read_records(["the sun"])  # type: ignore[list-item]
        with pytest.raises(ArgumentError, match="data=5 must be a file, a folder"):
            read_records(5)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="limit=0 must be at least 1"):
            read_records(ROWS, limit=0)

    def test_missing_packages_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(records.importlib.util, "find_spec", lambda name: None)
        (tmp_path / "a.parquet").touch()
        for data in (tmp_path / "a.parquet", "owner/talks"):
            with pytest.raises(TrainingDependencyError, match=r"pip install 'hf_specdec\[train\]'"):
                read_records(data)


class TestExamples:
    def test_prompt_and_answer_in_the_template(self, chatty: PreTrainedTokenizerFast) -> None:
        first, second = read_examples(ROWS, chatty)
        assert halves(chatty, first) == ("<user> the sun <eos> <model>", "follows the sea <eos>")
        assert halves(chatty, second) == ("<user> a gull <eos> <model>", "sleeps <eos>")
        assert first.num_learned == 4

    def test_prompt_and_answer_as_they_are(
        self, chatty: PreTrainedTokenizerFast, plain: PreTrainedTokenizerFast
    ) -> None:
        (first, _), by_default = read_examples(ROWS, chatty, chat=False), read_examples(ROWS, plain)
        assert halves(chatty, first) == ("the sun", "follows the sea <eos>")
        assert by_default[0] == first

    def test_what_a_template_writes_behind_the_end_is_left_out(self, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
        longer = with_template(tiny_tokenizer, TEMPLATE.replace("<eos> {%", "<eos> . {%"))
        first, _ = read_examples(ROWS, longer)
        assert halves(longer, first) == ("<user> the sun <eos> . <model>", "follows the sea <eos>")
        endless = with_template(tiny_tokenizer, TEMPLATE.replace("<eos> {%", ". {%"))
        first, _ = read_examples(ROWS, endless)
        assert halves(endless, first) == ("<user> the sun . <model>", "follows the sea .")

    def test_conversations_end_with_the_last_answer(self, chatty: PreTrainedTokenizerFast) -> None:
        talk = [say("user", "a"), say("assistant", "b"), say("user", "sea"), say("assistant", "sun")]
        talk = [say(one["role"], one["content"].replace("b", "boat")) for one in talk]
        (example,) = read_examples([{"messages": [*talk, say("user", "then")]}], chatty)
        asked = "<user> a <eos> <model> boat <eos> <user> sea <eos> <model>"
        assert halves(chatty, example) == (asked, "sun <eos>")
        (same,) = read_examples([{"prompt": talk[:3], "answer": "sun"}], chatty)
        assert same == example

    def test_ids_are_taken_as_they_are(self) -> None:
        rows = [{"prompt_ids": [5, 6], "answer_ids": [7], "prompt": "something", "answer": "else"}]
        assert read_examples(rows) == [Example([5, 6, 7], 2)]

    def test_texts_are_learned_from_their_start(self, plain: PreTrainedTokenizerFast) -> None:
        (example,) = read_examples([{"text": "the sun sleeps"}], plain)
        assert halves(plain, example) == ("", "the sun sleeps")
        assert example.num_learned == 2

    def test_length(self, plain: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
        rows = [
            {"prompt_ids": [5], "answer_ids": [6, 7, 8]},
            {"prompt_ids": [5, 6, 7], "answer_ids": [8]},
            {"text": "the sun follows a sail at night"},
        ]
        found = read_examples(rows, plain, max_length=3)
        assert found[0] == Example([5, 6, 7], 1)
        assert [words(plain, one.input_ids) for one in found[1:]] == ["the sun follows", "a sail at"]
        assert "2 of 5 examples are left out: no token to learn within 3 tokens" in caplog.text

    def test_limit(self) -> None:
        rows = [{"prompt_ids": [5], "answer_ids": [6]}] * 3
        assert len(read_examples(rows, limit=2)) == 2

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"question": "a", "reply": "b"}, "row 1: expected columns prompt_ids .* found question, reply"),
            ({"prompt": "a"}, "row 1: a prompt without an answer; .* hf-specdec make-data"),
            ({"prompt": "a", "answer": 7}, "row 1, column 'answer': must be a text, not 7"),
            ({"prompt": ["a"], "answer": "b"}, "row 1, column 'prompt': must be a text or a list of chat messages"),
            ({"prompt_ids": [1, True], "answer_ids": [2]}, "row 1, column 'prompt_ids': must be a list of token ids"),
            (
                {"prompt_ids": [1], "answer_ids": "2"},
                "row 1, column 'answer_ids': must be a list of token ids, not '2'",
            ),
            ({"messages": []}, "row 1, column 'messages': must be a list of chat messages"),
            ({"messages": [{"role": "user", "content": ["a"]}]}, "row 1, column 'messages': must be a list of chat"),
            ({"messages": [say("user", "a")]}, "row 1, column 'messages': holds no message of the assistant"),
            ({"text": ["a"]}, "row 1, column 'text': must be a text"),
            (
                {"messages": [say("user", "a"), say("system", "b"), say("assistant", "c")]},
                "row 1: the chat template refuses these messages: system comes first",
            ),
        ],
    )
    def test_wrong_rows_are_named(self, chatty: PreTrainedTokenizerFast, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            read_examples([row], chatty)

    def test_the_line_of_a_file_is_named(self, chatty: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        path = tmp_path / "talks.jsonl"
        path.write_text("\n".join(map(json.dumps, [ROWS[0], {"prompt": "a", "answer": None}])), encoding="utf-8")
        with pytest.raises(ArgumentError, match=r"talks.jsonl, line 2: a prompt without an answer"):
            read_examples(path, chatty)

    def test_a_template_that_hides_where_answers_begin(self, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ArgumentError, match=r"row 1: the chat template .* does not show where the answer begins"):
            read_examples(ROWS, tiny_tokenizer)
        assert len(read_examples(ROWS, tiny_tokenizer, chat=False)) == 2

    def test_templates_that_are_missing(self, plain: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ArgumentError, match=r"no chat template: pass chat=False"):
            read_examples(ROWS, plain, chat=True)
        with pytest.raises(ArgumentError, match="row 1: chat messages need a tokenizer with a chat template"):
            read_examples([{"messages": [say("user", "a"), say("assistant", "b")]}], plain)
        with pytest.raises(ArgumentError, match="row 1: no prompt_ids and answer_ids, so a tokenizer is needed"):
            read_examples(ROWS)

    def test_nothing_to_learn(self, plain: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ArgumentError, match="no example has a token to learn within max_length=2"):
            read_examples([{"prompt_ids": [5, 6], "answer_ids": [7]}], max_length=2)
        with pytest.raises(ArgumentError, match="no example has a token to learn$"):
            read_examples([{"text": "sun"}], plain)
        with pytest.raises(ArgumentError, match="max_length=1 must be at least 2"):
            read_examples(ROWS, plain, max_length=1)


class TestSplit:
    @staticmethod
    def examples(count: int) -> list[Example]:
        return [Example([index, 500 + index, 501], 1) for index in range(count)]

    def test_all_are_somewhere(self) -> None:
        whole = self.examples(100)
        train, held_out = split_examples(whole, 0.1)
        assert (len(train), len(held_out)) == (90, 10)
        assert sorted(one.input_ids for one in train + held_out) == sorted(one.input_ids for one in whole)
        assert split_examples(whole, 0.1) == (train, held_out)
        assert split_examples(whole, 0.1, seed=1)[1] != held_out

    def test_one_prompt_is_on_one_side(self) -> None:
        whole = [Example([index // 4, 500 + index], 1) for index in range(40)]
        train, held_out = split_examples(whole, 0.2)
        assert len(held_out) == 8
        assert not {one.input_ids[0] for one in train} & {one.input_ids[0] for one in held_out}

    def test_more_data_move_few(self) -> None:
        before = {one.input_ids[0] for one in split_examples(self.examples(1000), 0.1)[1]}
        after = {one.input_ids[0] for one in split_examples(self.examples(1100), 0.1)[1]}
        assert len(before - after) < 20

    def test_at_least_one_is_held_out(self) -> None:
        assert len(split_examples(self.examples(3), 0.01)[1]) == 1

    @pytest.mark.parametrize("share", [0, 1, -0.1, 5])
    def test_shares(self, share: float) -> None:
        with pytest.raises(ArgumentError, match=f"held_out={share} must be a share between 0 and 1"):
            split_examples(self.examples(3), share)

    def test_one_prompt_cannot_be_divided(self) -> None:
        with pytest.raises(ArgumentError, match="3 examples with 1 different prompts cannot be divided"):
            split_examples([Example([1, 2], 1), Example([1, 3], 1), Example([1, 4], 1)], 0.5)
