"""From sampled texts to the sums of the law tests: every token against the model's own probabilities.

The probabilities come from a fresh forward over the finished text, so nothing of the generating run is believed but
its tokens and, under rejection sampling, what was proposed before each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.audit.recording import Proposal
from hf_specdec.audit.statistics import Sums
from hf_specdec.compat import forward_parameters
from hf_specdec.sampling import noise_device

ALL = "all"
LOG_LIKELIHOOD, LOG_RATIO, MEMBERSHIP, PIT = "log p", "log q/p", "membership", "PIT"
_RATIO_LIMIT = 20.0  # of log q/p: any bound fixed in advance leaves the test exact
_TOP_OF_Q = 2  # a set of drawn guesses is random, the likeliest tokens of their law are not
_DIGITS = 5


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
def forced_probs(model: PreTrainedModel, prompt: Tensor, text: Sequence[int], temperature: float) -> Tensor:
    """The model's law of each token of a text, float64 `[len(text), V]`, from one forward; `prompt` is `[1, P]`."""
    tokens = torch.cat([prompt[0], prompt.new_tensor(text)])[None, :-1].to(model.device)
    keep = {"logits_to_keep": len(text)} if "logits_to_keep" in forward_parameters(model) else {}
    logits = model(input_ids=tokens, use_cache=False, return_dict=True, **keep).logits[0, -len(text) :]
    probs: Tensor = (logits.to(noise_device(logits.device)).double() / temperature).softmax(-1)
    return probs


def law_record(
    p: Tensor, text: Sequence[int], proposals: Sequence[Proposal] | None, generator: torch.Generator
) -> LawRecord:
    """All sums of one text.

    Args:
        p: float64 `[L, V]`, the law of each token.
        text: the L tokens.
        proposals: what was proposed for each token, where that was fixed before the token; None: only tests that
            ignore the draft.
        generator: randomises the PIT.
    """
    record = LawRecord(len(text))
    tokens = torch.tensor(text, device=p.device)
    strata = [ALL] * len(text) if proposals is None else [one.stratum for one in proposals]
    log_p = torch.where(p > 0, p, 1.0).log()
    _add(record, LOG_LIKELIHOOD, strata, moments(p, log_p, tokens))
    values = randomised_pit(p, tokens, generator)
    for stratum, value in zip(strata, values, strict=True):
        for name in {ALL, stratum}:
            record.pit.setdefault(name, []).append(round(value, _DIGITS))
    if proposals is not None:
        _add_drafts(record, p, log_p, tokens, proposals)
    return record


def _add_drafts(record: LawRecord, p: Tensor, log_p: Tensor, tokens: Tensor, proposals: Sequence[Proposal]) -> None:
    guessed = [i for i, one in enumerate(proposals) if one.q is not None or one.picked]
    drawn = [i for i in guessed if proposals[i].q is not None]
    if drawn:
        q = torch.stack([one.q for one in proposals if one.q is not None]).to(p)
        ratio = (q.clamp_min(1e-300).log() - log_p[drawn]).clamp(-_RATIO_LIMIT, _RATIO_LIMIT)
        _add(record, LOG_RATIO, [proposals[i].stratum for i in drawn], moments(p[drawn], ratio, tokens[drawn]))
    if guessed:
        members = torch.zeros(len(guessed), p.shape[1], dtype=p.dtype, device=p.device)
        for i, index in enumerate(guessed):
            one = proposals[index]
            members[i, list(one.picked) if one.q is None else one.q.topk(_TOP_OF_Q).indices.tolist()] = 1.0
        _add(
            record, MEMBERSHIP, [proposals[i].stratum for i in guessed], moments(p[guessed], members, tokens[guessed])
        )


def moments(p: Tensor, f: Tensor, tokens: Tensor) -> list[Sums]:
    """For each token f(x) minus its mean, and variance and third central moment of f, all under p."""
    f = torch.where(p > 0, f, 0.0)
    centred = f - (p * f).sum(-1, keepdim=True)
    squares = p * centred.square()
    excess = centred.gather(-1, tokens[:, None])[:, 0]
    columns = (excess.tolist(), squares.sum(-1).tolist(), (squares * centred).sum(-1).tolist())
    return [Sums(1, *values) for values in zip(*columns, strict=True)]


def _add(record: LawRecord, test: str, strata: Sequence[str], terms: Sequence[Sums]) -> None:
    for stratum, term in zip(strata, terms, strict=True):
        for name in {ALL, stratum}:
            record.add(test, name, term)


def randomised_pit(p: Tensor, tokens: Tensor, generator: torch.Generator) -> list[float]:
    """F(x-) + U p(x) of each token, with tokens in the order of their probability: `p` `[L, V]`, `tokens` `[L]`."""
    chosen = p.gather(-1, tokens[:, None])
    ids = torch.arange(p.shape[1], device=p.device)
    below = (p < chosen) | ((p == chosen) & (ids < tokens[:, None]))
    uniform = torch.rand(len(tokens), generator=generator, dtype=torch.float64).to(p.device)
    values = (p * below).sum(-1) + uniform * chosen[:, 0]
    result: list[float] = values.clamp(0.0, 1.0).tolist()
    return result
