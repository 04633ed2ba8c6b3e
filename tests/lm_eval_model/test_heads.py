"""Trained heads in lm-eval: the answers of lm-eval's own model, and a report that says whose heads drafted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import zoo
from evaluations import PROMPTS, make_requests
from hf_specdec import ArgumentError, Medusa
from hf_specdec.lm_eval import SpeculativeLM


@pytest.fixture(scope="module")
def heads(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("heads")
    zoo.make_heads(AutoModelForCausalLM.from_pretrained(models["pretrained"])).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "arguments",
    [{"strategy": "medusa", "nodes": 12}, {"strategy": "auto"}, {"strategy": Medusa(node_cost=0)}],
    ids=["medusa", "auto", "object"],
)
def test_answers_are_those_of_lm_eval(models: dict[str, str], heads: str, arguments: dict[str, Any]) -> None:
    requests = {"until": [], "max_gen_toks": 24}
    expected = HFLM(models["pretrained"], device="cpu").generate_until(make_requests(PROMPTS, **requests))
    model = SpeculativeLM(models["pretrained"], device="cpu", heads=heads, **arguments)
    assert model.generate_until(make_requests(PROMPTS, **requests)) == expected
    report = model.take_report()
    assert report["heads"] == heads
    assert "heads" not in report["settings"]
    assert report["lossless"] is True
    assert report["generate_until"]["drafted"] > 0
    json.dumps(report)


def test_typical_acceptance_is_marked(models: dict[str, str], heads: str) -> None:
    model = SpeculativeLM(
        models["pretrained"], "medusa", device="cpu", heads=heads, verification="typical", lossless=False
    )
    model.generate_until(make_requests(PROMPTS, until=[], max_gen_toks=8, do_sample=True, temperature=1.0))
    report = model.take_report()
    assert (report["verification"], report["lossless"]) == ("typical", False)


def test_heads_of_another_model_are_refused_at_the_start(models: dict[str, str], tmp_path: Path) -> None:
    zoo.make_heads(zoo.make("llama", hidden_size=48)).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="48"):
        SpeculativeLM(models["pretrained"], "medusa", device="cpu", heads=str(tmp_path))
