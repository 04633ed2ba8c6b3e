"""Lookahead decoding: Jacobi iteration whose by-products are collected and tried as guesses (Fu et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from hf_specdec.costs import node_cost
from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.lookahead_pool import NgramPool
from hf_specdec.drafters.lookahead_window import LookaheadWindow
from hf_specdec.drafters.settings import eos_tokens, require_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.tree import DraftTree


class _Size(NamedTuple):
    window: int
    ngram: int
    guesses: int


# From this cost of a node on (see `node_cost`): these sizes. They gave the most tokens for the time, a forward of n
# guesses counted as 1 + n * cost, on SmolLM2-135M-Instruct; the last are the paper's on an A100.
_SIZES = (
    (2**-4, _Size(window=2, ngram=3, guesses=2)),
    (2**-6, _Size(window=3, ngram=4, guesses=4)),
    (2**-8, _Size(window=7, ngram=4, guesses=7)),
    (0.0, _Size(window=15, ngram=5, guesses=15)),
)
_NGRAMS_IN_A_GUESS = 3


@dataclass
class Lookahead(Drafter):
    """Strategy "lookahead": collects n-grams from parallel Jacobi iterations and tries them (Fu et al. 2024).

    A window of W columns and N - 1 levels stands in the token tree below the pending token, and the target's answers
    at its ends complete an n-gram a column in every forward. A pool keeps these n-grams and those of the text; the
    ones that begin with the pending token are branches of the tree, continued by further n-grams while nodes are
    left. A tree holds at most (W + G)(N - 1) guesses.

    Sizes that are not given follow the measured cost of one more node in the target's forward: W, N, G are 2, 3, 2
    where it is 1/16 or more of a forward of one node; 3, 4, 4 from 1/64; 7, 4, 7 from 1/256; else 15, 5, 15, as in
    the paper.

    Args:
        window: W, columns of the window.
        ngram: N, tokens of an n-gram.
        guesses: G, n-grams kept for a token and tried in a round.

    Raises:
        ArgumentError: a size that is not a whole number of at least 1, or an `ngram` below 2.
    """

    window: int | None = None
    ngram: int | None = None
    guesses: int | None = None

    name = "lookahead"

    _rows: list[_Row] = field(init=False, repr=False, compare=False)
    _max_nodes: int = field(init=False, repr=False, compare=False)
    _longest_guess: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, *(name for name in _Size._fields if getattr(self, name) is not None))
        if self.ngram == 1:
            raise ArgumentError("Lookahead(ngram=1) must be at least 2: a token and one that follows it")

    def begin(self, context: DraftContext) -> Self:
        """Choose the sizes, and give each row a window and a pool of its own."""
        drafter = super().begin(context)
        size, excluded = self._size(context), eos_tokens(context.config)
        drafter._max_nodes = (size.window + size.guesses) * (size.ngram - 1)
        drafter._longest_guess = _NGRAMS_IN_A_GUESS * (size.ngram - 1)
        drafter._rows = [
            _Row(
                LookaheadWindow(size.window, size.ngram, text, excluded),
                NgramPool(size.ngram, size.guesses, excluded=excluded),
            )
            for text in context.texts
        ]
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Window, n-grams that follow the pending token, and, where nodes are left, what may follow those."""
        paths = []
        for (window, pool), text, budget in zip(self._rows, context.texts, context.budgets, strict=True):
            pool.read(text)
            window.shrink(budget)
            guesses = [path[:budget] for path in pool.continuations(text[-1])]
            longer = [pool.extended(path, min(budget, self._longest_guess)) for path in guesses if budget]
            paths.append([*window.paths(), *guesses, *longer])
        return DraftTree.from_paths(context.pending_tokens, paths, self._max_nodes)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Let the windows grow by what the target says at their ends, and collect the n-grams that are complete."""
        ends = {
            row: [_last_node(tree, row, path) for path in self._rows[row].window.paths()]
            for row, path in enumerate(accepted)
            if path and tree.num_drafted[row]  # the prompt's round had no window
        }
        rows = [row for row, nodes in ends.items() for _ in nodes]
        if not rows:
            return
        nodes = [node for nodes in ends.values() for node in nodes]
        # `max`, because `argmax` takes several times as long in 16 bits on a CPU.
        tokens = iter(outputs.logits[rows, nodes].max(dim=-1).indices.tolist())
        for row, nodes in ends.items():
            window, pool = self._rows[row]
            for ngram in window.advance([next(tokens) for _ in nodes]):
                pool.add(ngram)

    def _size(self, context: DraftContext) -> _Size:
        given = {name: getattr(self, name) for name in _Size._fields if getattr(self, name) is not None}
        if len(given) == len(_Size._fields):
            return _Size(**given)
        cost = node_cost(context.target)
        return next(size for least_cost, size in _SIZES if cost >= least_cost)._replace(**given)


class _Row(NamedTuple):
    window: LookaheadWindow
    pool: NgramPool


def _last_node(tree: DraftTree, row: int, path: Sequence[int]) -> int:
    node = 0
    for token in path:
        child = tree.child(row, node, token)
        assert child is not None  # `propose` put the whole path there
        node = child
    return node
