"""Training in two processes on the CPU under `accelerate launch`, beside the same training in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.heads import MedusaHeads
from taught import ONE_PROCESS, TWO_PROCESSES, make_examples, train_by_command, write_answers

ARGUMENTS = (
    "train-medusa --heads 2 --draft-vocab 20 --epochs 2 --batch-size 2 --held-out 0.12 --evaluations 3 "
    "--learning-rate 0.01 --dtype float32 --own-output"
)


@pytest.mark.slow
def test_two_processes_train_as_one_with_two_batches_a_step(tiny_model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    data = write_answers(tmp_path / "answers.jsonl", make_examples(model, 27))
    train_by_command(TWO_PROCESSES, ARGUMENTS, tmp_path / "two", tiny_model_folder, data)
    train_by_command(ONE_PROCESS, ARGUMENTS, tmp_path / "one", tiny_model_folder, data, "--accumulate", "2")
    two, one = (MedusaHeads.from_pretrained(tmp_path / name) for name in ("two", "one"))
    for weight, other in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)
    # Three held-out texts on two processes: none may count twice.
    assert two.rank_rates == one.rank_rates
    logs = [json.loads((tmp_path / name / "training_log.json").read_text(encoding="utf-8")) for name in ("two", "one")]
    assert [log["processes"] for log in logs] == [2, 1]
    assert [log["steps"] for log in logs] == [12, 12]
    evaluations = [[record["eval_loss"] for record in log["history"] if "eval_loss" in record] for log in logs]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)
    assert not list((tmp_path / "two").glob("checkpoints*"))
