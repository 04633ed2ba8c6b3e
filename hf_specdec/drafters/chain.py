"""Drafting a chain with a model: one guess after the other, in all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftContext
from hf_specdec.sampling import Children
from hf_specdec.tree import DraftTree, chain_parents


class ChainModel(Protocol):
    """A model that drafts; `DraftModel` is one."""

    def budgets(self, context: DraftContext) -> list[int]:
        """The deepest useful node of each row."""

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Processed scores for the token after each row's text, `[B, V]`."""

    def grow(self, tokens: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Run nodes `[B, m]` of one level; processed scores for the token after each, `[B, m, V]`."""

    def keep(self, tail_slots: Sequence[Sequence[int]]) -> None:
        """The target accepted these of the grown nodes."""


def draft_chains(context: DraftContext, draft: ChainModel, num_tokens: int, threshold: float) -> DraftTree:
    """Draft until the length, the row's budget or the draft's confidence ends each chain.

    Args:
        context: the call.
        draft: the model.
        num_tokens: length of the longest chain.
        threshold: a guess that the draft is less sure of is a chain's last.
    """
    chains = [
        _Chain(pending, min(num_tokens, budget))
        for pending, budget in zip(context.pending_tokens, draft.budgets(context), strict=True)
    ]
    if not any(chain.grows for chain in chains):
        return DraftTree.roots(context.pending_tokens)
    scores = draft.catch_up(context.texts)
    for depth in range(1, max(chain.limit for chain in chains) + 1):
        growing = [row for row, chain in enumerate(chains) if chain.grows]
        steps = [context.num_generated[row] + depth - 1 for row in growing]
        drawn = context.sampling.draw_children(growing, steps, scores[growing], [1] * len(growing))
        for row, children in zip(growing, drawn, strict=True):
            chains[row].add(children, threshold)
        if not any(chain.grows for chain in chains):
            break
        tokens = torch.tensor([[chain.tokens[-1]] for chain in chains])
        scores = draft.grow(tokens, depth, torch.ones(len(chains), 1, depth, dtype=torch.bool))[:, 0]
    probs = [chain.probs for chain in chains] if context.sampling.fresh is not None else None
    tokens_of_rows = [chain.tokens for chain in chains]
    return DraftTree(tokens_of_rows, [chain_parents(len(row)) for row in tokens_of_rows], probs)


def keep_accepted(draft: ChainModel, tree: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
    """Tell the draft which nodes of its chains were accepted; the last drafted token of all was never run."""
    grown = max(tree.width - 2, 0)
    draft.keep([[node - 1 for node in path if 1 <= node <= grown] for path in accepted])


class _Chain:
    """One row's chain while it grows."""

    def __init__(self, pending: int, limit: int) -> None:
        self.tokens = [pending]
        self.limit = limit
        self.grows = limit > 0
        self.probs: dict[int, Tensor] = {}

    def add(self, children: Children, threshold: float) -> None:
        if not children.tokens:
            self.grows = False
            return
        if children.probs is not None:
            self.probs[len(self.tokens) - 1] = children.probs
        self.tokens.append(children.tokens[0])
        # The unsure token itself stays: dropping a *sampled* token because of its value would change the law.
        self.grows = len(self.tokens) <= self.limit and children.confidences[0] >= threshold
