"""`hf-specdec generate` with trained heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import zoo
from hf_specdec.cli import app

PROMPT = "the boat leaves the harbour and then the boat"


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["generate", PROMPT, *map(str, arguments)])


@pytest.fixture
def heads(tiny_model_folder: Path, tmp_path: Path) -> Path:
    zoo.make_heads(AutoModelForCausalLM.from_pretrained(tiny_model_folder)).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


@pytest.mark.parametrize("strategy", [None, "medusa", "auto"])
def test_the_text_is_that_of_plain_decoding(tiny_model_folder: Path, heads: Path, strategy: str | None) -> None:
    settings = ("-m", tiny_model_folder, "--max-new-tokens", 12, "--json")
    plain = json.loads(invoke(*settings, "--strategy", "none").stdout)
    chosen = () if strategy is None else ("--strategy", strategy)
    result = invoke(*settings, "--heads", heads, *chosen, "--strategy-args", "node_cost=0")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["token_ids"] == plain["token_ids"]
    assert record["stats"]["strategy"] == record["strategy"] == (strategy or "medusa")
    assert record["stats"]["drafted"] > 0
    assert record["stats"]["lossless"]


def test_typical_acceptance_is_marked(tiny_model_folder: Path, heads: Path) -> None:
    settings = (
        "-m", tiny_model_folder, "--heads", heads, "--temperature", 1, "--seed", 1, "--max-new-tokens", 9,
        "--verification", "typical", "--lossy",
    )  # fmt: skip
    result = invoke(*settings)
    assert result.exit_code == 0, result.output
    assert "NOT lossless: typical acceptance" in result.stderr
    assert json.loads(invoke(*settings, "--json").stdout)["stats"]["lossless"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--strategy", "medusa"), "--heads"),
        (("--temperature", 1, "--verification", "typical"), "--lossy"),
        (("--temperature", 1, "--lossy"), "--verification"),
    ],
)
def test_usage_errors_come_before_any_model_is_loaded(options: tuple[object, ...], message: str) -> None:
    result = invoke("-m", "nowhere", *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_heads_for_a_strategy_without_them(heads: Path) -> None:
    result = invoke("-m", "nowhere", "--heads", heads, "--strategy", "prompt_lookup")
    assert result.exit_code == 2
    assert "does not use heads" in result.stderr


def test_heads_of_another_model(tiny_model_folder: Path, tmp_path: Path) -> None:
    zoo.make_heads(zoo.make("llama", hidden_size=48)).save_pretrained(tmp_path / "other")
    result = invoke("-m", tiny_model_folder, "--heads", tmp_path / "other")
    assert result.exit_code == 1
    assert "48" in result.stderr
    assert "Traceback" not in result.output
