"""A suffix automaton that counts: every stretch of the texts seen so far, how often it occurred, and what followed.

Blumer et al. 1985, built online: at most 2n states and 3n transitions for n tokens. A token adds one state, sometimes
a second one with a copy of another's transitions, and is counted in a capped number of contexts.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
_NONE = -1
# Contexts that end at a token and get its count, longest first; more than this many only occur in endless repetition.
_MAX_COUNTED = 64


class SuffixAutomaton:
    """States stand for sets of stretches that occur at the same places; transitions for the tokens that follow them.

    Attributes:
        transitions: for each state a dict from the next token to the next state.
        links: for each state that of its longest suffix which occurs at more places.
        lengths: for each state the number of tokens of its longest stretch.
        counts: for each state how often its stretches occurred.
        end: the state of the whole text.
    """

    def __init__(self) -> None:
        self.transitions: list[dict[int, int]] = [{}]
        self.links = [_NONE]
        self.lengths = [0]
        self.counts = [0]
        self.end = ROOT

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From the longest known suffix of a text to that of the text with one more token.

        Args:
            state: where the suffix stands.
            length: its number of tokens.
            token: the token that is added to the text.

        Returns:
            The new state and length; `ROOT` and 0 if the token never occurred.
        """
        state = self.settled(state, length)
        while token not in self.transitions[state]:
            if state == ROOT:
                return ROOT, 0
            state = self.links[state]
            length = self.lengths[state]
        state = self.transitions[state][token]
        return self.settled(state, length + 1), length + 1

    def settled(self, state: int, length: int) -> int:
        """The state of a stretch of this length that stood at `state`: other texts may have split that since."""
        while state != ROOT and length <= self.lengths[self.links[state]]:
            state = self.links[state]
        return state

    def _append(self, token: int) -> None:
        new = self._add_state({}, _NONE, self.lengths[self.end] + 1, 0)
        state = self.end
        while state != _NONE and token not in self.transitions[state]:
            self.transitions[state][token] = new
            state = self.links[state]
        self.links[new] = ROOT if state == _NONE else self._exact(state, token)
        self.end = new
        self._count(new)

    def _exact(self, state: int, token: int) -> int:
        """The state whose longest stretch is that of `state` and the token; split off from a longer one if need be."""
        target = self.transitions[state][token]
        length = self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        clone = self._add_state(dict(self.transitions[target]), self.links[target], length, self.counts[target])
        while state != _NONE and self.transitions[state].get(token) == target:
            self.transitions[state][token] = clone
            state = self.links[state]
        self.links[target] = clone
        return clone

    def _add_state(self, transitions: dict[int, int], link: int, length: int, count: int) -> int:
        self.transitions.append(transitions)
        self.links.append(link)
        self.lengths.append(length)
        self.counts.append(count)
        return len(self.lengths) - 1

    def _count(self, state: int) -> None:
        for _ in range(_MAX_COUNTED):
            if state == ROOT:
                return
            self.counts[state] += 1
            state = self.links[state]
