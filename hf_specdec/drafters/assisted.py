"""A draft model that guesses a chain, one token after the other (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.settings import draft_setting
from hf_specdec.sampling import Children
from hf_specdec.tree import DraftTree, chain_parents


@dataclass
class Assisted(Drafter):
    """Strategy "assisted": `assistant_model` drafts a chain.

    Its length and early stop are transformers' own settings, given to `generate` or found in the draft's
    `generation_config`: `num_assistant_tokens`, `num_assistant_tokens_schedule` (the heuristics start afresh in every
    call) and `assistant_confidence_threshold`.
    """

    name = "assisted"
    needs_draft_model = True
    settings = frozenset({"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"})

    _draft: DraftModel = field(init=False, repr=False, compare=False)
    _length: ChainLength = field(init=False, repr=False, compare=False)
    _threshold: float = field(init=False, repr=False, compare=False)

    @property
    def chains_only(self) -> bool:
        """One guess a position."""
        return True

    def begin(self, context: DraftContext) -> Self:
        """Let the draft read the prompt."""
        drafter = super().begin(context)
        assert context.draft_model is not None
        drafter._length = ChainLength.from_context(context)
        drafter._threshold = draft_setting(context, "assistant_confidence_threshold") or 0.0
        drafter._draft = DraftModel(context.draft_model, context)
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Draft until the length, the row's budget or the draft's confidence ends the chain."""
        chains = [
            _Chain(pending, min(self._length.tokens, budget))
            for pending, budget in zip(context.pending_tokens, self._draft.budgets(context), strict=True)
        ]
        if not any(chain.grows for chain in chains):
            return DraftTree.roots(context.pending_tokens)
        scores = self._draft.catch_up(context.texts)
        for depth in range(1, max(chain.limit for chain in chains) + 1):
            growing = [row for row, chain in enumerate(chains) if chain.grows]
            steps = [context.num_generated[row] + depth - 1 for row in growing]
            drawn = context.sampling.draw_children(growing, steps, scores[growing], [1] * len(growing))
            for row, children in zip(growing, drawn, strict=True):
                chains[row].add(children, self._threshold)
            if not any(chain.grows for chain in chains):
                break
            tokens = torch.tensor([[chain.tokens[-1]] for chain in chains])
            scores = self._draft.grow(tokens, depth, torch.ones(len(chains), 1, depth, dtype=torch.bool))[:, 0]
        probs = [chain.probs for chain in chains] if context.sampling.fresh is not None else None
        tokens_of_rows = [chain.tokens for chain in chains]
        return DraftTree(tokens_of_rows, [chain_parents(len(row)) for row in tokens_of_rows], probs)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Keep the accepted part of the draft's cache; the last drafted token was never fed."""
        grown = max(tree.width - 2, 0)
        self._draft.keep([[node - 1 for node in path if 1 <= node <= grown] for path in accepted])
        drafted = [count for count in tree.num_drafted if count]
        if drafted:
            self._length.adapt(
                all(len(path) - 1 == count for path, count in zip(accepted, tree.num_drafted, strict=True) if count)
            )


@dataclass
class ChainLength:
    """Tokens to draft a round, by transformers' `num_assistant_tokens_schedule`."""

    tokens: int
    adaptive: bool

    @classmethod
    def from_context(cls, context: DraftContext) -> ChainLength:
        """Read the call's and the draft's settings."""
        schedule = draft_setting(context, "num_assistant_tokens_schedule")
        return cls(draft_setting(context, "num_assistant_tokens"), schedule in ("heuristic", "heuristic_transient"))

    def adapt(self, all_accepted: bool) -> None:
        """Two more after a round without a miss, one less after a miss."""
        if self.adaptive:
            self.tokens = self.tokens + 2 if all_accepted else max(1, self.tokens - 1)


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
