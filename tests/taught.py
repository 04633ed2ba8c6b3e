"""Texts that a tiny model wrote, to train heads on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_specdec.heads import MedusaHeads
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.texts import Example

NUM_PROMPT = 4

# What `python -m` runs to start one process, or two. accelerate has one launcher for several processes on one machine
# and names it after GPUs.
ONE_PROCESS = "runpy"
TWO_PROCESSES = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0 -m"
)


def make_examples(target: PreTrainedModel, count: int, seed: int = 0, longest: int = 20) -> list[Example]:
    """Random prompts of four tokens, and what the model says next in 8 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        prompt = torch.randint(5, target.config.vocab_size, (1, NUM_PROMPT), generator=generator)
        length = int(torch.randint(8, longest + 1, (), generator=generator))
        text = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        examples.append(Example(text[0].tolist(), NUM_PROMPT))
    return examples


def make_features(target: PreTrainedModel, count: int, seed: int = 0, **settings: Any) -> TargetFeatures:
    return TargetFeatures(target, make_examples(target, count, seed), **settings)


def write_answers(path: Path, examples: list[Example]) -> Path:
    """The examples as `hf-specdec make-data` writes them."""
    records = [
        {"prompt_ids": one.input_ids[:NUM_PROMPT], "answer_ids": one.input_ids[NUM_PROMPT:]} for one in examples
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def disturbed(heads: MedusaHeads, seed: int = 0, noise: float = 0.1) -> MedusaHeads:
    """Heads that are not the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return heads


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    return TrainingArguments(str(folder), **settings | changes)


def train_by_command(launcher: str, arguments: str, output: Path, model: Path, data: Path, *more: str) -> None:
    """Run a training command of `hf-specdec` in processes of its own, on the CPU."""
    command = f"{sys.executable} -m {launcher} hf_specdec.cli {arguments} --cpu"
    paths = ["--model", str(model), "--data", str(data), "--output", str(output)]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command.split(), *paths, *more], env=environment, check=True, timeout=300)
