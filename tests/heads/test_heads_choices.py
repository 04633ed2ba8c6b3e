from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from hf_specdec import ArgumentError
from hf_specdec.heads import best_tree, checked_rates, checked_tree, expected_tokens, load_tree

RATES = ((0.5, 0.2, 0.1), (0.4, 0.3, 0.05))


def all_trees(rates: tuple[tuple[float, ...], ...], num_nodes: int) -> list[list[tuple[int, ...]]]:
    """Every set of so many nodes that holds the parents of its nodes."""
    nodes = [
        ranks
        for depth in range(1, len(rates) + 1)
        for ranks in itertools.product(*(range(len(rates[level])) for level in range(depth)))
    ]
    return [
        list(chosen)
        for chosen in itertools.combinations(nodes, num_nodes)
        if all(len(node) == 1 or node[:-1] in chosen for node in chosen)
    ]


class TestCheckedTree:
    def test_order_is_by_depth_then_rank(self) -> None:
        assert checked_tree([[1], (0, 1), [0], [0, 0]], 2) == ((0,), (1,), (0, 0), (0, 1))

    def test_too_deep_names_both_numbers(self) -> None:
        with pytest.raises(ArgumentError, match="3 nodes deep, but there are 2 heads"):
            checked_tree([[0], [0, 0], [0, 0, 0]], 2)

    @pytest.mark.parametrize(
        ("tree", "message"),
        [
            ([], "at least one node"),
            ([[0], []], "one is \\[\\]"),
            ([[0], [-1]], "one is \\[-1\\]"),
            ([[0], [True]], "one is \\[True\\]"),
            ([[0], ["0"]], "one is \\['0'\\]"),
            ([0], "one is 0"),
            ([[0], [0]], "\\(0,\\) stands in it twice"),
            ([[0], [1, 0]], "\\(1, 0\\) is in it, but its parent \\(1,\\) is not"),
            ([[0], [5]], "rank of 5, but heads have 5 guesses"),
        ],
    )
    def test_refuses(self, tree: list[list[int]], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            checked_tree(tree, 4, width=5)

    def test_refuses_what_is_no_list(self) -> None:
        with pytest.raises(ArgumentError, match="tree must be a list that has one list of ranks .* not 5"):
            checked_tree(5, 4)  # type: ignore[arg-type]


class TestRates:
    @pytest.mark.parametrize(
        ("rates", "message"),
        [
            (((0.5,),), "rows for 1 heads, but there are 2"),
            (((0.5,), ()), "head 1"),
            (((0.5,), (1.5,)), "head 1"),
            (((-0.1,), (0.5,)), "head 0"),
            (((0.6, 0.6), (0.5,)), "head 0"),
            (((float("nan"),), (0.5,)), "head 0"),
        ],
    )
    def test_refuses(self, rates: tuple[tuple[float, ...], ...], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            checked_rates(rates, 2)

    def test_measured_shares_may_round(self) -> None:
        rates = (torch.tensor([1, 2, 4]) / 7).tolist()
        assert checked_rates([rates], 1) == (tuple(rates),)


class TestExpectedTokens:
    def test_by_hand(self) -> None:
        tree = [(0,), (1,), (0, 0), (1, 1)]
        assert expected_tokens(tree, RATES) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4 + 0.2 * 0.3)

    def test_a_simulation_agrees(self) -> None:
        tree = checked_tree([(0,), (1,), (0, 0), (1, 1)], 2)
        generator = torch.Generator().manual_seed(0)
        draws = []
        for rates in RATES:  # the rank that comes true, the last standing for none
            weights = torch.tensor([*rates, 1 - sum(rates)])
            draws.append(torch.multinomial(weights, 100_000, replacement=True, generator=generator).tolist())
        accepted = sum((first,) in tree for first in draws[0])
        accepted += sum((first,) in tree and (first, second) in tree for first, second in zip(*draws, strict=True))
        assert 1 + accepted / 100_000 == pytest.approx(expected_tokens(tree, RATES), abs=0.01)

    def test_rank_without_a_rate(self) -> None:
        with pytest.raises(ArgumentError, match="3 ranks for head 0, but the tree has the node \\(3,\\)"):
            expected_tokens([(3,)], RATES)


class TestBestTree:
    @pytest.mark.parametrize("num_nodes", range(1, 7))
    @pytest.mark.parametrize("rates", [RATES, ((0.3, 0.3, 0.3), (0.9, 0.05)), ((0.1, 0.6), (0.2, 0.1, 0.6))])
    def test_no_other_tree_is_better(self, rates: tuple[tuple[float, ...], ...], num_nodes: int) -> None:
        tree = best_tree(rates, num_nodes)
        assert len(tree) == num_nodes
        best = max(expected_tokens(other, rates) for other in all_trees(rates, num_nodes))
        assert expected_tokens(tree, rates) == pytest.approx(best, abs=1e-12)

    def test_by_hand(self) -> None:
        # .5, .2, .5 x .4 = .2, .5 x .3 = .15, .1, .2 x .4 = .08
        assert best_tree(RATES, 4) == ((0,), (1,), (0, 0), (0, 1))
        assert best_tree(RATES, 6) == ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))

    def test_nodes_that_never_hold_stay_out(self) -> None:
        assert best_tree(((0.5, 0.0), (0.0, 0.4)), 10) == ((0,), (0, 1))

    def test_refuses(self) -> None:
        with pytest.raises(ArgumentError, match="num_nodes=0"):
            best_tree(RATES, 0)
        with pytest.raises(ArgumentError, match="all zero"):
            best_tree(((0.0, 0.0), (0.5,)), 3)

    @pytest.mark.parametrize("rates", ["abc", 5, None, [[None]], [["0.5"]], [0.5, 0.2], [[10**400]], [[1j]]])
    def test_refuses_rates_that_are_no_numbers(self, rates: object) -> None:
        with pytest.raises(ArgumentError, match="rank_rates must have one list of numbers from 0 to 1 for each head"):
            best_tree(rates, 3)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="rank_rates must have one list of numbers from 0 to 1 for each head"):
            checked_rates(rates, 1)  # type: ignore[arg-type]


class TestLoadTree:
    def test_published_lists(self, tmp_path: Path) -> None:
        path = tmp_path / "choices.json"
        path.write_text("[[0], [0, 0], [1], [0, 1], [0, 0, 0]]")
        assert load_tree(path, 3) == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))

    def test_too_deep_for_the_heads(self, tmp_path: Path) -> None:
        path = tmp_path / "choices.json"
        path.write_text(json.dumps([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]))
        with pytest.raises(ArgumentError, match="choices.json.*4 nodes deep, but there are 3 heads"):
            load_tree(path, 3)

    @pytest.mark.parametrize("text", ["{}", "[[0], [0, 1]", "7"])
    def test_no_tree(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "choices.json"
        path.write_text(text)
        with pytest.raises(ArgumentError, match="choices.json"):
            load_tree(path, 3)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="cannot read a tree"):
            load_tree(tmp_path / "choices.json", 3)
