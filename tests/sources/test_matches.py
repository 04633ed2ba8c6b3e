"""Continuations of the longest match."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.sources.matches import OwnText


def test_the_most_frequent_continuation_of_the_longest_match_comes_first() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 5, 2, 6, 1, 2]
    source = OwnText(1)
    match = source.start(0, text)
    assert match is not None
    guesses = source.guesses(match)

    assert match.length == 2
    assert [guess.token for guess in guesses] == [4, 3]  # 6 followed the 2 alone
    assert guesses[0].prior > guesses[1].prior
    assert sorted(guess.token for guess in source.guesses(guesses[0].state)) == [8, 9]


def test_nothing_is_known_before_something_repeats() -> None:
    assert OwnText(1).start(0, [1, 2, 3]) is None
    assert OwnText(1).start(0, [5]) is None


def test_rows_do_not_share_their_texts() -> None:
    source = OwnText(2)
    assert source.start(0, [1, 2, 1]) is not None
    assert source.start(1, [1, 3]) is None


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(1, 24))
def test_reading_on_equals_reading_at_once(text: list[int], first: int) -> None:
    in_two, at_once = OwnText(1), OwnText(1)
    in_two.start(0, text[:first])
    one, other = in_two.start(0, text), at_once.start(0, text)
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert one.length == other.length
        assert [(g.token, g.kind, g.prior) for g in in_two.guesses(one)] == [
            (g.token, g.kind, g.prior) for g in at_once.guesses(other)
        ]


def test_longer_matches_are_believed_more() -> None:
    priors = []
    for length in (1, 2, 3, 4, 5, 6, 9, 30):
        stretch = list(range(100, 100 + length))
        source = OwnText(1)
        match = source.start(0, [*stretch, 7, *stretch])
        assert match is not None
        assert match.length == length
        priors.append(source.guesses(match)[0].prior)
    assert priors == sorted(priors)
    assert priors[-1] < 1


def test_a_context_that_anything_may_follow_says_nothing() -> None:
    text = [token for other in range(1, 400) for token in (0, other)] + [0]
    source = OwnText(1)
    match = source.start(0, text)
    assert match is not None
    assert source.guesses(match) == []
