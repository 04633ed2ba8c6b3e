"""Benchmark prompts: reading files in Spec-Bench's format and turning text into token ids."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hf_specdec.errors import ArgumentError

# Spec-Bench splits its MT-bench part by subject; the published tables count it as one task.
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)


@dataclass(frozen=True)
class Prompt:
    """One benchmark prompt: the first turn of a question."""

    task: str
    prompt_id: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file in Spec-Bench's format: one JSON object a line with `question_id`, `category` and `turns`.

    Raises:
        ArgumentError: no such file, no UTF-8, or a line is not such an object.
    """
    prompts = []
    for number, line in json_lines(path):
        try:
            question = json.loads(line)
            category, prompt_id, text = question["category"], question["question_id"], question["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ArgumentError(
                f"{path.name}, line {number}: expected a JSON object with question_id, category and turns"
            ) from error
        prompts.append(Prompt("mt_bench" if category in MT_BENCH_CATEGORIES else category, str(prompt_id), text))
    return prompts


def json_lines(path: Path) -> list[tuple[int, str]]:
    """Number and text of every line of JSON lines that is not empty.

    Raises:
        ArgumentError: no such file, or no UTF-8.
    """
    if not path.is_file():
        raise ArgumentError(f"there is no file at {path}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path.name} is not a text in UTF-8: {error.reason} at byte {error.start}") from error
    lines = text.split("\n")  # JSON texts may hold all else that splitlines takes for the end of a line
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool | None = None) -> torch.Tensor:
    """Token ids of a prompt, int64 [1, length].

    Args:
        tokenizer: the model's tokenizer.
        text: what the user says.
        chat: wrap the text in the tokenizer's chat template; None does so where there is one.

    Raises:
        ArgumentError: `chat` is True and the tokenizer has no chat template.
    """
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return torch.as_tensor(tokenizer(text, return_tensors="pt")["input_ids"])
    if tokenizer.chat_template is None:
        raise ArgumentError("the tokenizer has no chat template: pass chat=False (--no-chat)")
    messages = [{"role": "user", "content": text}]
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return torch.tensor([tokens])


def select_prompts(
    prompts: Iterable[Prompt], tokenizer: PreTrainedTokenizerBase, *, per_task: int, max_tokens: int = 512
) -> list[Prompt]:
    """The first `per_task` prompts of each task whose encoded length is at most `max_tokens`, in file order."""
    chosen: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        kept = chosen[prompt.task]
        if len(kept) < per_task and encode_prompt(tokenizer, prompt.text).shape[1] <= max_tokens:
            kept.append(prompt)
    return [prompt for kept in chosen.values() for prompt in kept]
