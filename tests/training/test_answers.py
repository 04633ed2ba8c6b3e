from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
)
from typer.testing import CliRunner

import hf_specdec
from hf_specdec import KeyedSampler
from hf_specdec.cli.app import app
from hf_specdec.errors import ArgumentError
from hf_specdec.training import answers
from hf_specdec.training.answers import AnswerSettings, make_answers, read_prompts
from hf_specdec.training.texts import read_examples
from tiny_folder import WORDS

SHORT = AnswerSettings(max_new_tokens=8)
SAMPLED = AnswerSettings(max_new_tokens=8, temperature=1.5, seed=3)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Eleven prompts of different lengths."""
    choose = random.Random(0)
    return [{"prompt": " ".join(choose.choices(WORDS, k=2 + 5 * (i % 3))), "task": f"t{i}"} for i in range(11)]


@pytest.fixture
def ends_often(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Half of the vocabulary ends a text, so answers have different lengths."""
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = list(range(1, 24, 2))
    yield model
    model.generation_config.eos_token_id = before


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_index(path: Path) -> dict[int, list[int]]:
    lines = read_lines(path)
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line["answer_ids"] for line in lines}


def stock_answer(model: PreTrainedModel, ids: list[int], processors: LogitsProcessorList) -> list[int]:
    tokens = torch.tensor([ids])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        logits_processor=processors,
        max_new_tokens=8,
    )
    return output[0, len(ids) :].tolist()


class TestAnswers:
    def test_greedy_answers_are_those_of_stock_generate(
        self, ends_often: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Any], tmp_path: Path
    ) -> None:
        counts = make_answers(ends_often, tiny_tokenizer, rows, tmp_path / "a.jsonl", SHORT, batch_size=4)
        lines = read_lines(tmp_path / "a.jsonl")
        assert (counts.num_answers, counts.num_new, counts.num_left_out) == (11, 11, 0)
        assert counts.num_new_tokens == sum(len(line["answer_ids"]) for line in lines)
        assert sorted(line["index"] for line in lines) == list(range(11))
        for line in lines:
            assert line["answer_ids"] == stock_answer(ends_often, line["prompt_ids"], LogitsProcessorList())
            assert line["prompt"] == rows[line["index"]]["prompt"]
            assert line["source"] == {"task": rows[line["index"]]["task"]}
            assert line["answer"] == tiny_tokenizer.decode(line["answer_ids"], skip_special_tokens=True)
            asked = tiny_tokenizer.decode(line["prompt_ids"])
            assert asked.startswith("<user>")
            assert asked.endswith("<model>")
        assert len({len(line["answer_ids"]) for line in lines}) > 1  # else ends are not tested

    def test_sampled_answers_depend_on_their_own_seed_alone(
        self, ends_often: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Any], tmp_path: Path
    ) -> None:
        make_answers(ends_often, tiny_tokenizer, rows, tmp_path / "four.jsonl", SAMPLED, batch_size=4)
        make_answers(ends_often, tiny_tokenizer, rows, tmp_path / "one.jsonl", SAMPLED, batch_size=1)
        found = by_index(tmp_path / "four.jsonl")
        assert found == by_index(tmp_path / "one.jsonl")
        assert len({len(answer) for answer in found.values()}) > 2
        for prompt in read_prompts(rows, tiny_tokenizer):
            sampler = KeyedSampler([SAMPLED.seed_of(prompt)])
            processors = LogitsProcessorList([TemperatureLogitsWarper(1.5), sampler])
            assert found[prompt.index] == stock_answer(ends_often, prompt.input_ids, processors)

    def test_another_seed_gives_other_answers_and_equal_prompts_differ(
        self, model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        twice = [{"prompt": "the boat"}, {"prompt": "the boat"}]
        other = AnswerSettings(max_new_tokens=8, temperature=1.5, seed=4)
        make_answers(model, tiny_tokenizer, twice, tmp_path / "a.jsonl", SAMPLED)
        make_answers(model, tiny_tokenizer, twice, tmp_path / "b.jsonl", other)
        first, second = by_index(tmp_path / "a.jsonl"), by_index(tmp_path / "b.jsonl")
        assert first[0] != first[1]
        assert first[0] != second[0]

    def test_trainers_read_the_file_as_it_is(
        self, model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Any], tmp_path: Path
    ) -> None:
        make_answers(model, tiny_tokenizer, rows, tmp_path / "a.jsonl", SHORT)
        lines, examples = read_lines(tmp_path / "a.jsonl"), read_examples(tmp_path / "a.jsonl")
        assert [one.input_ids for one in examples] == [line["prompt_ids"] + line["answer_ids"] for line in lines]
        assert [one.num_prompt for one in examples] == [len(line["prompt_ids"]) for line in lines]
        # A folder with the file and its settings holds one file of data.
        assert read_examples(tmp_path) == examples

    def test_messages_and_texts_are_prompts_too(self, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
        said = [{"role": "user", "content": "the sun"}, {"role": "assistant", "content": "the sea"}]
        rows = [{"messages": said}, {"prompt": said[:1]}, {"text": "the sun", "answer": "the sea"}]
        talk, bare, text = read_prompts(rows, tiny_tokenizer)
        assert talk.input_ids == bare.input_ids == text.input_ids
        assert talk.content == bare.content == said[:1]
        assert text.source == {"answer": "the sea"}
        (plain,) = read_prompts(rows[2:], tiny_tokenizer, chat=False)
        assert plain.input_ids == tiny_tokenizer("the sun")["input_ids"]

    def test_many_rows_are_decoded_plainly(
        self,
        model: PreTrainedModel,
        tiny_tokenizer: PreTrainedTokenizerFast,
        rows: list[Any],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        used = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            used.append(kwargs["strategy"])
            return hf_specdec.generate(*args, **kwargs)

        monkeypatch.setattr(answers, "generate", recording)
        for batch_size in (4, 5):
            make_answers(
                model, tiny_tokenizer, rows[:4], tmp_path / f"{batch_size}.jsonl", SHORT, batch_size=batch_size
            )
        make_answers(model, tiny_tokenizer, rows[:4], tmp_path / "named.jsonl", SHORT, strategy="prompt_lookup")
        assert used == ["auto", "none", "prompt_lookup"]
        assert len({str(sorted(by_index(path).items())) for path in tmp_path.glob("*.jsonl")}) == 1

    def test_neighbours_of_similar_lengths_share_a_batch(
        self, model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Any], tmp_path: Path
    ) -> None:
        done: list[tuple[int, int, int]] = []
        make_answers(
            model,
            tiny_tokenizer,
            rows,
            tmp_path / "a.jsonl",
            SHORT,
            batch_size=4,
            progress=lambda *state: done.append(state),
        )
        lengths = [len(line["prompt_ids"]) for line in read_lines(tmp_path / "a.jsonl")]
        assert lengths == sorted(lengths, reverse=True)
        assert done == [(0, 11, 0), (4, 11, 32), (8, 11, 64), (11, 11, 88)]

    def test_prompts_without_room_are_left_out(
        self,
        model: PreTrainedModel,
        tiny_tokenizer: PreTrainedTokenizerFast,
        rows: list[Any],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        counts = make_answers(model, tiny_tokenizer, rows, tmp_path / "a.jsonl", SHORT, max_prompt_tokens=5)
        assert (counts.num_answers, counts.num_left_out) == (4, 7)
        assert set(by_index(tmp_path / "a.jsonl")) == {0, 3, 6, 9}
        assert "7 of 11 prompts are left out: more than 5 tokens" in caplog.text
        long = [{"prompt": "the sea " * 125}, {"prompt": "the sea"}]  # the model takes 256 tokens
        counts = make_answers(model, tiny_tokenizer, long, tmp_path / "b.jsonl", SHORT)
        assert (counts.num_answers, counts.num_left_out) == (1, 1)


class TestResume:
    @pytest.fixture
    def make(
        self, model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, rows: list[Any], tmp_path: Path
    ) -> Callable[..., Any]:
        def make(settings: AnswerSettings = SAMPLED, data: Any = rows, **options: Any) -> Any:
            return make_answers(
                model, tiny_tokenizer, data, tmp_path / "a.jsonl", settings, **{"batch_size": 4} | options
            )

        return make

    @pytest.mark.parametrize("cut", [1, 40, 700])
    def test_a_killed_run_goes_on_and_gives_the_same_answers(
        self, make: Callable[..., Any], tmp_path: Path, cut: int
    ) -> None:
        path = tmp_path / "a.jsonl"
        make()
        whole = by_index(path)
        content = path.read_bytes()
        path.write_bytes(content[:-cut])
        left = content[:-cut].count(b"\n")
        counts = make(batch_size=3)
        assert (counts.num_answers, counts.num_new) == (11, 11 - left)
        assert by_index(path) == whole
        assert make().num_new == 0

    def test_ctrl_c_leaves_whole_lines(self, make: Callable[..., Any], tmp_path: Path) -> None:
        def interrupt(done: int, total: int, tokens: int) -> None:
            if done == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(progress=interrupt)
        assert len(read_lines(tmp_path / "a.jsonl")) == 4
        assert make().num_new == 7

    def test_a_kill_before_the_first_line(self, make: Callable[..., Any], tmp_path: Path) -> None:
        make()
        (tmp_path / "a.jsonl").write_bytes(b'{"index": 0, "pro')
        assert make().num_new == 11

    def test_data_may_grow(self, make: Callable[..., Any], rows: list[Any], tmp_path: Path) -> None:
        assert make(limit=5).num_answers == 5
        before = by_index(tmp_path / "a.jsonl")
        assert make().num_new == 6
        assert before.items() <= by_index(tmp_path / "a.jsonl").items()

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            (AnswerSettings(max_new_tokens=9, temperature=1.5, seed=3), "max_new_tokens"),
            (AnswerSettings(max_new_tokens=8, temperature=1.0, seed=4), "seed, temperature"),
        ],
    )
    def test_other_settings_are_refused(self, make: Callable[..., Any], settings: AnswerSettings, named: str) -> None:
        make()
        with pytest.raises(ArgumentError, match=f"was made with another {named}; choose another file"):
            make(settings)

    def test_another_model_is_refused(
        self,
        make: Callable[..., Any],
        model: PreTrainedModel,
        tiny_model_folder: Path,
        tiny_tokenizer: PreTrainedTokenizerFast,
        rows: list[Any],
        tmp_path: Path,
    ) -> None:
        make()
        other = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        other.model.norm.weight.data += 0.5
        with pytest.raises(ArgumentError, match="was made with another model;"):
            make_answers(other, tiny_tokenizer, rows, tmp_path / "a.jsonl", SAMPLED)
        again = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        assert make_answers(again, tiny_tokenizer, rows, tmp_path / "a.jsonl", SAMPLED).num_new == 0

    def test_other_prompts_are_refused(self, make: Callable[..., Any], rows: list[Any]) -> None:
        make()
        with pytest.raises(ArgumentError, match=r"line 1, answers another prompt than row \d+ of the data"):
            make(data=[{"prompt": f"then {row['prompt']}"} for row in rows])

    def test_a_strange_file_is_refused_and_left_alone(self, make: Callable[..., Any], tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text("my notes\nof today", encoding="utf-8")
        with pytest.raises(ArgumentError, match="a.jsonl.settings, which says what it was made with, is not"):
            make()
        assert path.read_text(encoding="utf-8") == "my notes\nof today"
        path.unlink()
        path.mkdir()
        with pytest.raises(ArgumentError, match="is a folder; give a file"):
            make()

    @pytest.mark.parametrize("line", ["{}", "[1]", "nothing"])
    def test_a_damaged_line_is_named(self, make: Callable[..., Any], tmp_path: Path, line: str) -> None:
        make()
        path = tmp_path / "a.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join([lines[0], line, *lines[2:], ""]), encoding="utf-8")
        with pytest.raises(ArgumentError, match="a.jsonl, line 2, is no answer"):
            make()

    def test_damaged_settings_are_named(self, make: Callable[..., Any], tmp_path: Path) -> None:
        make()
        (tmp_path / "a.jsonl.settings").write_text("[]", encoding="utf-8")
        with pytest.raises(ArgumentError, match="a.jsonl.settings holds no settings"):
            make()


class TestRefusals:
    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"question": "why"}, "row 1: expected a column prompt, messages or text, found question"),
            ({"prompt": "  "}, "row 1, column 'prompt': holds no prompt, not '  '"),
            ({"prompt": 3}, "row 1, column 'prompt': must be a text or a list of chat messages"),
            ({"messages": [{"role": "assistant", "content": "hm"}]}, "row 1, column 'messages': holds no prompt"),
            ({"messages": [{"role": "user"}]}, "row 1, column 'messages': must be a list of chat messages"),
            ({"text": 3}, "row 1, column 'text': must be a text"),
        ],
    )
    def test_rows(self, tiny_tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
            read_prompts([row], tiny_tokenizer)

    @pytest.mark.parametrize(
        "changes",
        [
            {"max_new_tokens": 0},
            {"temperature": -1.0},
            {"temperature": float("inf")},
            {"temperature": float("nan")},
            {"temperature": "a"},
            {"temperature": True},
            {"seed": "x"},
            {"seed": 1.5},
        ],
    )
    def test_settings(self, changes: dict[str, Any]) -> None:
        with pytest.raises(ArgumentError, match=next(iter(changes))):
            AnswerSettings(**changes)

    @pytest.mark.parametrize(
        ("settings", "options", "message"),
        [
            (SHORT, {"batch_size": 0}, "batch_size=0"),
            (SHORT, {"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
            (SHORT, {"max_prompt_tokens": 1}, "none of 11 prompts has at most 1 tokens"),
            (SHORT, {"limit": 0}, "limit=0"),
            (SHORT, {"data": 5}, "data=5 must be a file"),
            (SHORT, {"strategy": "guesswork"}, "guesswork"),
            (SHORT, {"strategy": "medusa"}, "heads"),
            (SHORT, {"strategy": "tree"}, "assistant_model"),
            (AnswerSettings(max_new_tokens=256), {}, "leaves no room for a prompt: the model takes 256"),
        ],
    )
    def test_arguments(
        self,
        model: PreTrainedModel,
        tiny_tokenizer: PreTrainedTokenizerFast,
        rows: list[Any],
        tmp_path: Path,
        settings: AnswerSettings,
        options: dict[str, Any],
        message: str,
    ) -> None:
        with pytest.raises(ArgumentError, match=message):
            make_answers(
                model, tiny_tokenizer, output=tmp_path / "a.jsonl", settings=settings, **{"data": rows} | options
            )
        assert not list(tmp_path.iterdir())


class TestCommand:
    @pytest.fixture
    def arguments(self, tiny_model_folder: Path, rows: list[Any], tmp_path: Path) -> list[str]:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        words = ["make-data", "--model", tiny_model_folder, "--data", prompts, "--output", tmp_path / "a.jsonl"]
        return [*map(str, words), "--device", "cpu", "--max-new-tokens", "8"]

    def test_writes_answers_and_goes_on(self, arguments: list[str], tmp_path: Path) -> None:
        result = CliRunner().invoke(app, [*arguments, "--limit", "4", "--temperature", "1"])
        assert result.exit_code == 0, result.output
        assert "4 answers in" in result.stderr
        result = CliRunner().invoke(app, [*arguments, "--temperature", "1", "--max-prompt-tokens", "10"])
        assert result.exit_code == 0, result.output
        assert "8 answers in" in result.stderr
        assert re.search(r": 5 new ones, \d+ tokens; 3 prompts left out as too long$", result.stderr.strip())
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert "was made with another temperature" in result.stderr

    def test_ctrl_c(self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*args: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(answers, "_answer", interrupted)
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 130
            assert "before the first answers. The same command begins again." in result.stderr
            assert not (tmp_path / "a.jsonl").exists()
        assert CliRunner().invoke(app, [*arguments, "--limit", "2"]).exit_code == 0
        monkeypatch.setattr(answers, "_answer", interrupted)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 130
        assert "is whole; the same command goes on with it." in result.stderr

    def test_a_strategy_that_needs_a_draft_model(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(app, [*arguments, "--strategy", "tree"])
        assert result.exit_code == 2
        result = CliRunner().invoke(app, [*arguments, "--strategy-args", "nodes=3"])
        assert result.exit_code == 2
        result = CliRunner().invoke(app, [*arguments, "--strategy", "auto", "--strategy-args", "nodes=3"])
        assert result.exit_code == 0, result.output
