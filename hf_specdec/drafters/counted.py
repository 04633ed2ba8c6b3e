"""What a strategy's guesses came to in every single row of a batch: a drafter around any other that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.tree import DraftTree


@dataclass
class RowCounts:
    """What `SpeculationStats` counts over all rows, for one.

    Attributes:
        rounds: forwards of the target that the row took part in; reading the prompt is the first.
        drafted: tokens proposed.
        accepted: proposed tokens that were emitted.
        tokens: tokens emitted, the accepted ones among them.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0


class Counted(Drafter):
    """Proposes what another drafter proposes, and counts.

    Statistics of a call come with its output, and so with a cache whose rows a last forward has brought to one length.
    Who wants counts alone is spared that.

    Args:
        drafter: any strategy.
        rows: where to write; made anew when a call begins, so an object serves one call at a time.
    """

    def __init__(self, drafter: Drafter, rows: list[RowCounts]) -> None:
        # What the loop reads from the class of a strategy is this strategy's own.
        for name in ("name", "settings", "needs_draft_model", "needs_hidden_states"):
            setattr(self, name, getattr(drafter, name))
        self._drafter = drafter
        self._rows = rows

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
        begun = super().begin(context)
        begun._drafter = self._drafter.begin(context)
        self._rows[:] = [RowCounts() for _ in context.texts]
        return begun

    def propose(self, context: DraftContext) -> DraftTree:
        """Let the strategy propose."""
        return self._drafter.propose(context)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Count the round, and let the strategy learn from it."""
        for row, path in enumerate(accepted):
            if path:  # empty for rows that have ended
                counts = self._rows[row]
                counts.rounds += 1
                counts.drafted += tree.num_drafted[row]
                counts.accepted += len(path) - 1
                counts.tokens += len(path)
        self._drafter.observe(tree, accepted, outputs)

    def finish(self, context: DraftContext) -> None:
        """Let the strategy finish."""
        for counts, num_generated in zip(self._rows, context.num_generated, strict=True):
            # A row may have run ahead of its end, which is found when the others catch up.
            counts.tokens = min(counts.tokens, num_generated)
        self._drafter.finish(context)
