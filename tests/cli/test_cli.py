from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_specdec import MedusaHeads, __version__, drafter_names
from hf_specdec.cli import app
from hf_specdec.cli import demo as demo_module
from hf_specdec.cli.options import parse_settings
from hf_specdec.demo_model import DemoModelMissingError, make_layer_draft

PROMPT = "the boat leaves the harbour and then the boat"


def invoke(*arguments: str) -> Result:
    # A fixed width, so that lines break alike everywhere.
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, arguments)


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path) -> None:
    """The demo on a tiny random model."""

    def load(dtype: torch.dtype) -> tuple[Any, Any]:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(tiny_model_folder)

    def heads() -> MedusaHeads:
        return MedusaHeads.for_target(load(torch.float32)[0])

    monkeypatch.setattr(demo_module, "load_demo_model", load)
    monkeypatch.setattr(demo_module, "load_demo_heads", heads)
    monkeypatch.setattr(demo_module, "load_demo_draft", lambda model: make_layer_draft(model, 1))


def stock_tokens(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return text[0, ids.shape[1] :].tolist()


class TestEnv:
    def test_json(self) -> None:
        result = invoke("env", "--json")
        assert result.exit_code == 0
        record = json.loads(result.stdout)
        assert record["versions"]["hf_specdec"] == __version__
        assert record["strategies"] == drafter_names()
        assert {"eager", "sdpa"} <= set(record["attention_implementations"])
        assert record["cores"] >= 1

    def test_table(self) -> None:
        result = invoke("env")
        assert result.exit_code == 0
        for word in ("strategies", "prompt_lookup", f"hf_specdec {__version__}"):
            assert word in result.stdout


class TestGenerate:
    def test_json_holds_the_tokens_of_stock_generation(self, tiny_model_folder: Path) -> None:
        result = invoke(
            "generate", PROMPT, "-m", str(tiny_model_folder), "--no-chat", "--max-new-tokens", "9", "--json"
        )
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["token_ids"] == stock_tokens(tiny_model_folder, PROMPT, 9)
        assert record["strategy"] == record["stats"]["strategy"] == "prompt_lookup"
        assert record["stats"]["emitted"] == len(record["token_ids"])
        assert record["prompt_tokens"] == 9

    def test_streams_the_text_and_reports_on_standard_error(self, tiny_model_folder: Path) -> None:
        arguments = ["generate", PROMPT, "-m", str(tiny_model_folder), "--max-new-tokens", "9"]
        record = json.loads(invoke(*arguments, "--json").stdout)
        result = invoke(*arguments)
        assert result.exit_code == 0
        assert result.stdout.split() == record["text"].split()
        assert "tokens per forward" in result.stderr

    def test_the_seed_makes_the_text_whatever_the_strategy(self, tiny_model_folder: Path) -> None:
        texts = []
        for strategy in ("none", "assisted", "tree"):
            assistant = [] if strategy == "none" else ["--assistant", str(tiny_model_folder)]
            result = invoke(
                "generate", PROMPT, "-m", str(tiny_model_folder), "--strategy", strategy, *assistant, "--json",
                "--temperature", "0.9", "--top-p", "0.9", "--top-k", "12", "--seed", "5", "--max-new-tokens", "12",
            )  # fmt: skip
            assert result.exit_code == 0, result.output
            texts.append(json.loads(result.stdout)["token_ids"])
        assert texts[0] == texts[1] == texts[2]

    def test_rejection_sampling_is_passed_on(self, tiny_model_folder: Path) -> None:
        result = invoke(
            "generate", PROMPT, "-m", str(tiny_model_folder), "--assistant", str(tiny_model_folder), "--json",
            "--strategy", "assisted", "--temperature", "1", "--verification", "rejection", "--max-new-tokens", "6",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["stats"]["verification"] == "rejection"

    def test_strategy_settings_reach_the_strategy(self, tiny_model_folder: Path) -> None:
        arguments = [
            "generate", PROMPT, "-m", str(tiny_model_folder), "--max-new-tokens", "12", "--json",
            "--assistant", str(tiny_model_folder), "--strategy", "tree",
        ]  # fmt: skip
        # The draft is the target, so everything is accepted and the depth alone decides the number of rounds;
        # the first round reads the prompt and drafts nothing.
        chain = "nodes=9,branching=1,min_gain=0,min_score=0"
        shallow, deep = (
            json.loads(invoke(*arguments, "--strategy-args", f"depth={depth},{chain}").stdout) for depth in (1, 6)
        )
        assert shallow["token_ids"] == deep["token_ids"]
        assert shallow["stats"]["accepted_lengths"] == {"0": 2, "1": 5}
        assert deep["stats"]["accepted_lengths"] == {"0": 1, "6": 1, "3": 1}

    def test_a_missing_draft_model_is_a_usage_error(self) -> None:
        """Noticed before any model is loaded."""
        result = invoke("generate", PROMPT, "-m", "nowhere", "--strategy", "tree")
        assert result.exit_code == 2
        assert "--assistant" in result.stderr

    @pytest.mark.parametrize("option", [("--seed", "3"), ("--top-k", "5"), ("--top-p", "0.5")])
    def test_sampling_options_need_a_temperature(self, option: tuple[str, str]) -> None:
        result = invoke("generate", PROMPT, "-m", "nowhere", *option)
        assert result.exit_code == 2
        assert "--temperature" in result.stderr

    def test_a_model_that_is_not_there_is_one_line_and_status_1(self, tmp_path: Path) -> None:
        result = invoke("generate", PROMPT, "-m", str(tmp_path / "nothing"))
        assert result.exit_code == 1
        assert "nothing" in result.stderr
        assert "Traceback" not in result.output

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--strategy", "promt_lookup", "prompt_lookup"),
            ("--strategy-args", "colour=3", "no setting 'colour'"),
            ("--strategy-args", "nodes", "name=value"),
            ("--strategy-args", "nodes=0", "at least 1"),
            ("--max-new-tokens", "0", "max-new-tokens"),
            ("--temperature", "-1", "temperature"),
            ("--dtype", "int8", "dtype"),
            ("--device", "toaster", "device"),
            ("--verification", "hope", "verification"),
        ],
    )
    def test_a_wrong_call_is_status_2(self, tiny_model_folder: Path, option: str, value: str, message: str) -> None:
        result = invoke("generate", PROMPT, "-m", str(tiny_model_folder), option, value)
        assert result.exit_code == 2, result.output
        assert message in result.stderr

    def test_the_model_is_required(self) -> None:
        assert invoke("generate", PROMPT).exit_code == 2


