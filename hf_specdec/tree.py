"""The draft of one round: a tree of tokens for every row of the batch. A chain and "no draft" are trees too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_specdec.errors import DrafterError


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Tokens proposed to follow each row's text.

    Node 0 of a row is its pending token: the text's last one, not yet committed to the target's cache. Every other
    node is a guess for the token after its parent.

    Attributes:
        tokens: for each of the B rows the token ids of its nodes; rows may differ in length.
        parents: for each row the index of each node's parent; -1 for node 0, else `0 <= parents[i] < i`.
        draft_probs: for drafts that were *sampled*: for each row a dict from a node to the distribution
            (float64 `[vocab_size]`) that its children were drawn from without replacement, in the order in which they
            stand in the tree. `None` for drafts that were picked (top-k, lookup): they count as point masses.
    """

    tokens: Sequence[list[int]]
    parents: Sequence[list[int]]
    draft_probs: Sequence[dict[int, Tensor]] | None = None

    @classmethod
    def roots(cls, pending_tokens: Sequence[int]) -> DraftTree:
        """The tree without guesses: one node a row."""
        return cls([[token] for token in pending_tokens], [[-1] for _ in pending_tokens])

    @classmethod
    def from_paths(
        cls, pending_tokens: Sequence[int], paths: Sequence[Sequence[Sequence[int]]], max_nodes: int | None = None
    ) -> DraftTree:
        """Merge guessed continuations into one tree a row; common prefixes share nodes.

        Args:
            pending_tokens: the last emitted token of each row.
            paths: for each row its guessed continuations, best first.
            max_nodes: the largest number of guesses a row may hold; later paths are cut.
        """
        tokens, parents = [], []
        for pending, row_paths in zip(pending_tokens, paths, strict=True):
            row = _Trie(pending, max_nodes)
            for path in row_paths:
                row.add(path)
            tokens.append(row.tokens)
            parents.append(row.parents)
        return cls(tokens, parents)

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return len(self.tokens)

    @cached_property
    def width(self) -> int:
        """Number of nodes n of the largest row, the root included."""
        return max(len(row) for row in self.tokens)

    @cached_property
    def row_depths(self) -> list[list[int]]:
        """For each row the distance of each node from the root."""
        return [_depths(parents) for parents in self.parents]

    @cached_property
    def children(self) -> list[list[list[int]]]:
        """For each row and node the indices of its children, in proposal order."""
        rows = []
        for parents in self.parents:
            children: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents):
                if parent >= 0:
                    children[parent].append(node)
            rows.append(children)
        return rows

    def child(self, row: int, node: int, token: int) -> int | None:
        """The child of `node` that guesses `token`, or None."""
        for child in self.children[row][node]:
            if self.tokens[row][child] == token:
                return child
        return None

    @property
    def num_drafted(self) -> list[int]:
        """Number of guesses of each row."""
        return [len(row) - 1 for row in self.tokens]

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node of any row has two children."""
        return all(len(children) <= 1 for row in self.children for children in row)

    def padded_tokens(self) -> Tensor:
        """Token ids, int64 `[B, n]`; shorter rows end in dead nodes holding id 0."""
        return torch.tensor([row + [0] * (self.width - len(row)) for row in self.tokens])

    def padded_depths(self) -> Tensor:
        """Depths, int64 `[B, n]`; dead nodes have depth 0."""
        return torch.tensor([row + [0] * (self.width - len(row)) for row in self.row_depths])

    def ancestors(self) -> Tensor:
        """bool `[B, n, n]`: `[b, i, j]` says whether node j is node i or an ancestor; dead nodes see themselves."""
        mask = torch.eye(self.width, dtype=torch.bool).repeat(self.batch_size, 1, 1)
        view = mask.numpy()  # shares memory; row-wise "or" is several times faster than on small tensors
        for row, parents in enumerate(self.parents):
            for node in range(1, len(parents)):
                view[row, node] |= view[row, parents[node]]
        return mask

    def clip(self, max_depths: Sequence[int]) -> DraftTree:
        """The same tree without the nodes of row r that are deeper than `max_depths[r]`."""
        if all(max(depths) <= limit for depths, limit in zip(self.row_depths, max_depths, strict=True)):
            return self
        tokens, parents, probs = [], [], []
        for row, limit in enumerate(max_depths):
            kept = [node for node, depth in enumerate(self.row_depths[row]) if depth <= limit]
            index = {node: position for position, node in enumerate(kept)} | {-1: -1}
            tokens.append([self.tokens[row][node] for node in kept])
            parents.append([index[self.parents[row][node]] for node in kept])
            if self.draft_probs is not None:
                probs.append({index[node]: q for node, q in self.draft_probs[row].items() if node in index})
        return DraftTree(tokens, parents, probs if self.draft_probs is not None else None)

    def replace_row(self, row: int, tokens: list[int], parents: list[int]) -> DraftTree:
        """A copy in which one row is another tree."""
        new_tokens, new_parents = list(self.tokens), list(self.parents)
        new_tokens[row], new_parents[row] = tokens, parents
        probs = None
        if self.draft_probs is not None:
            probs = [{} if other == row else q for other, q in enumerate(self.draft_probs)]
        return DraftTree(new_tokens, new_parents, probs)

    def check(self, pending_tokens: Sequence[int], vocab_size: int) -> None:
        """Check what a drafter returned.

        Raises:
            DrafterError: wrong number of rows, wrong roots, parents that do not come first, unknown tokens, or
                distributions that do not belong to the nodes.
        """
        if not (len(self.tokens) == len(self.parents) == len(pending_tokens)):
            raise DrafterError(f"the drafter returned {len(self.tokens)} rows for a batch of {len(pending_tokens)}")
        for row, (tokens, parents) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if len(tokens) != len(parents) or not tokens:
                raise DrafterError(f"row {row} of the draft has {len(tokens)} tokens and {len(parents)} parents")
            if tokens[0] != pending_tokens[row] or parents[0] != -1:
                raise DrafterError(
                    f"node 0 of row {row} must be the pending token {pending_tokens[row]} with parent -1"
                )
            for node in range(1, len(tokens)):
                if not 0 <= parents[node] < node:
                    raise DrafterError(f"row {row}, node {node}: parent {parents[node]} must be in [0, {node})")
                if not isinstance(tokens[node], int) or not 0 <= tokens[node] < vocab_size:
                    raise DrafterError(
                        f"row {row}, node {node}: token {tokens[node]!r} is not a whole number in [0, {vocab_size})"
                    )
        self._check_draft_probs(vocab_size)

    def _check_draft_probs(self, vocab_size: int) -> None:
        if self.draft_probs is None:
            return
        if len(self.draft_probs) != self.batch_size:
            raise DrafterError(f"draft_probs has {len(self.draft_probs)} rows for a batch of {self.batch_size}")
        for row, (probs, parents) in enumerate(zip(self.draft_probs, self.parents, strict=True)):
            for node in set(parents) - {-1}:
                if node not in probs or probs[node].shape != (vocab_size,):
                    raise DrafterError(
                        f"draft_probs of row {row} needs for node {node} the distribution [{vocab_size}] that its "
                        "children were drawn from"
                    )
            for node, parent in enumerate(parents):
                if parent >= 0 and not probs[parent][self.tokens[row][node]] > 0:
                    raise DrafterError(f"draft_probs of row {row} says that node {node} could not have been drawn")


def chain_parents(length: int) -> list[int]:
    """Parents of a chain of so many nodes, the root included."""
    return list(range(-1, length - 1))


class _Trie:
    """One row of a tree while paths are merged into it."""

    def __init__(self, pending: int, max_nodes: int | None) -> None:
        self.tokens, self.parents = [pending], [-1]
        self._children: dict[tuple[int, int], int] = {}
        self._limit = None if max_nodes is None else max_nodes + 1

    def add(self, path: Sequence[int]) -> None:
        node = 0
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                if self._limit is not None and len(self.tokens) >= self._limit:
                    return
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self._children[node, token] = child
            node = child


def _depths(parents: list[int]) -> list[int]:
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths
