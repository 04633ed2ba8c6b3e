"""The order in which texts are trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_BATCHES_SORTED_TOGETHER = 50


class SimilarLengths(Sampler[int]):
    """An order in which texts of similar lengths are neighbours: a function of the seed and the epoch alone.

    Args:
        lengths: of the texts.
        batch_size: neighbours that are computed together.
        seed: with `epoch` it fixes the order, so that a run that was stopped goes on with the same.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.epoch = lengths, 0
        self._batch_size, self._seed = batch_size, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size = self._batch_size * _BATCHES_SORTED_TOGETHER
        batches: list[list[int]] = []
        for start in range(0, len(order), size):
            group = sorted(order[start : start + size], key=self.lengths.__getitem__)
            batches += [group[i : i + self._batch_size] for i in range(0, len(group), self._batch_size)]
        # Only the last one may be short: the loader counts off batches of the same size.
        full = len(batches) - (len(batches[-1]) < self._batch_size) if batches else 0
        shuffled = [*torch.randperm(full, generator=generator).tolist(), *range(full, len(batches))]
        return iter([index for batch in shuffled for index in batches[batch]])


class NextOrder(TrainerCallback):
    """Tells the sampler which epoch begins; the loader does not reach it in all of its wrappings."""

    def __init__(self, order: SimilarLengths) -> None:
        self._order = order

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **further: Any
    ) -> None:
        """Hand the number on."""
        self._order.epoch = int(state.epoch or 0)
