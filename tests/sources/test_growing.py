"""Best-first growth, what is learned from it, and when it pays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_specdec import Guess, Source
from hf_specdec.sources.growing import Acceptance, GrownRow, Pace, grow


class Table(Source):
    """Guesses by the last token alone; a guess's kind is its token and rate."""

    def __init__(self, rates: dict[int, dict[int, float]], name: str = "table") -> None:
        self.rates = rates
        self.name = name

    def start(self, row: int, text: Sequence[int]) -> int | None:
        return text[-1] if text[-1] in self.rates else None

    def guesses(self, state: int) -> list[Guess]:
        return [
            Guess(token, (self.name, token, rate), rate, token) for token, rate in self.rates.get(state, {}).items()
        ]


def plant(
    sources: Sequence[Source], text: Sequence[int], nodes: int = 8, depth: int = 5, least: float = 0.0
) -> GrownRow:
    return grow(sources, 0, text, Acceptance(), max_nodes=nodes, max_depth=depth, least_score=least)


def paths(row: GrownRow) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(row.tokens[1:], row.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


def test_the_likeliest_paths_come_first() -> None:
    source = Table({0: {1: 0.6, 2: 0.3}, 1: {3: 0.9, 4: 0.1}, 2: {5: 0.5}, 3: {6: 0.2}})
    row = plant([source], [9, 0], nodes=5)
    assert paths(row) == [(1,), (1, 3), (2,), (2, 5), (1, 3, 6)]
    assert row.scores == pytest.approx([0.6, 0.54, 0.3, 0.15, 0.108])


@given(
    rates=st.dictionaries(
        st.integers(0, 4), st.dictionaries(st.integers(0, 4), st.floats(0.01, 0.99), max_size=3), max_size=5
    ),
    nodes=st.integers(1, 10),
    depth=st.integers(0, 4),
    least=st.floats(0, 0.5),
)
def test_no_other_tree_of_its_size_scores_more(
    rates: dict[int, dict[int, float]], nodes: int, depth: int, least: float
) -> None:
    row = plant([Table(rates)], [0], nodes, depth, least)
    paths = (path for length in range(1, depth + 1) for path in itertools.product(range(5), repeat=length))
    scores = [product for path in paths if (product := score(rates, path)) > 0]
    assume(all(abs(product - least) > 1e-9 for product in scores))  # rounding decides there
    scores = [product for product in scores if product > least]
    best = sorted(scores, reverse=True)[:nodes]
    assert sorted(row.scores, reverse=True) == pytest.approx(best)
    assert all(0 <= parent < node for node, parent in enumerate(row.parents[1:], start=1))
    assert len(row.candidates) == len(row.tokens)


def score(rates: dict[int, dict[int, float]], path: Sequence[int]) -> float:
    product, last = 1.0, 0
    for token in path:
        product *= rates.get(last, {}).get(token, 0.0)
        last = token
    return product


def test_a_token_guessed_by_two_sources_is_one_node_worth_the_better_guess() -> None:
    row = plant([Table({0: {1: 0.2}, 1: {2: 0.9}}, "a"), Table({0: {1: 0.7}, 1: {3: 0.8}}, "b")], [0])
    assert paths(row) == [(1,), (1, 2), (1, 3)]
    assert row.scores == pytest.approx([0.7, 0.63, 0.56])


def test_a_source_that_did_not_guess_a_token_has_no_say_behind_it() -> None:
    row = plant([Table({0: {1: 0.5}, 1: {2: 0.5}}), Table({1: {3: 0.5}})], [0])
    assert (1, 2) in paths(row)
    assert (1, 3) not in paths(row)


def test_nothing_grows_behind_the_end_of_a_text() -> None:
    source = Table({0: {1: 0.9, 2: 0.5}, 1: {3: 0.9}, 2: {3: 0.9}})
    row = grow([source], 0, [0], Acceptance(), max_nodes=9, max_depth=9, least_score=0.0, end_tokens=frozenset({1}))
    assert paths(row) == [(1,), (2,), (2, 3)]


def test_sources_that_were_wrong_lose_their_nodes_to_those_that_were_right() -> None:
    boaster, modest = Table({0: {1: 0.9}}, "boaster"), Table({0: {2: 0.2}}, "modest")
    acceptance = Acceptance()
    chosen = []
    for _ in range(30):
        row = grow([boaster, modest], 0, [0], acceptance, max_nodes=1, max_depth=1, least_score=0.0)
        chosen.append(row.tokens[1])
        row.learn([0], [2], acceptance)  # the undrafted guess gets its outcome too
    assert chosen[0] == 1
    assert set(chosen[10:]) == {2}


def test_acceptance_starts_at_the_prior_and_forgets() -> None:
    guess, acceptance = Guess(1, "kind", 0.3, None), Acceptance()
    assert acceptance.rate(guess) == pytest.approx(0.3)
    for _ in range(500):
        acceptance.learn(guess, True)
    assert acceptance.rate(guess) > 0.97
    for _ in range(100):
        acceptance.learn(guess, False)
    assert acceptance.rate(guess) < 0.25


def test_outcomes_reach_the_guesses_on_the_accepted_path_only() -> None:
    source = Table({0: {1: 0.5, 2: 0.4}, 1: {3: 0.5}, 2: {4: 0.5}})
    row = plant([source], [0], nodes=4)
    acceptance = Acceptance()
    row.learn([0, 1], [1, 9], acceptance)
    rate = {
        token: acceptance.rate(Guess(token, ("table", token, prior), prior, token))
        for token, prior in ((1, 0.5), (2, 0.4), (3, 0.5), (4, 0.5))
    }
    assert rate[1] > 0.5
    assert rate[2] < 0.4
    assert rate[3] < 0.5
    assert rate[4] == 0.5


def test_guesses_have_to_earn_their_time() -> None:
    pace = Pace(node_cost=0.02)
    assert pace.least_score == pytest.approx(0.02)
    assert pace.pays([0.1])
    assert not pace.pays([0.05])
    assert not pace.pays([])
    for _ in range(60):
        pace.observe(num_guesses=8, num_tokens=4)
    assert pace.least_score == pytest.approx(0.02 * 4 / 1.2, rel=0.02)
    assert not pace.pays([0.1])
    for _ in range(60):
        pace.observe(num_guesses=8, num_tokens=1)
    assert pace.least_score == pytest.approx(0.02)


def test_what_is_cut_is_still_learned_from() -> None:
    row = plant([Table({0: {1: 0.5}})], [0])
    row.cut()
    assert (row.tokens, row.parents, row.scores) == ([0], [-1], [])
    acceptance = Acceptance()
    row.learn([0], [1], acceptance)
    assert acceptance.rate(Guess(1, ("table", 1, 0.5), 0.5, 1)) > 0.5


class Blind(Source):
    """The same guesses at every place of a depth."""

    blind = True

    def __init__(self, levels: Sequence[dict[int, float]]) -> None:
        self.levels = levels

    def start(self, row: int, text: Sequence[int]) -> int:
        return 0

    def guesses(self, state: int) -> list[Guess]:
        level = self.levels[state] if state < len(self.levels) else {}
        return [Guess(token, ("blind", state), rate, state + 1) for token, rate in level.items()]


def test_a_blind_guess_counts_half_where_others_know_better() -> None:
    """The table knows what follows 0 and 1, and nothing of what follows 2."""
    blind = Blind([{1: 0.4, 2: 0.4}, {3: 0.5, 4: 0.5}])
    row = plant([blind, Table({0: {1: 0.3}, 1: {3: 0.2}})], [0], depth=2)
    scores = dict(zip(paths(row), row.scores, strict=True))
    assert scores == pytest.approx({(1,): 0.4, (2,): 0.2, (1, 3): 0.2, (1, 4): 0.1, (2, 3): 0.1, (2, 4): 0.1})


def test_blind_guesses_are_measured_together_with_what_others_say() -> None:
    blind, table = Blind([{3: 0.5, 4: 0.5}]), Table({0: {3: 0.2}})
    acceptance = Acceptance()
    for actual in (3, 3, 3, 5):
        row = grow([blind, table], 0, [0], acceptance, max_nodes=4, max_depth=1, least_score=0.0)
        row.learn([0], [actual], acceptance)
    row = grow([blind, table], 0, [0], acceptance, max_nodes=4, max_depth=1, least_score=0.0)
    # Six observations stand for the prior: half of 0.5 where the table named another token.
    assert dict(zip(paths(row), row.scores, strict=True)) == pytest.approx({(3,): (3 + 3) / 10, (4,): 1.5 / 10})
    alone = grow([blind], 0, [0], acceptance, max_nodes=4, max_depth=1, least_score=0.0)
    assert alone.scores == pytest.approx([(3 + 3) / 14] * 2)  # both are of one kind: three of eight came true
