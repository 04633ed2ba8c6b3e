"""The drafter of the negative controls: the target itself, spoilt so that it is often right and often wrong.

A wrong rule shows only where guesses are tried. With this drafter they are, whatever strategies and draft models the
audited setup has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from hf_specdec.drafters import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.chain import draft_chains, keep_accepted
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.sampling import Sampling
from hf_specdec.tree import DraftTree

_FLATNESS = 0.6
_WRONG_EVERY = 4


@dataclass
class SelfDraft(Drafter):
    """Drafts a chain with the target and a cache of its own.

    Sampling, the draft's law is the target's at a higher temperature. Greedily, every fourth guess is the second best.

    Args:
        num_tokens: length of the chain.
        picked: take the likeliest tokens also while sampling, so that guesses count as point masses.
    """

    num_tokens: int = 3
    picked: bool = False

    name = "self_draft"

    _draft: _SpoiltModel = field(init=False, repr=False, compare=False)

    @property
    def chains_only(self) -> bool:
        """One guess a position."""
        return True

    def begin(self, context: DraftContext) -> Self:
        """Let the second copy of the target read the prompt."""
        drafter = super().begin(context)
        drafter._draft = _SpoiltModel(DraftModel(context.target, context), context.sampling.greedy)
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Draft the chain."""
        if self.picked:
            context = replace(context, sampling=Sampling(None))
        return draft_chains(context, self._draft, self.num_tokens, 0.0)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Keep the accepted part."""
        keep_accepted(self._draft, tree, accepted)


class _SpoiltModel:
    """A draft model whose scores are made worse."""

    def __init__(self, draft: DraftModel, greedy: bool) -> None:
        self._draft = draft
        self._greedy = greedy
        self._lengths: list[int] = []
        self.budgets = draft.budgets
        self.keep = draft.keep

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Tensor:
        self._lengths = [len(text) for text in texts]
        return self._spoil(self._draft.catch_up(texts), 0)

    def grow(self, tokens: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        scores = self._draft.grow(tokens, depth, ancestors)
        return torch.stack([self._spoil(scores[:, node], depth) for node in range(scores.shape[1])], dim=1)

    def _spoil(self, scores: Tensor, depth: int) -> Tensor:
        if not self._greedy:
            return scores * _FLATNESS
        for row, length in enumerate(self._lengths):
            if (length + depth) % _WRONG_EVERY == 0:
                scores[row, scores[row].argmax()] = -torch.inf
        return scores
