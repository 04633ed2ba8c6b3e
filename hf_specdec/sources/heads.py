"""Medusa heads as a source. What a head guesses hangs on the depth alone, so the guesses make a product tree."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from hf_specdec.sampling import Sampling
from hf_specdec.sources.base import Guess, Source

if TYPE_CHECKING:
    from hf_specdec.heads import MedusaHeads

_WIDTH = 10  # guesses of each head that are looked at
# Guesses are told apart by their head's probability, in these classes; less likely ones are not worth a look.
_CLASSES = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 15 / 16)
_LEAST, _MOST = 1e-3, 0.99  # nobody knows beforehand that a guess is surely wrong or right


class _Place(NamedTuple):
    """A node of a row's product tree, by the ranks on the way to it."""

    row: int
    node: tuple[int, ...]


_Offers = list[list[tuple[int, float]]]  # for each head its guesses, best first, with their probability


class HeadGuesses(Source):
    """Trained heads: head i guesses the token i + 1 places behind the last token of the row.

    All heads run once a round, for all rows at once, on the hidden state at each row's newest accepted node. Without a
    tree the likeliest guesses are offered, and how far a head's probability can be believed is measured for each head
    and class of probability. A tree says which ranks are offered, and each head and rank is measured.

    Args:
        heads: on the device and in the dtype of the target's output.
        output: what turns their features into logits; see `MedusaHeads.output_of`.
        vocab_size: number of tokens that the target knows.
        sampling: the call's randomness. Guesses are ranked with the target's own noise where it is keyed; where it is
            fresh they are the likeliest tokens, since fresh noise cannot be foreseen.
        processors: the call's processors that look at scores alone.
        num_generated: for each row the number of tokens generated so far; kept up to date by the loop.
        tree: its nodes, one tuple of ranks each, parents included; no deeper than there are heads.
    """

    blind = True

    def __init__(
        self,
        heads: MedusaHeads,
        output: Callable[[Tensor], Tensor],
        *,
        vocab_size: int,
        sampling: Sampling,
        processors: LogitsProcessorList,
        num_generated: Sequence[int],
        tree: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self._heads = heads
        self._output = output
        self._ranking = Sampling(None) if sampling.fresh is not None else sampling
        self._processors = processors
        self._num_generated = num_generated
        tokens = torch.arange(vocab_size) if heads.token_map is None else heads.token_map.cpu()
        self._tokens = tokens.tolist()
        self._columns = tokens
        self._rates = heads.rank_rates or [()] * heads.num_heads
        self._width = _WIDTH if tree is None else 1 + max(map(max, tree))
        self._ranks: dict[tuple[int, ...], list[int]] | None = None if tree is None else _children(tree)
        self._offers: dict[int, _Offers] = {}
        self._guesses: dict[tuple[int, int], list[Guess]] = {}

    def advance(self, rows: Sequence[int], logits: Tensor, hidden_states: Tensor) -> None:
        """Run the heads."""
        self._guesses.clear()
        scores = self._heads.logits(hidden_states, self._output)[..., : len(self._tokens)].float()
        num_heads = scores.shape[0]
        flat, tokens = self._for_all_tokens(scores.flatten(0, 1), logits.shape[-1])
        steps = [self._num_generated[row] + head for head in range(num_heads) for row in rows]
        drawn = self._ranking.draw_children(list(rows) * num_heads, steps, flat, [self._width] * len(steps))
        by_head = [drawn[start : start + len(rows)] for start in range(0, len(drawn), len(rows))]
        self._offers = {
            row: [
                [(tokens[c], weight) for c, weight in zip(head[i].tokens, head[i].weights, strict=True)]
                for head in by_head
            ]
            for i, row in enumerate(rows)
        }

    def _for_all_tokens(self, scores: Tensor, width: int) -> tuple[Tensor, Sequence[int]]:
        """Scores as the target has them, and the token of each column.

        Columns of tokens that heads cannot guess are needed by processors and noise alone.
        """
        if self._ranking.greedy and not self._processors:
            return scores, self._tokens
        limit = torch.finfo(scores.dtype).max  # heads may overflow in 16 bit: bad guesses, no error
        full = scores.new_full((len(scores), width), -torch.inf)
        full[:, self._columns.to(scores.device)] = scores.nan_to_num(nan=-limit, posinf=limit, neginf=-limit)
        no_prefix = torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device)
        return self._processors(no_prefix, full), range(width)  # type: ignore[arg-type]  # annotated LongTensor

    def start(self, row: int, text: Sequence[int]) -> _Place | None:
        """At the first head."""
        return _Place(row, ()) if row in self._offers else None

    def guesses(self, state: _Place) -> list[Guess]:
        """Those of the head for that depth; without a tree, whatever was guessed before."""
        if len(state.node) == len(self._offers[state.row]):
            return []
        if self._ranks is not None:
            return self._by_rank(state, self._ranks.get(state.node, []))
        key = (state.row, len(state.node))
        if key not in self._guesses:
            self._guesses[key] = self._by_confidence(state)
        return self._guesses[key]

    def _by_confidence(self, place: _Place) -> list[Guess]:
        head = len(place.node)
        below = _Place(place.row, (*place.node, 0))  # the ranks do not matter, only how many they are
        classed = ((token, weight, bisect_right(_CLASSES, weight)) for token, weight in self._offers[place.row][head])
        return [
            Guess(token, ("medusa", head, likely), min(weight, _MOST), below)
            for token, weight, likely in classed
            if likely
        ]

    def _by_rank(self, place: _Place, ranks: Sequence[int]) -> list[Guess]:
        head = len(place.node)
        offers, rates = self._offers[place.row][head], self._rates[head]
        guesses = []
        for rank in ranks:
            if rank < len(offers):
                token, weight = offers[rank]
                prior = rates[rank] if rank < len(rates) else weight
                below = _Place(place.row, (*place.node, rank))
                guesses.append(Guess(token, ("medusa rank", head, rank), min(max(prior, _LEAST), _MOST), below))
        return guesses


def _children(tree: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    children: dict[tuple[int, ...], list[int]] = {}
    for node in tree:
        children.setdefault(node[:-1], []).append(node[-1])
    return children
