"""A draft trained in two processes on the CPU under `accelerate launch`, beside the same training in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import load_draft
from hf_specdec.drafts import own_parameters
from taught import ONE_PROCESS, TWO_PROCESSES, make_examples, train_by_command, write_answers

ARGUMENTS = (
    "distill-draft --layers 0 --draft-vocab 20 --epochs 2 --batch-size 2 --held-out 0.12 --evaluations 3 "
    "--top-k 8 --own-output --dtype float32"
)


@pytest.mark.slow
def test_two_processes(tiny_model_folder: Path, tmp_path: Path) -> None:
    """The same texts in each step, so the same draft; and no held-out text counts twice."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    data = write_answers(tmp_path / "answers.jsonl", make_examples(model, 27))
    train_by_command(TWO_PROCESSES, ARGUMENTS, tmp_path / "two", tiny_model_folder, data)
    train_by_command(ONE_PROCESS, ARGUMENTS, tmp_path / "one", tiny_model_folder, data, "--accumulate", "2")

    two, one = (own_parameters(load_draft(tmp_path / name, model)) for name in ("two", "one"))
    for name, weight in two.items():
        torch.testing.assert_close(weight, one[name], rtol=0.01, atol=2e-5)  # stored in 16 bit
    logs = [json.loads((tmp_path / name / "training_log.json").read_text(encoding="utf-8")) for name in ("two", "one")]
    assert [log["processes"] for log in logs] == [2, 1]
    assert [log["steps"] for log in logs] == [12, 12]
    evaluations = [[record["eval_kl"] for record in log["history"] if "eval_kl" in record] for log in logs]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