@pytest.mark.usefixtures("tiny_demo")
class TestDemo:
    @pytest.mark.parametrize("strategy", ["none", "prompt_lookup", "assisted", "tree", "auto", "medusa", "auto_heads"])
    def test_json_compares_both_sides(self, strategy: str) -> None:
        result = invoke(
            "demo", PROMPT, "--strategy", strategy, "--dtype", "float32", "--max-new-tokens", "10", "--json"
        )
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["identical"] is True
        assert record["first_difference"] is record["score_gap"] is None
        assert record["plain"]["token_ids"] == record["speculative"]["token_ids"]
        assert record["plain"]["new_tokens"] == len(record["plain"]["token_ids"]) > 0
        assert record["plain"]["tokens_per_forward"] == 1.0
        assert record["prompt"] == PROMPT
        assert record["ratio"] > 0

    def test_sampled_texts_are_comparable(self) -> None:
        arguments = ["demo", PROMPT, "--dtype", "float32", "--temperature", "1.5", "--max-new-tokens", "16", "--json"]
        first, second = (json.loads(invoke(*arguments, "--seed", seed).stdout) for seed in ("1", "2"))
        assert first["identical"] is second["identical"] is True
        assert first["plain"]["token_ids"] != second["plain"]["token_ids"]

    def test_panels_and_table_without_a_terminal(self) -> None:
        result = invoke("demo", PROMPT, "--dtype", "float32", "--max-new-tokens", "10")
        assert result.exit_code == 0, result.output
        for word in ("plain SmolLM2", "with auto_heads", "tokens per forward", "identical", "ratio"):
            assert word in result.stdout

    def test_a_missing_model_is_one_line_and_status_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(dtype: torch.dtype) -> None:
            raise DemoModelMissingError("Install it: pip install [demo] things")

        monkeypatch.setattr(demo_module, "load_demo_model", missing)
        result = invoke("demo")
        assert result.exit_code == 1
        assert "pip install [demo] things" in result.stderr

    def test_an_unknown_strategy_is_status_2(self) -> None:
        assert invoke("demo", "--strategy", "magic").exit_code == 2


def test_without_a_command_the_help_is_shown() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "demo" in result.output


def test_help_holds_no_markup() -> None:
    """Square brackets in a help text are markup and vanish, with what is in them."""
    commands = typer.main.get_group(app).commands
    assert {"demo", "audit", "train-medusa"} <= commands.keys()
    for name, one in commands.items():
        texts = [one.help, *(getattr(parameter, "help", None) for parameter in one.params)]
        assert not [text for text in texts if text and "[" in text], name


def test_the_module_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "hf_specdec.cli", "--help"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "generate" in finished.stdout


def test_settings_are_python_literals_or_words() -> None:
    assert parse_settings("nodes=24,branching=(3, 2),share=0.5,deep=True,mode=fast") == {
        "nodes": 24,
        "branching": (3, 2),
        "share": 0.5,
        "deep": True,
        "mode": "fast",
    }
