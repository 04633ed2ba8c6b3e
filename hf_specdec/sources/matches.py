"""What followed the longest earlier occurrence of a text's end: in the text itself, or in a store of other texts.

After SuffixDecoding (Oliaro et al. 2024): continuations weighted by how often they occurred.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from hf_specdec.sources.automaton import ROOT, SuffixAutomaton
from hf_specdec.sources.base import Guess, Source

_MAX_GUESSES = 6
# A context that so many different tokens followed says little, and looking through them takes long.
_MAX_FOLLOWERS = 256
# Matches of 1, 2, 3, 4, 5, 6 to 8 and 9 or more tokens, and how often their continuation came true in chat,
# translation, summaries and arithmetic when it was the only one seen.
_LENGTHS = (1, 2, 3, 4, 5, 6, 9)
_PRIORS = (0.30, 0.55, 0.70, 0.72, 0.75, 0.78, 0.88)
# Shares of a context's occurrences that had this continuation, and how much of the prior is left.
_SHARES = (0.15, 0.35, 0.7, 1.0)
_WEIGHTS = (0.2, 0.35, 0.5, 0.8)


class Match(NamedTuple):
    """A stretch of `length` tokens that ends a text and stands at `state` of an automaton."""

    automaton: SuffixAutomaton
    state: int
    length: int


class OwnText(Source):
    """Continuations from prompt and output of the row itself."""

    def __init__(self, batch_size: int) -> None:
        self._automata = [SuffixAutomaton() for _ in range(batch_size)]

    def start(self, row: int, text: Sequence[int]) -> Match | None:
        """The longest end of the text that occurred in it before."""
        automaton = self._automata[row]
        automaton.extend(text[automaton.lengths[automaton.end] :])
        state = automaton.links[automaton.end]
        return Match(automaton, state, automaton.lengths[state]) if state > ROOT else None

    def guesses(self, state: Match) -> list[Guess]:
        """The continuations that occurred most often."""
        return continuations(state, "own text")


def continuations(match: Match, origin: str) -> list[Guess]:
    """What followed a match, most frequent first; `origin` sets its statistics apart."""
    automaton, length = match.automaton, match.length
    state = automaton.settled(match.state, length)
    followers, counts = automaton.transitions[state], automaton.counts
    if len(followers) > _MAX_FOLLOWERS:
        return []
    best = heapq.nlargest(_MAX_GUESSES, followers.items(), key=lambda item: counts[item[1]])
    total = sum(map(counts.__getitem__, followers.values()))
    length_class = sum(length >= least for least in _LENGTHS) - 1
    guesses = []
    for token, next_state in best:
        count = counts[next_state]
        share_class = sum(count >= least * total for least in _SHARES)
        weight = _WEIGHTS[share_class] if count < total else 1.0
        once = count == 1
        kind = (origin, length_class, share_class, once)
        guesses.append(Guess(token, kind, _PRIORS[length_class] * weight, Match(automaton, next_state, length + 1)))
    return guesses
