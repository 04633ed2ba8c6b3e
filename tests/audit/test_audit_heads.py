"""Trained heads under audit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

import zoo
from docs_hub import DRAFT, build_hub
from hf_specdec import ArgumentError, Auto, Medusa, MedusaHeads
from hf_specdec.audit.arms import choose_arms, describe
from hf_specdec.cli import app


@pytest.fixture
def target() -> PreTrainedModel:
    return zoo.make("llama")


def test_all_strategies_that_use_heads_get_them(target: PreTrainedModel) -> None:
    heads = zoo.make_heads(target)
    arms, skipped = choose_arms(target, None, None, heads)
    by_name = {arm.name: arm.drafter for arm in arms}
    assert {"medusa", "auto", "auto_heads"} <= by_name.keys()
    assert "medusa" not in skipped
    assert by_name["auto"] == Auto()
    headed = by_name["auto_heads"]
    assert isinstance(headed, Auto)
    assert any(isinstance(part, Medusa) and part.heads is heads for part in headed.parts or ())


def test_without_heads_medusa_is_left_out_with_the_reason(target: PreTrainedModel) -> None:
    arms, skipped = choose_arms(target, None, None)
    assert "medusa" not in {arm.name for arm in arms}
    assert "trained heads" in skipped["medusa"]


def test_heads_beside_named_strategies_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="its own heads"):
        choose_arms(target, None, {"medusa": Medusa(heads=zoo.make_heads(target))}, zoo.make_heads(target))


def test_other_weights_are_another_audit(target: PreTrainedModel) -> None:
    heads, same, other = (zoo.make_heads(target) for _ in range(3))
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    words = [describe(Medusa(heads=one)) for one in (heads, same, other)]
    assert words[0] == words[1] != words[2]
    assert describe(Auto().with_heads(heads)) == describe(Auto().with_heads(same))
    half = [describe(Medusa(heads=MedusaHeads.for_target(target).to(torch.bfloat16))) for _ in range(2)]
    assert half[0] == half[1]


def invoke(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, ["audit", *map(str, arguments)])


@pytest.fixture
def small(tmp_path: Path) -> list[object]:
    build_hub(tmp_path / "hub")
    model = tmp_path / "hub" / DRAFT
    zoo.make_heads(AutoModelForCausalLM.from_pretrained(model)).save_pretrained(tmp_path / "heads")
    tasks = tmp_path / "prompts.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a gull follows", "the sun sleeps")))
    return [
        "--model", model, "--tasks", tasks, "--output", tmp_path / "report", "--temperatures", "0", "--heads",
        tmp_path / "heads", "--max-new-tokens", "16", "--no-chat", "--strategies",
    ]  # fmt: skip


def test_the_command(small: list[object], tmp_path: Path) -> None:
    result = invoke(*small, "medusa:nodes=6", "auto_heads", "auto:node_cost=0")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "report/audit.json").read_text())
    described = record["strategies"]
    assert described["medusa:nodes=6"].startswith("Medusa(nodes=6")
    assert "MedusaHeads(" in described["auto_heads"]
    assert "MedusaHeads(" not in described["auto:node_cost=0"]


def test_heads_that_nobody_uses(small: list[object]) -> None:
    result = invoke(*small, "prompt_lookup")
    assert result.exit_code == 2
    assert "auto_heads" in result.stderr
