"""The tree of the likeliest continuations that some sources know, grown best-first.

A node's score is the product of the measured acceptance of the guesses on its path. Another node is worth its cost
while its score exceeds what that time would earn otherwise (Charnov's marginal value theorem): the time of one node
times the pace at which the call has been gaining tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.sources.base import Guess, Source

# What a round with guesses costs beyond its nodes, as a share of a forward of one node: masks, compaction, drafting.
_ROUND_COST = 0.04
_PACE_MEMORY = 0.9
_PRIOR_WEIGHT = 6.0  # observations that a prior counts for
_MAX_WEIGHT = 60.0  # observations that are remembered
# How much less a blind guess is believed beforehand when sources that see the path guess other tokens alone.
_SILENCE = 0.5


class Acceptance:
    """How often each kind of guess has come true so far, with slow forgetting."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, tuple[float, float]] = {}  # kind -> (came true, all)

    def rate(self, guess: Guess) -> float:
        """Share of guesses of this kind that came true; starts at the guess's prior."""
        counts = self._counts.get(guess.kind)
        return guess.prior if counts is None else counts[0] / counts[1]

    def learn(self, guess: Guess, came_true: bool) -> None:
        """Add one outcome."""
        true, total = self._counts.get(guess.kind, (_PRIOR_WEIGHT * guess.prior, _PRIOR_WEIGHT))
        kept = 1.0 if total < _MAX_WEIGHT else 1.0 - 1.0 / _MAX_WEIGHT
        self._counts[guess.kind] = (kept * true + came_true, kept * total + 1.0)


class Pace:
    """Tokens that the call gains in the time of a forward of one node, and what trees that pays for.

    Args:
        node_cost: time of one more node as a share of a forward of one node.
    """

    def __init__(self, node_cost: float) -> None:
        self._node_cost = node_cost
        self._value = 1.0

    @property
    def least_score(self) -> float:
        """A node that is less likely to be accepted costs more than it gains."""
        return self._node_cost * self._value

    def pays(self, scores: Sequence[float]) -> bool:
        """Whether guesses with these scores are worth drafting at all."""
        return sum(scores) > self._value * self._cost(len(scores))

    def observe(self, num_guesses: int, num_tokens: int) -> None:
        """A row gained so many tokens in a round with so many guesses."""
        pace = num_tokens / (1.0 + self._cost(num_guesses))
        self._value = max(_PACE_MEMORY * self._value + (1.0 - _PACE_MEMORY) * pace, 1.0)

    def _cost(self, num_guesses: int) -> float:
        return _ROUND_COST + self._node_cost * num_guesses if num_guesses else 0.0


@dataclass(slots=True)
class _Candidate:
    """A token that one or more sources guess at a node.

    Attributes:
        token: its id.
        states: where each source stands if it is right; None for those that did not guess it.
        rate: how likely the token is.
        guesses: what guesses it, and is told whether it came true.
        blind, seeing: kinds of the guesses of blind sources, and of all others.
    """

    token: int
    states: list[Any | None]
    rate: float = 0.0
    guesses: list[Guess] = field(default_factory=list)
    blind: list[Hashable] = field(default_factory=list)
    seeing: list[Hashable] = field(default_factory=list)


@dataclass
class GrownRow:
    """One row's tree, with the guesses that were looked at for each node, drafted or not."""

    tokens: list[int]
    parents: list[int]
    scores: list[float] = field(default_factory=list)
    candidates: list[list[_Candidate]] = field(default_factory=list)

    def cut(self) -> None:
        """Keep the root alone; what was guessed for it still gets its outcome."""
        del self.tokens[1:], self.parents[1:], self.scores[:]

    def learn(self, path: Sequence[int], next_tokens: Sequence[int], acceptance: Acceptance) -> None:
        """Give every guess at the accepted nodes its outcome; guesses count whether they were drafted or not.

        Args:
            path: accepted nodes, root first.
            next_tokens: the token that followed each of them.
            acceptance: learns.
        """
        for node, actual in zip(path, next_tokens, strict=True):
            for candidate in self.candidates[node]:
                for guess in candidate.guesses:
                    acceptance.learn(guess, guess.token == actual)


def grow(
    sources: Sequence[Source],
    row: int,
    text: Sequence[int],
    acceptance: Acceptance,
    *,
    max_nodes: int,
    max_depth: int,
    least_score: float,
    end_tokens: frozenset[int] = frozenset(),
) -> GrownRow:
    """Grow one row's tree. Where several sources guess a token, the one that is right most often speaks for it.

    Args:
        sources: in any order.
        row: row of the batch.
        text: its text; the last token becomes the root.
        acceptance: what guesses are worth.
        max_nodes: number of guesses.
        max_depth: of the deepest guess; 0 only looks at what the root's guesses would be.
        least_score: less likely guesses are left out.
        end_tokens: tokens that nothing follows.
    """
    grown = GrownRow([text[-1]], [-1])
    depths = [0]
    heap: list[tuple[float, int, int, _Candidate]] = []
    order = itertools.count()  # equal scores: first come, first served

    def expand(node: int, score: float, states: Sequence[Any | None]) -> None:
        candidates = _candidates(sources, states, acceptance)
        grown.candidates.append(list(candidates.values()))
        if depths[node] < max_depth:
            for candidate in candidates.values():
                if score * candidate.rate > least_score:
                    heapq.heappush(heap, (-score * candidate.rate, next(order), node, candidate))

    nowhere = [None] * len(sources)
    expand(0, 1.0, [source.start(row, text) for source in sources])
    while heap and len(grown.tokens) <= max_nodes:
        negative, _, parent, candidate = heapq.heappop(heap)
        grown.tokens.append(candidate.token)
        grown.parents.append(parent)
        grown.scores.append(-negative)
        depths.append(depths[parent] + 1)
        ended = candidate.token in end_tokens
        expand(len(depths) - 1, -negative, nowhere if ended else candidate.states)
    return grown


def _candidates(
    sources: Sequence[Source], states: Sequence[Any | None], acceptance: Acceptance
) -> dict[int, _Candidate]:
    candidates: dict[int, _Candidate] = {}
    for index, (source, state) in enumerate(zip(sources, states, strict=True)):
        for guess in source.guesses(state) if state is not None else ():
            candidate = candidates.get(guess.token)
            if candidate is None:
                candidate = candidates[guess.token] = _Candidate(guess.token, [None] * len(sources))
            candidate.rate = max(candidate.rate, acceptance.rate(guess))
            candidate.guesses.append(guess)
            candidate.states[index] = guess.state
            (candidate.blind if source.blind else candidate.seeing).append(guess.kind)
    if any(candidate.seeing for candidate in candidates.values()):
        _weigh_blind_guesses(candidates, acceptance)
    return candidates


def _weigh_blind_guesses(candidates: dict[int, _Candidate], acceptance: Acceptance) -> None:
    """A blind guess comes true more often if sources that see the path guess it too, so the two count together."""
    for candidate in candidates.values():
        if candidate.blind:
            prior = candidate.rate if candidate.seeing else _SILENCE * candidate.rate
            joint = Guess(candidate.token, (tuple(candidate.blind), tuple(candidate.seeing)), prior, None)
            candidate.guesses.append(joint)
            candidate.rate = acceptance.rate(joint)
