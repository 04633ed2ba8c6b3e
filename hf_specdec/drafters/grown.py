"""Drafters that ask cheap sources for the next token and grow the tree that pays best."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hf_specdec.checks import is_finite
from hf_specdec.costs import node_cost
from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.settings import eos_tokens, require_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.sources.base import Source
from hf_specdec.sources.growing import Acceptance, GrownRow, Pace, grow
from hf_specdec.tree import DraftTree


@dataclass
class GrownDrafter(Drafter):
    """Base of the strategies that draw on sources; a subclass says which.

    Every guess of a source has an acceptance that is measured while it is used, also when it was not drafted. The tree
    holds the guesses that are likely enough to pay for their time, and none at all while none is: then the text comes
    as fast as by plain decoding, and drafting goes on when the sources have become right again.

    Args:
        nodes: number of guesses a round at most.
        depth: length of a guessed continuation at most.
        node_cost: time of one more node in the target's forward as a share of a forward of one node; measured once for
            a model by default. 0 fills every tree to `nodes`.
    """

    nodes: int = 24
    depth: int = 20
    node_cost: float | None = None

    _sources: list[Source] = field(init=False, repr=False, compare=False)
    _context: DraftContext = field(init=False, repr=False, compare=False)
    _end_tokens: frozenset[int] = field(init=False, repr=False, compare=False)
    _acceptance: Acceptance = field(init=False, repr=False, compare=False)
    _paces: list[Pace] = field(init=False, repr=False, compare=False)
    _grown: Sequence[GrownRow | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, "nodes", "depth")
        cost = self.node_cost
        if cost is not None and (not is_finite(cost) or not 0 <= cost <= 1):
            raise ArgumentError(f"{type(self).__name__}(node_cost={cost!r}) must be a number from 0 to 1")

    @abstractmethod
    def sources(self, context: DraftContext) -> list[Source]:
        """The sources of one call."""

    def begin(self, context: DraftContext) -> Self:
        """Make the sources and measure what nodes cost."""
        drafter = super().begin(context)
        drafter._sources = self.sources(context)
        drafter._context = context
        drafter._end_tokens = eos_tokens(context.config)
        drafter._acceptance = Acceptance()
        cost = self._cost_of_node(context)
        rows = context.batch_size
        # A forward of B rows and one node each costs 1 + cost * (B - 1); a node of one row earns for that row alone.
        drafter._paces = [Pace(cost * rows / (1.0 + cost * (rows - 1))) for _ in range(rows)]
        drafter._grown = [None] * rows
        return drafter

    def _cost_of_node(self, context: DraftContext) -> float:
        return node_cost(context.target) if self.node_cost is None else self.node_cost

    def propose(self, context: DraftContext) -> DraftTree:
        """Grow each row's tree."""
        grown = [self._grow(context, row) for row in range(context.batch_size)]
        self._grown = grown
        return DraftTree([row.tokens for row in grown], [row.parents for row in grown])

    def _grow(self, context: DraftContext, row: int) -> GrownRow:
        pace = self._paces[row]
        grown = grow(
            self._sources,
            row,
            context.texts[row],
            self._acceptance,
            max_nodes=self.nodes,
            max_depth=min(self.depth, context.budgets[row]),
            least_score=pace.least_score,
            end_tokens=self._end_tokens,
        )
        if not pace.pays(grown.scores):
            grown.cut()
        return grown

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Give the guesses their outcome, and the sources the target's scores."""
        for row, path in enumerate(accepted):
            if not path:
                continue
            tokens = tree.tokens[row]
            for source in self._sources:
                source.observe(tokens, outputs.logits[row, : len(tokens)])
        # The text of a row that has ended may have been cut behind the path.
        growing = [row for row, path in enumerate(accepted) if path and self._context.budgets[row]]
        for row in growing:
            self._learn(row, accepted[row])
        if growing and outputs.hidden_states is not None:
            nodes = [accepted[row][-1] for row in growing]
            logits, hidden_states = outputs.logits[growing, nodes], outputs.hidden_states[-1][growing, nodes]
            for source in self._sources:
                source.advance(growing, logits, hidden_states)

    def _learn(self, row: int, path: Sequence[int]) -> None:
        grown, text = self._grown[row], self._context.texts[row]
        if grown is not None:
            grown.learn(path, text[len(text) - len(path) :], self._acceptance)
            self._paces[row].observe(len(grown.tokens) - 1, len(path))

    def finish(self, context: DraftContext) -> None:
        """Hand the outputs to the sources."""
        outputs = [
            _without_padding(text[len(text) - length :], self._end_tokens, context.config.pad_token_id)
            for text, length in zip(context.texts, context.num_generated, strict=True)
        ]
        for source in self._sources:
            source.finish(outputs)


def _without_padding(output: Sequence[int], end_tokens: frozenset[int], pad_token: int | None) -> list[int]:
    """Rows that ended before others were padded: drop what stands behind the end."""
    for length, token in enumerate(output, start=1):
        if token in end_tokens:
            return list(output[:length])
    length = len(output)
    while length and output[length - 1] == pad_token:
        length -= 1
    return list(output[:length])
