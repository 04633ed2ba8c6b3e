"""Trees of ranks: which guesses of which heads are drafted together."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from math import prod
from os import PathLike
from pathlib import Path

from hf_specdec.checks import is_whole, require_whole
from hf_specdec.errors import ArgumentError

Choices = tuple[tuple[int, ...], ...]
"""A tree without its root, one tuple of ranks for each node: `(0, 2)` is the third guess of head 1 behind the best
guess of head 0. Parents stand before their children and siblings in the order of their ranks."""


def checked_tree(tree: Iterable[Sequence[int]], num_heads: int, width: int | None = None) -> Choices:
    """A tree of ranks in the order of `Choices`, if heads can draft it.

    Args:
        tree: one sequence of ranks (from 0) for each node, in any order.
        num_heads: K; no node may lie deeper.
        width: guesses of each head, so that ranks are below it; None: any number.

    Raises:
        ArgumentError: it is no list of nodes or deeper than there are heads, a rank is not a number from 0 to
            `width - 1`, a node stands twice or its parent is missing.
    """
    if not isinstance(tree, Iterable):
        raise ArgumentError(f"tree must be a list that has one list of ranks for each node, not {tree!r}")
    nodes = []
    for node in tree:
        ranks = tuple(node) if isinstance(node, list | tuple) else ()
        if not ranks or any(not is_whole(rank) or rank < 0 for rank in ranks):
            raise ArgumentError(f"tree: a node is a list of ranks, whole numbers from 0 on, but one is {node!r}")
        nodes.append(ranks)
    if not nodes:
        raise ArgumentError("tree must have at least one node; None drafts a tree of the strategy's own choice")
    depth = max(map(len, nodes))
    if depth > num_heads:
        raise ArgumentError(
            f"tree: it is {depth} nodes deep, but there are {num_heads} heads; drop the nodes of more than "
            f"{num_heads} ranks, or load another tree"
        )
    if width is not None and max(map(max, nodes)) >= width:
        raise ArgumentError(
            f"tree: it has a rank of {max(map(max, nodes))}, but heads have {width} guesses, from 0 on"
        )
    known = set(nodes)
    if len(known) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise ArgumentError(f"tree: the node {twice} stands in it twice")
    orphan = next((node for node in nodes if len(node) > 1 and node[:-1] not in known), None)
    if orphan is not None:
        raise ArgumentError(f"tree: the node {orphan} is in it, but its parent {orphan[:-1]} is not")
    return tuple(sorted(nodes, key=lambda node: (len(node), node)))


def checked_rates(
    rank_rates: Iterable[Iterable[float]], num_heads: int | None = None
) -> tuple[tuple[float, ...], ...]:
    """Rates of heads' ranks, if they can be such.

    Args:
        rank_rates: for each head how often its guess of each rank comes true.
        num_heads: K; None: any number.

    Raises:
        ArgumentError: no numbers, not one row for each head, an empty row, a rate outside 0 to 1, or a head that is
            right more often than always.
    """
    try:
        rows = [list(head) for head in rank_rates]
        if any(isinstance(rate, str) for row in rows for rate in row):
            raise TypeError("a text is no number")
        rates = tuple(tuple(map(float, row)) for row in rows)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"rank_rates must have one list of numbers from 0 to 1 for each head, such as [[0.5, 0.2], [0.4, 0.1]]: "
            f"{error}"
        ) from error
    if num_heads is not None and len(rates) != num_heads:
        raise ArgumentError(f"rank_rates has rows for {len(rates)} heads, but there are {num_heads} heads")
    for index, head in enumerate(rates):
        # Rates are measured counts divided by their sum, whose own sum rounds.
        if not head or not all(0 <= rate <= 1 for rate in head) or sum(head) > 1 + 1e-6:
            raise ArgumentError(
                f"rank_rates of head {index} must be shares of one whole, of at least one rank: {head}"
            )
    return rates


def node_value(node: Sequence[int], rank_rates: Sequence[Sequence[float]]) -> float:
    """How often a drafted node is accepted, if heads are right or wrong independently of each other."""
    return prod(rank_rates[depth][rank] for depth, rank in enumerate(node))


def expected_tokens(tree: Iterable[Sequence[int]], rank_rates: Sequence[Sequence[float]]) -> float:
    """Tokens per forward of the target under the independence model: the drafted ones that hold, and one more.

    Args:
        tree: as `Choices`.
        rank_rates: for each head how often its guess of each rank comes true.

    Raises:
        ArgumentError: the tree has a rank or a depth without a rate.
    """
    nodes = checked_tree(tree, len(rank_rates))
    for node in nodes:
        if node[-1] >= len(rank_rates[len(node) - 1]):
            raise ArgumentError(
                f"rank_rates has {len(rank_rates[len(node) - 1])} ranks for head {len(node) - 1}, "
                f"but the tree has the node {node}"
            )
    return 1 + sum(node_value(node, rank_rates) for node in nodes)


def best_tree(rank_rates: Sequence[Sequence[float]], num_nodes: int) -> Choices:
    """The tree of at most so many nodes that gives the most tokens per forward, if heads are right independently.

    Nodes join by falling value, starting from the root. A child's value is its parent's times a rate, so the tree
    that has the best nodes always contains their parents: best-first is optimal under this model.

    Args:
        rank_rates: for each head how often its guess of each rank comes true; unordered rates are used as they are.
        num_nodes: nodes to draft, without the root.

    Returns:
        `num_nodes` nodes, or fewer when no other node has a value above zero.

    Raises:
        ArgumentError: `num_nodes` is not a whole number of at least 1, rates are no shares, or all of them are zero.
    """
    require_whole(num_nodes=num_nodes)
    rates = checked_rates(rank_rates)
    # By falling rate, so that the next sibling to consider is always the one behind; equal ones by rank.
    order = [[rank for _, rank in sorted((-rate, rank) for rank, rate in enumerate(head))] for head in rates]
    tree: list[tuple[int, ...]] = []
    # (-value, depth, node, value of the parent, place among its siblings)
    waiting: list[tuple[float, int, tuple[int, ...], float, int]] = []

    def consider(parent: tuple[int, ...], value: float, place: int) -> None:
        depth = len(parent)
        if depth < len(rates) and place < len(order[depth]):
            rank = order[depth][place]
            if value * rates[depth][rank] > 0:
                heapq.heappush(waiting, (-value * rates[depth][rank], depth, (*parent, rank), value, place))

    consider((), 1.0, 0)
    while waiting and len(tree) < num_nodes:
        negative, _, node, parent_value, place = heapq.heappop(waiting)
        tree.append(node)
        consider(node[:-1], parent_value, place + 1)
        consider(node, -negative, 0)
    if not tree:
        raise ArgumentError("rank_rates of the first head are all zero: no tree is better than another")
    return checked_tree(tree, len(rates))


def load_tree(path: str | PathLike[str], num_heads: int, width: int | None = None) -> Choices:
    """Read a tree of ranks from a JSON file that holds a list of lists, as published tree choices are.

    Args:
        path: the file.
        num_heads, width: as for `checked_tree`.

    Raises:
        ArgumentError: no such file, no list of lists, or a tree that heads cannot draft.
    """
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot read a tree from {str(path)!r}: {error}") from error
    if not isinstance(tree, list):
        raise ArgumentError(f"{str(path)!r} holds no tree: it must be a list that has one list of ranks for each node")
    try:
        return checked_tree(tree, num_heads, width)
    except ArgumentError as error:
        raise ArgumentError(f"{str(path)!r}: {error}") from error
