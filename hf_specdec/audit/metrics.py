"""Task metrics of a text: the number that answers a question, and the length."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


def is_right(text: str, answer: str) -> bool:
    """Whether the last number in a text is the answer, as GSM8K is marked."""
    found = _NUMBER.findall(text)
    return bool(found) and _plain(found[-1]) == _plain(answer)


def _plain(number: str) -> str:
    plain = number.replace(",", "").replace("$", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
