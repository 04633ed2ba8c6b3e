"""GSM8K's test questions (Cobbe et al. 2021), from a local file or from the hub."""

from __future__ import annotations

import os
import re
from typing import Any

import datasets

FILE_VARIABLE = "HF_SPECDEC_GSM8K"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """The file that the environment variable names, a JSON object with question and answer a line; else the hub's."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        return {"test": datasets.Dataset.from_json(path)}
    return {"test": datasets.load_dataset("openai/gsm8k", "main", split="test")}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the last number of the answer is the one behind #### in the reference."""
    return {"exact_match": float(last_number(results[0]) == last_number(doc["answer"]))}


def last_number(text: str) -> float | None:
    """The last number in a text; commas between digits are ignored."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
