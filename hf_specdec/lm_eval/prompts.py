"""Prompts that remember which request they belong to, on their way through lm-eval's sorting and batching."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_specdec.lm_eval.request_stats import RequestStats

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance


class Prompt(str):
    """A request's prompt. To lm-eval and the tokenizer it is a string like any other.

    Attributes:
        request: the request as lm-eval made it.
        repeat: 0 for the first answer to the request, 1 for the second, ...
        seed: the seed of this answer.
        stats: what the answer took.
    """

    request: Instance
    repeat: int
    seed: int
    stats: RequestStats

    @property
    def is_padding(self) -> bool:
        """Whether lm-eval asks again only to give all processes equally many requests."""
        return self.request.repeats is not None and self.repeat >= self.request.repeats


def mark_requests(requests: Sequence[Instance], seed: int) -> tuple[list[Instance], list[Prompt]]:
    """Requests like `requests` whose prompts are `Prompt` objects, and these prompts in the same order."""
    times_seen: Counter[int] = Counter()
    marked, prompts = [], []
    for request in requests:
        text, gen_kwargs = request.args[:2]
        prompt = Prompt(text)
        prompt.request = request
        # lm-eval repeats a request by giving the same object again.
        prompt.repeat = times_seen[id(request)]
        times_seen[id(request)] += 1
        prompt.seed = answer_seed(seed, text, prompt.repeat)
        prompt.stats = RequestStats()
        twin = copy.copy(request)
        twin.arguments = (prompt, gen_kwargs)
        marked.append(twin)
        prompts.append(prompt)
    return marked, prompts


def answer_seed(seed: int, prompt: str, repeat: int) -> int:
    """A seed that depends on what is asked and on nothing else: not on order, batches or processes.

    Args:
        seed: the run's.
        prompt: the whole prompt, as the model gets it.
        repeat: 0 for the first answer to a request, 1 for the second, ...
    """
    digest = hashlib.sha256(json.dumps([seed, repeat, prompt]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # fits everywhere: 63 bits
