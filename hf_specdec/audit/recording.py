"""What a strategy proposed for each token of a text: a drafter around any other that takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_specdec.drafters import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.counted import Counted, RowCounts
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


@dataclass
class Notes:
    """Everything one call of a strategy proposed, for each row of the batch.

    Attributes:
        proposals: one for each generated token, and for those that a row had run ahead of its end.
        rows: what they came to.
    """

    proposals: list[list[Proposal]] = field(default_factory=list)
    rows: list[RowCounts] = field(default_factory=list)

    @property
    def counts(self) -> list[dict[str, int]]:
        """For each row the rounds that it took part in, drafted and accepted tokens, as in `SpeculationStats`."""
        return [{"rounds": row.rounds, "drafted": row.drafted, "accepted": row.accepted} for row in self.rows]

    def add(self, tree: DraftTree, accepted: Sequence[Sequence[int]]) -> None:
        """One verified round."""
        for row, path in enumerate(accepted):
            self.proposals[row] += [_proposal(tree, row, node, depth) for depth, node in enumerate(path)]


class Recorder(Counted):
    """Proposes what another drafter proposes, and writes it down.

    Args:
        drafter: any strategy.
        notes: where to write; a recorder serves one call.
    """

    def __init__(self, drafter: Drafter, notes: Notes) -> None:
        super().__init__(drafter, notes.rows)
        self._notes = notes

    def begin(self, context: DraftContext) -> Self:
        """Empty pages."""
        self._notes.proposals[:] = [[] for _ in context.texts]
        return super().begin(context)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Write the round down before the strategy learns from it."""
        self._notes.add(tree, accepted)
        super().observe(tree, accepted, outputs)


def _proposal(tree: DraftTree, row: int, node: int, depth: int) -> Proposal:
    children = tree.children[row][node]
    q = tree.draft_probs[row].get(node) if tree.draft_probs is not None else None
    if not children:
        return Proposal("bonus" if depth else "plain", (), None)
    stratum = str(depth + 1) if depth + 1 < _LAST_NAMED else f"{_LAST_NAMED}+"
    if q is not None:
        return Proposal(stratum, (), q.to(torch.float32))
    return Proposal(stratum, tuple(tree.tokens[row][child] for child in children), None)
