"""The automaton against counting by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.sources.automaton import ROOT, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def occurrences(text: list[int], part: list[int]) -> int:
    return sum(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def find(automaton: SuffixAutomaton, part: list[int]) -> int | None:
    state: int | None = ROOT
    for token in part:
        state = automaton.transitions[state].get(token) if state is not None else None
    return state


@given(TEXTS)
def test_every_stretch_is_found_with_its_count(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state = find(automaton, text[start:end])
            assert state is not None
            assert automaton.counts[state] == occurrences(text, text[start:end])
    assert automaton.lengths[automaton.end] == len(text)
    assert len(automaton.counts) <= max(2 * len(text), 2)


@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_nothing_else_is_found(text: list[int], part: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert (find(automaton, part) is not None) == (occurrences(text, part) > 0)


@given(TEXTS, TEXTS)
def test_steps_keep_the_longest_end_that_occurs(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    state, length = ROOT, 0
    for position, token in enumerate(other, start=1):
        state, length = automaton.step(state, length, token)
        read = other[:position]
        longest = max(n for n in range(position + 1) if n == 0 or occurrences(text, read[-n:]))
        assert length == longest
        assert state == (find(automaton, read[-longest:]) if longest else ROOT)


def test_endless_repetition_stays_cheap() -> None:
    """The number of counted contexts a token is capped: without the cap this would take 2 * 10**8 steps."""
    automaton = SuffixAutomaton()
    automaton.extend([7] * 20_000)
    assert automaton.transitions[automaton.links[automaton.end]] == {7: automaton.end}
