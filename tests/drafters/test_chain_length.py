"""Chains as long as pays; a useless draft is tried ever more rarely, and one that has become right comes back."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from hf_specdec.drafters.chain_length import ChainLength
from hf_specdec.drafters.payoff import best_length

COST = 0.42  # a quarter of the layers of a small model with a large head
LONGEST = 6


def play(chain: ChainLength, rounds: int, rights: int) -> list[int]:
    """The lengths of so many rounds, of whose guesses the first `rights` come true."""
    lengths = []
    for _ in range(rounds):
        length = chain.value
        right = min(length, rights)
        chain.observe(min(right + 1, length), right)
        lengths.append(length)
    return lengths


@pytest.mark.parametrize("cost", [0.1, 0.2, COST, 0.9])
@pytest.mark.parametrize("rounds", [128, 256, 1024])
def test_a_useless_draft_costs_less_than_three_per_cent(cost: float, rounds: int) -> None:
    lengths = play(ChainLength(cost, LONGEST), rounds, 0)

    assert sum(lengths) * cost < 0.03 * rounds


def test_pauses_double_up_to_a_bound() -> None:
    lengths = play(ChainLength(COST, LONGEST), 1000, 0)

    tried = [number for number, length in enumerate(lengths) if length]
    pauses = [after - before - 1 for before, after in zip(tried, tried[1:], strict=False)]
    assert [pause for pause in pauses if pause][:3] == [16, 32, 64]
    assert set(pauses[4:]) == {64}
    assert all(lengths[number] == 1 for number in tried)


def test_a_draft_that_has_become_right_comes_back() -> None:
    """Even after a long time; from the first right guess on it is used in every round."""
    chain = ChainLength(COST, LONGEST)
    play(chain, 1000, 0)

    lengths = play(chain, 120, LONGEST)

    first = next(number for number, length in enumerate(lengths) if length)
    assert first <= 64
    assert all(lengths[first:])
    assert lengths[first:] == sorted(lengths[first:])
    assert lengths[first + 30] == LONGEST


def test_a_draft_that_turns_useless_again_is_left_alone_again() -> None:
    chain = ChainLength(COST, LONGEST)
    play(chain, 100, LONGEST)
    assert chain.acceptance > 0.95

    lengths = play(chain, 300, 0)

    assert lengths[0] == LONGEST
    assert sum(lengths[40:]) <= 7
    assert next(number for number in range(300) if not any(lengths[number : number + 16])) < 30


def test_a_right_guess_is_followed_by_another_at_once() -> None:
    chain = ChainLength(COST, LONGEST)
    play(chain, 1000, 0)
    while not chain.value:
        chain.observe(0, 0)

    chain.observe(1, 1)
    assert chain.value == 1
    chain.observe(1, 0)
    assert chain.value == 0


@pytest.mark.parametrize(("cost", "acceptance"), [(0.05, 0.25), (0.1, 0.5), (COST, 0.75)])
def test_a_draft_that_pays_stays_in_use(cost: float, acceptance: float) -> None:
    """Its chains have about the length that is best for its acceptance."""
    chain = ChainLength(cost, LONGEST)
    outcomes = cycle([True] * round(4 * acceptance) + [False] * round(4 - 4 * acceptance))
    lengths = []
    for _ in range(300):
        lengths.append(chain.value)
        outcome = list(islice(outcomes, chain.value))
        right = outcome.index(False) if False in outcome else len(outcome)
        chain.observe(min(right + 1, len(outcome)), right)

    assert all(lengths)
    assert abs(sum(lengths[50:]) / 250 - best_length(acceptance, cost, LONGEST)) <= 1.5


def test_rounds_without_guesses_teach_nothing() -> None:
    """The prompt's round, and the last one of a text."""
    chain = ChainLength(COST, LONGEST)
    before = chain.acceptance, chain.value

    chain.observe(0, 0)

    assert (chain.acceptance, chain.value) == before


@pytest.mark.parametrize("longest", [0, 1])
def test_the_longest_chain(longest: int) -> None:
    assert set(play(ChainLength(0.1, longest), 50, 1)) == {longest}
