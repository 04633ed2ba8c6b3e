"""Arms with trained heads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import zoo
from hf_specdec import ArgumentError, Auto, Medusa
from hf_specdec.bench import (
    MemoryTask,
    Prompt,
    Setup,
    check_arms,
    measure_memory,
    measure_speed,
    named_strategy,
    read_results,
    takes_heads,
)

SCRIPT = Path(__file__).parents[2] / "evals" / "speed" / "run.py"
PROMPTS = [Prompt("qa", "1", "the boat leaves the harbour and then the boat returns")]
ARMS = ["stock", "medusa", "medusa:tree=[(0,), (1,), (0, 0)]", "auto", "auto_heads:nodes=32"]


@pytest.fixture
def setup(tiny_model_folder: Path) -> Setup:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    return Setup(model, None, draft_tokens=3, max_new_tokens=12, heads=zoo.make_heads(model))


@pytest.fixture
def heads_folder(setup: Setup, tmp_path: Path) -> Path:
    assert setup.heads is not None
    setup.heads.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def test_arms_with_heads_give_the_same_text(setup: Setup, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = list(measure_speed(setup, tiny_tokenizer, PROMPTS, ARMS))
    assert [row.arm for row in rows] == ARMS
    assert all(row.identical for row in rows)


def test_which_names_get_heads(setup: Setup) -> None:
    assert [takes_heads(name) for name in ("medusa", "auto_heads", "auto", "tree")] == [True, True, False, False]
    headed, plain = named_strategy("auto_heads", {"nodes": 9}, setup.heads), named_strategy("auto", {}, setup.heads)
    assert isinstance(headed, Auto)
    assert headed.nodes == 9
    assert any(isinstance(part, Medusa) for part in headed.parts or ())
    assert plain == Auto()


@pytest.mark.parametrize("arm", ["medusa", "auto_heads", "medusa:nodes=4"])
def test_arms_without_the_heads_they_need(tiny_model_folder: Path, arm: str) -> None:
    setup = Setup(AutoModelForCausalLM.from_pretrained(tiny_model_folder), None, 3, 12)
    with pytest.raises(ArgumentError, match="drafts with trained heads"):
        check_arms(["stock", arm], setup)


@pytest.mark.parametrize(("arm", "message"), [("tree_heads", "does not use heads"), ("magic_heads", "known arms")])
def test_arms_that_are_none(setup: Setup, arm: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_arms([arm], setup)


def test_memory_is_measured_with_heads(tiny_model_folder: Path, heads_folder: Path) -> None:
    task = MemoryTask(
        str(tiny_model_folder), "medusa", context_tokens=16, new_tokens=4, dtype="float32", heads=str(heads_folder)
    )
    (row,) = measure_memory([task])
    assert row.arm == "medusa"
    assert row.new_tokens == 4


def test_the_script_makes_the_arms_that_remember(tiny_model_folder: Path, heads_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "heads.jsonl"
    arms = ["medusa", "auto_heads", "auto_heads_kept", "auto_heads_filled"]
    finished = subprocess.run(
        [
            sys.executable, str(SCRIPT), f"--model={tiny_model_folder}", f"--heads={heads_folder}", "--dtype=float32",
            "--num-prompts=1", "--max-new-tokens=4", f"--arms={','.join(arms)}", "--draft-layers=0",
            f"--output={output}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "Filled the table of auto_heads_filled" in finished.stdout
    results = read_results(output)
    assert {row.arm for row in results.speed} == {"stock", *arms}
    assert all(row.identical for row in results.speed)
    assert "--heads=heads" in results.provenance.command
    assert str(tmp_path) not in output.read_text()
