"""Instructions whose rules a program can check."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

RULES: dict[str, Callable[..., bool]] = {
    "avoids": lambda answer, text: text.lower() not in answer.lower(),
    "bullets": lambda answer, count: sum(line.startswith("- ") for line in answer.splitlines()) == count,
    "contains": lambda answer, text: text.lower() in answer.lower(),
    "ends_with": lambda answer, text: answer.endswith(text),
    "items": lambda answer, count: len([item for item in answer.split(",") if item.strip()]) == count,
    "json_keys": lambda answer, keys: _json_keys(answer) == set(keys),
    "lines": lambda answer, count: len([line for line in answer.splitlines() if line.strip()]) == count,
    "lowercase": lambda answer: answer == answer.lower(),
    "max_words": lambda answer, count: 1 <= len(answer.split()) <= count,
    "min_words": lambda answer, count: len(answer.split()) >= count,
    "paragraphs": lambda answer, count: len([part for part in re.split(r"\n\s*\n", answer) if part.strip()]) == count,
    "sentences": lambda answer, count: len(re.findall(r"[.!?](?:\s|$)", answer)) == count,
    "starts_with": lambda answer, text: answer.startswith(text),
    "uppercase": lambda answer: answer == answer.upper(),
}


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """The documents beside this file. lm-eval passes the model's arguments, which do not matter here."""
    return {"test": datasets.Dataset.from_json(str(Path(__file__).with_suffix(".jsonl")))}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer follows all rules, and which share of them. An empty answer follows none."""
    answer = results[0].strip()
    kept = [bool(answer) and follows(answer, rule) for rule in json.loads(doc["rules"])]
    return {"all_rules": float(all(kept)), "share_of_rules": sum(kept) / len(kept)}


def follows(answer: str, rule: dict[str, Any]) -> bool:
    """Whether an answer follows one rule, such as `{"rule": "lines", "count": 4}`."""
    settings = {name: value for name, value in rule.items() if name != "rule"}
    return RULES[rule["rule"]](answer, **settings)


def _json_keys(answer: str) -> set[str] | None:
    try:
        value = json.loads(answer)
    except json.JSONDecodeError:
        return None
    return set(value) if isinstance(value, dict) else None
