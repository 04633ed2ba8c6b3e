"""What the tests of the lm-eval model share: requests, and stop strings that fall into given answers."""

from __future__ import annotations

from typing import Any

from lm_eval.api.instance import Instance

PROMPTS = ["The gull follows the boat.", "Sails, ropes", "one two three one two three one two", "Wind", "At noon the"]


def make_requests(prompts: list[str], *, repeats: int = 1, **gen_kwargs: Any) -> list[Instance]:
    """Generation requests as lm-eval makes them: each object as often as it wants answers."""
    made = []
    for number, prompt in enumerate(prompts):
        request = Instance("generate_until", {}, (prompt, dict(gen_kwargs)), 0, ("tiny", number, repeats))
        made += [request] * repeats
    return made


def plain_letters(text: str, start: int) -> str:
    """Two neighbouring ASCII characters of a text, from `start` on."""
    pairs = (text[at : at + 2] for at in range(start, len(text) - 1))
    return next(pair for pair in pairs if pair.isascii() and pair.isprintable())
