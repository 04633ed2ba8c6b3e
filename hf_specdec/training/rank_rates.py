"""How often each head's guess of each rank comes true on held-out text, and the tree that this makes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hf_specdec.checks import is_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.guesses import IGNORED, OUTSIDE, HeadCollator, rank_guesses
from hf_specdec.training.weights import non_finite_weight

TOP = 5


@dataclass(frozen=True)
class RankCounts:
    """Counts of guesses.

    Args:
        hits: int64 `[K, R]`, how often the right token was the guess of this rank.
        totals: int64 `[K]`, how often a guess was asked for, tokens outside the draft vocabulary included.
    """

    hits: Tensor
    totals: Tensor

    @classmethod
    def of_rows(cls, counts: Tensor) -> Self:
        """Sum up what `count_ranks` counted, `[..., K, R + 1]`."""
        counts = counts.reshape(-1, *counts.shape[-2:]).sum(0)
        return cls(counts[:, :-1], counts.sum(1))

    @property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        """For each head how often its guess of each rank came true, 0 for a head that was never asked."""
        shares = self.hits.double() / self.totals.clamp(min=1).unsqueeze(1)
        return tuple(tuple(row) for row in shares.tolist())

    @property
    def top1(self) -> tuple[float, ...]:
        """How often each head's best guess came true."""
        return tuple(row[0] for row in self.rates)

    @property
    def top5(self) -> tuple[float, ...]:
        """How often the right token was among each head's five best guesses."""
        return tuple(sum(row[:TOP]) for row in self.rates)


def count_ranks(ranks: Tensor, rows: Tensor, num_rows: int, width: int) -> Tensor:
    """Count how often the right token stood at each rank.

    Args:
        ranks: int64 `[N, K]` from `rank_guesses`.
        rows: int64 `[N]`, the text that a position is from.
        num_rows: B.
        width: R, ranks that are told apart.

    Returns:
        int64 `[B, K, R + 1]`, the last for everything that was not hit.
    """
    num_heads = ranks.shape[1]
    bins = torch.where(ranks == OUTSIDE, width, ranks.clamp(max=width))
    places = (rows.unsqueeze(1) * num_heads + torch.arange(num_heads, device=ranks.device)) * (width + 1) + bins
    counts = torch.bincount(places[ranks != IGNORED], minlength=num_rows * num_heads * (width + 1))
    return counts.view(num_rows, num_heads, width + 1)


@torch.no_grad()
def measure_ranks(
    heads: MedusaHeads,
    features: TargetFeatures,
    *,
    width: int = 10,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> RankCounts:
    """Let heads guess on texts that they were not trained on.

    Args:
        heads: the heads; they compute in their own dtype.
        features: the texts, with what the target says about them.
        width: ranks that are told apart.
        batch_size: texts at a time.
        progress: called with the number of texts done and that of all.

    Raises:
        ArgumentError: `width` is not a number from 1 to the size of the draft vocabulary, heads and target do not fit,
            weights are not finite, or no text has anything to guess.
    """
    check_width(heads, width)
    check_weights(heads)
    heads.check(features.target)
    placed, output = heads.placed(features.target), heads.output_of(features.target)
    device = next(placed.parameters()).device
    counts, done = torch.zeros(heads.num_heads, width + 1, dtype=torch.int64), 0
    loader: DataLoader[Any] = DataLoader(features, batch_size, collate_fn=HeadCollator(features, heads))
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        ranks, _ = rank_guesses(placed.features(batch["hidden_states"]), batch["columns"], output)
        counts += count_ranks(ranks, batch["rows"], int(batch["num_rows"]), width).sum(0).cpu()
        done += int(batch["num_rows"])
        if progress is not None:
            progress(done, len(features))
    if not counts.sum(1).all():
        raise ArgumentError(
            f"data: no answer is long enough for {heads.num_heads} heads, which reach {heads.num_heads + 1} tokens "
            "ahead; give longer texts"
        )
    return RankCounts.of_rows(counts)


def check_width(heads: MedusaHeads, width: int) -> None:
    """See that heads have so many guesses.

    Raises:
        ArgumentError: they have not.
    """
    size = heads.num_guessable
    if not is_whole(width) or width < 1 or (size is not None and width > size):
        raise ArgumentError(f"width={width!r} must be a whole number from 1 to {size or 'the size of the vocabulary'}")


def check_weights(heads: MedusaHeads) -> None:
    """See that heads can guess at all.

    Raises:
        ArgumentError: a weight is NaN or infinite.
    """
    name = non_finite_weight(heads)
    if name is not None:
        raise ArgumentError(f"heads: {name} holds NaN or infinite weights, so they cannot guess; train them again")
