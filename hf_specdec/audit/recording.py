"""What a strategy proposed for each token of a text: a drafter around any other that takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.drafters import DraftContext, Drafter, RoundOutputs
from hf_specdec.tree import DraftTree

_LAST_NAMED = 3


class Proposal(NamedTuple):
    """What stood below the node at which a token was chosen. All of it was fixed before the token was.

    Attributes:
        stratum: "plain" at a root without guesses, "1", "2", "3+" for the guessed tokens of a block in order, "bonus"
            behind the last guess.
        picked: the guesses, if they were picked and not drawn.
        q: the law that they were drawn from, float32 `[V]`, if they were drawn.
    """

    stratum: str
    picked: tuple[int, ...]
    q: Tensor | None


class Notes:
    """Everything one call of a strategy proposed, for each row of the batch.

    Attributes:
        proposals: one for each generated token.
        counts: rounds that the row took part in, drafted and accepted tokens, as in `SpeculationStats`.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, batch_size: int) -> None:
        """Empty pages."""
        self.proposals: list[list[Proposal]] = [[] for _ in range(batch_size)]
        self.counts = [{"rounds": 0, "drafted": 0, "accepted": 0} for _ in range(batch_size)]

    def add(self, tree: DraftTree, accepted: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """One verified round; `starts` are the numbers of tokens that rows had before it."""
        for row, path in enumerate(accepted):
            if path:
                counts, proposals = self.counts[row], self.proposals[row]
                counts["rounds"] += 1
                counts["drafted"] += tree.num_drafted[row]
                counts["accepted"] += len(path) - 1
                del proposals[starts[row] :]
                proposals += [_proposal(tree, row, node, depth) for depth, node in enumerate(path)]


class Recorder(Drafter):
    """Proposes what another drafter proposes, and writes it down.

    Args:
        drafter: any strategy.
        notes: where to write; a recorder serves one call.
    """

    def __init__(self, drafter: Drafter, notes: Notes) -> None:
        # What the loop reads from the class of a strategy is this strategy's own.
        for name in ("name", "settings", "needs_draft_model", "needs_hidden_states"):
            setattr(self, name, getattr(drafter, name))
        self._drafter = drafter
        self._notes = notes
        self._context: DraftContext | None = None
        self._starts: list[int] = []

    @property
    def chains_only(self) -> bool:
        """As the strategy says."""
        return self._drafter.chains_only

    def check(self, target: PreTrainedModel) -> None:
        """Ask the strategy."""
        self._drafter.check(target)

    def num_shared_layers(self, target: PreTrainedModel) -> int:
        """Ask the strategy."""
        return self._drafter.num_shared_layers(target)

    def self_test(self, target: PreTrainedModel) -> None:
        """Ask the strategy."""
        self._drafter.self_test(target)

    def begin(self, context: DraftContext) -> Self:
        """Begin the strategy."""
        recorder = super().begin(context)
        recorder._drafter = self._drafter.begin(context)
        recorder._context = context
        recorder._starts = list(context.num_generated)
        self._notes.begin(len(context.texts))
        return recorder

    def propose(self, context: DraftContext) -> DraftTree:
        """Let the strategy propose."""
        return self._drafter.propose(context)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Write the round down before the strategy learns from it."""
        assert self._context is not None
        self._notes.add(tree, accepted, self._starts)
        self._starts = list(self._context.num_generated)
        self._drafter.observe(tree, accepted, outputs)

    def finish(self, context: DraftContext) -> None:
        """Let the strategy finish."""
        self._drafter.finish(context)


def _proposal(tree: DraftTree, row: int, node: int, depth: int) -> Proposal:
    children = tree.children[row][node]
    q = tree.draft_probs[row].get(node) if tree.draft_probs is not None else None
    if not children:
        return Proposal("bonus" if depth else "plain", (), None)
    stratum = str(depth + 1) if depth + 1 < _LAST_NAMED else f"{_LAST_NAMED}+"
    if q is not None:
        return Proposal(stratum, (), q.to(torch.float32))
    return Proposal(stratum, tuple(tree.tokens[row][child] for child in children), None)
