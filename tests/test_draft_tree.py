"""`DraftTree` against naive definitions, on random trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import DrafterError, DraftTree

VOCAB = 9
Paths = list[list[list[int]]]


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Rows of different size, parents at random, sometimes with the distributions that children came from."""
    tokens, parents, probs = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 8))
        parents.append([-1, *(draw(st.integers(0, i - 1)) for i in range(1, size))])
        tokens.append(draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size)))
        probs.append({node: torch.full((VOCAB,), node + 1.0) for node in set(parents[-1]) - {-1}})
    return DraftTree(tokens, parents, probs if draw(st.booleans()) else None)


def lineage(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors, root first."""
    return ([] if parents[node] < 0 else lineage(parents, parents[node])) + [node]


def texts_of(tree: DraftTree, row: int) -> list[list[int]]:
    """What each node stands for: the tokens from the root to it."""
    return [
        [tree.tokens[row][step] for step in lineage(tree.parents[row], node)] for node in range(len(tree.tokens[row]))
    ]


@given(trees())
def test_shapes_and_padding(tree: DraftTree) -> None:
    width = max(len(row) for row in tree.tokens)
    tokens, depths, ancestors = tree.padded_tokens(), tree.padded_depths(), tree.ancestors()

    assert tree.width == width
    assert tokens.shape == depths.shape == (tree.batch_size, width)
    assert ancestors.shape == (tree.batch_size, width, width)
    assert (tokens.dtype, depths.dtype, ancestors.dtype) == (torch.int64, torch.int64, torch.bool)
    for row, parents in enumerate(tree.parents):
        size = len(parents)
        assert tokens[row].tolist() == tree.tokens[row] + [0] * (width - size)
        for node in range(width):
            path = lineage(parents, node) if node < size else [node]
            assert ancestors[row, node].nonzero().flatten().tolist() == sorted(path)
            assert depths[row, node] == (len(path) - 1 if node < size else 0)


@given(trees())
def test_children(tree: DraftTree) -> None:
    for row, parents in enumerate(tree.parents):
        for node in range(len(parents)):
            own = [child for child, parent in enumerate(parents) if parent == node]
            assert tree.children[row][node] == own
            for token in range(VOCAB):
                expected = next((child for child in own if tree.tokens[row][child] == token), None)
                assert tree.child(row, node, token) == expected
    assert tree.num_drafted == [len(row) - 1 for row in tree.tokens]
    assert tree.is_chain == all(parents == list(range(-1, len(parents) - 1)) for parents in tree.parents)


@given(trees(), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_clip(tree: DraftTree, limits: list[int]) -> None:
    """Exactly the nodes within the limit stay, in order, each with its path and its distribution."""
    limits = limits[: tree.batch_size]

    clipped = tree.clip(limits)

    for row, limit in enumerate(limits):
        kept = [node for node, text in enumerate(texts_of(tree, row)) if len(text) - 1 <= limit]
        assert texts_of(clipped, row) == [texts_of(tree, row)[node] for node in kept]
        if tree.draft_probs is not None:
            left = {kept.index(node): q for node, q in tree.draft_probs[row].items() if node in kept}
            assert clipped.draft_probs[row].keys() == left.keys()
            assert all(torch.equal(clipped.draft_probs[row][node], q) for node, q in left.items())
    assert (clipped.draft_probs is None) == (tree.draft_probs is None)
    clipped.check([row[0] for row in tree.tokens], VOCAB)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=5), min_size=1, max_size=3),
    st.none() | st.integers(1, 8),
)
def test_from_paths(paths: Paths, limit: int | None) -> None:
    """All prefixes of all paths, each once, in the order in which they first come up, as many as fit."""
    pending = list(range(len(paths)))

    tree = DraftTree.from_paths(pending, paths, limit)

    tree.check(pending, VOCAB)
    for row, guesses in enumerate(paths):
        wanted: list[list[int]] = []
        for path in guesses:
            for end in range(1, len(path) + 1):
                if path[:end] not in wanted and (limit is None or len(wanted) < limit):
                    wanted.append(path[:end])
                elif path[:end] not in wanted:
                    break
        assert [text[1:] for text in texts_of(tree, row)[1:]] == wanted
        assert texts_of(tree, row)[0] == [pending[row]]


def test_roots() -> None:
    tree = DraftTree.roots([4, 5])

    assert (tree.width, tree.batch_size, tree.is_chain, tree.num_drafted) == (1, 2, True, [0, 0])


def test_replace_row() -> None:
    q = torch.ones(VOCAB)
    tree = DraftTree([[1, 2], [3, 4, 5]], [[-1, 0], [-1, 0, 0]], [{0: q}, {0: q}])

    replaced = tree.replace_row(1, [3, 0], [-1, 0])

    assert (replaced.tokens, replaced.parents) == ([[1, 2], [3, 0]], [[-1, 0], [-1, 0]])
    assert [list(row) for row in replaced.draft_probs] == [[0], []]
    assert tree.tokens[1] == [3, 4, 5]


@given(trees())
def test_good_trees_pass(tree: DraftTree) -> None:
    tree.check([row[0] for row in tree.tokens], VOCAB)


BAD: dict[str, tuple[list[list[int]], list[list[int]], str]] = {
    "row missing": ([[1]], [[-1]], "1 rows for a batch of 2"),
    "parents missing": ([[1], [2]], [[-1]], "rows for a batch"),
    "no root": ([[1], []], [[-1], []], "row 1 of the draft has 0 tokens"),
    "lengths differ": ([[1, 3], [2]], [[-1], [-1]], "2 tokens and 1 parents"),
    "wrong root": ([[1], [3]], [[-1], [-1]], "node 0 of row 1 must be the pending token 2"),
    "root has a parent": ([[1], [2]], [[0], [-1]], "node 0 of row 0"),
    "parent comes later": ([[1, 3], [2]], [[-1, 1], [-1]], r"parent 1 must be in \[0, 1\)"),
    "second root": ([[1, 3], [2]], [[-1, -1], [-1]], "parent -1"),
    "unknown token": ([[1, VOCAB], [2]], [[-1, 0], [-1]], "token 9"),
    "negative token": ([[1, -1], [2]], [[-1, 0], [-1]], "token -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_trees_are_named(case: str) -> None:
    tokens, parents, message = BAD[case]

    with pytest.raises(DrafterError, match=message):
        DraftTree(tokens, parents).check([1, 2], VOCAB)


@pytest.mark.parametrize("bad", [1.0, "3", None])
def test_tokens_that_are_not_whole_numbers(bad: Any) -> None:
    """A float would be cut to an id by torch without a word."""
    with pytest.raises((DrafterError, TypeError)):
        DraftTree([[1, bad]], [[-1, 0]]).check([1], VOCAB)
