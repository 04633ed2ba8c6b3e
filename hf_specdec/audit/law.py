"""From sampled texts to the sums of the law tests: every token against the model's own probabilities.

The probabilities come from fresh forwards over the finished texts, so nothing of the generating run is believed but
their tokens and, under rejection sampling, what was proposed before each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.generation import read_prompt
from hf_specdec.audit.recording import Proposal
from hf_specdec.audit.statistics import Sums
from hf_specdec.sampling import noise_device

ALL = "all"
LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT = "log p", "log q/p", "membership", "PIT"
# Any bounds fixed in advance leave the tests exact. That of log p makes it finite for tokens that cannot come.
_LOG_LIMIT, _RATIO_LIMIT = -1e4, 20.0
_TOP_OF_Q = 2  # a set of drawn guesses is random, the likeliest tokens of their law are not
_DIGITS = 5
_TOKENS_AT_ONCE = 8


@dataclass
class LawRecord:
    """Sums by test and stratum, PIT values by stratum; adds up over texts.

    Attributes:
        tokens: tokens looked at.
        sums: the z-tests.
        pit: randomised probability integral transforms, each uniform on [0, 1] if the law is right.
    """

    tokens: int = 0
    sums: dict[str, dict[str, Sums]] = field(default_factory=dict)
    pit: dict[str, list[float]] = field(default_factory=dict)

    def add(self, test: str, stratum: str, sums: Sums) -> None:
        """Add to one z-test."""
        if sums.tokens:
            strata = self.sums.setdefault(test, {})
            strata[stratum] = strata.get(stratum, Sums()).plus(sums)

    def merge(self, other: LawRecord) -> None:
        """Add another record."""
        self.tokens += other.tokens
        for test, strata in other.sums.items():
            for stratum, sums in strata.items():
                self.add(test, stratum, sums)
        for stratum, values in other.pit.items():
            self.pit.setdefault(stratum, []).extend(values)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"tokens": self.tokens, "sums": self.sums, "pit": self.pit}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> LawRecord:
        """Back from JSON."""
        sums = {
            test: {name: Sums(*values) for name, values in strata.items()} for test, strata in record["sums"].items()
        }
        return cls(record["tokens"], sums, record["pit"])


@torch.no_grad()
def forced_logits(model: PreTrainedModel, prompt: Tensor, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The model's logits for each token of some texts behind one prompt `[1, P]`: `[len(text), V]` for each text.

    Two forwards of the model alone, fresh for these texts: one reads the prompt, the other all texts behind it. The
    columns that fill short texts up stand behind them, where no token sees them.
    """
    last, width = int(prompt[0, -1]), max(map(len, texts))
    rows = [[last, *text[:-1], *[last] * (width - len(text))] for text in texts]
    cache = read_prompt(model, prompt, len(rows))
    tokens = torch.tensor(rows, device=model.device)
    logits = model(input_ids=tokens, cache=cache, use_cache=True, return_dict=True).logits
    return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]


def law_record(
    logits: Tensor,
    temperature: float,
    text: Sequence[int],
    proposals: Sequence[Proposal] | None,
    generator: torch.Generator,
) -> LawRecord:
    """All sums of one text.

    Args:
        logits: the model's, `[L, V]`.
        temperature: divides them.
        text: the L tokens.
        proposals: what was proposed for each token, where that was fixed before the token; None: only tests that
            ignore the draft.
        generator: randomises the PIT.
    """
    record = LawRecord(len(text))
    device = noise_device(logits.device)
    # A few tokens at a time: every further pass over the vocabulary then finds its numbers in the processor's cache.
    for start in range(0, len(text), _TOKENS_AT_ONCE):
        part = slice(start, start + _TOKENS_AT_ONCE)
        log_p = (logits[part].to(device).double() / temperature).log_softmax(-1)
        _add_tokens(record, log_p, text[part], None if proposals is None else proposals[part], generator)
    return record


def _add_tokens(
    record: LawRecord,
    log_p: Tensor,
    text: Sequence[int],
    proposals: Sequence[Proposal] | None,
    generator: torch.Generator,
) -> None:
    tokens = torch.tensor(text, device=log_p.device)
    strata = [ALL] * len(text) if proposals is None else [one.stratum for one in proposals]
    p = log_p.exp()
    log_p = log_p.clamp_min(_LOG_LIMIT)
    _add(record, LOG_LIKELIHOOD, strata, moments(p, log_p, tokens))
    values = randomised_pit(p, tokens, generator)
    for stratum, value in zip(strata, values, strict=True):
        for name in {ALL, stratum}:
            record.pit.setdefault(name, []).append(round(value, _DIGITS))
    if proposals is None:
        return
    drawn = [i for i, one in enumerate(proposals) if one.q is not None]
    if drawn:
        q = torch.stack([one.q for one in proposals if one.q is not None]).to(p)
        ratio = (q.clamp_min(1e-300).log() - log_p[drawn]).clamp(-_RATIO_LIMIT, _RATIO_LIMIT)
        _add(record, LOG_RATIO, [strata[i] for i in drawn], moments(p[drawn], ratio, tokens[drawn]))
    for i, one in enumerate(proposals):
        members = set(one.picked if one.q is None else one.q.topk(_TOP_OF_Q).indices.tolist())
        if members:
            _add(record, MEMBERSHIP, [one.stratum], [_membership(p[i], members, text[i])])


def _membership(p: Tensor, members: set[int], token: int) -> Sums:
    """The moments of an indicator."""
    share = min(float(p[list(members)].sum()), 1.0)
    variance = share * (1.0 - share)
    return Sums(1, (token in members) - share, variance, variance * (1.0 - 2.0 * share))


def moments(p: Tensor, f: Tensor, tokens: Tensor) -> list[Sums]:
    """For each token f(x) minus its mean, and variance and third central moment of f, all under p.

    `p` and `f` are float64 `[L, V]`, and f is finite.
    """
    weighted = p * f
    mean = weighted.sum(-1)
    second = torch.linalg.vecdot(weighted, f)
    third = torch.linalg.vecdot(weighted.mul_(f), f)
    excess = f.gather(-1, tokens[:, None])[:, 0] - mean
    variance = (second - mean.square()).clamp_min(0.0)
    columns = (excess, variance, third - 3 * mean * variance - mean**3)
    return [Sums(1, *values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _add(record: LawRecord, test: str, strata: Sequence[str], terms: Sequence[Sums]) -> None:
    for stratum, term in zip(strata, terms, strict=True):
        for name in {ALL, stratum}:
            record.add(test, name, term)


def randomised_pit(p: Tensor, tokens: Tensor, generator: torch.Generator) -> list[float]:
    """P(p(y) < p(x)) + U P(p(y) = p(x)) for each token x, with y from the same law: `p` `[L, V]`, `tokens` `[L]`."""
    chosen = p.gather(-1, tokens[:, None])
    below = p.masked_fill(p >= chosen, 0.0).sum(-1)
    level = (p == chosen).sum(-1) * chosen[:, 0]
    uniform = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(p.device)
    result: list[float] = (below + uniform * level).clamp(0.0, 1.0).tolist()
    return result
