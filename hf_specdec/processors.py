"""How the call's logits processors may be run: on scores alone, row by row, or only with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

# Exact types, not isinstance: a subclass may do anything.
_OF_SCORES: frozenset[type] = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
_OF_ROW: frozenset[type] = frozenset(
    {
        ExponentialDecayLengthPenalty,
        ForcedBOSTokenLogitsProcessor,
        ForcedEOSTokenLogitsProcessor,
        MinLengthLogitsProcessor,
        MinNewTokensLengthLogitsProcessor,
        NoBadWordsLogitsProcessor,
        NoRepeatNGramLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        SuppressTokensAtBeginLogitsProcessor,
    }
)


class RowProcessors:
    """The processors of one call, applied as plain generation would apply them.

    Args:
        processors: what `generate` prepared, in order.
        batch_size: B.

    Attributes:
        lockstep: whether some processor must see the whole batch at one length, so that no row may run ahead.
        stateless: whether every processor is a function of prefix and scores alone.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int) -> None:
        self.stateless = all(type(processor) in _OF_SCORES | _OF_ROW for processor in processors)
        self.lockstep = batch_size > 1 and not self.stateless
        self._whole = processors
        self._rows = [
            LogitsProcessorList(_for_row(processor, row) for processor in processors) for row in range(batch_size)
        ]
        self._batch_size = batch_size

    def __len__(self) -> int:
        return len(self._whole)

    def __call__(self, rows: Sequence[int], prefixes: Sequence[Tensor], scores: Tensor) -> Tensor:
        """Process the scores of some rows.

        Args:
            rows: which rows; in lock-step all of them, in order.
            prefixes: for each of them its text so far, int64 `[length]`, padding included.
            scores: float32 `[len(rows), V]`; may be changed in place.
        """
        if not self._whole:
            return scores
        if self.lockstep or self._batch_size == 1:
            result: Tensor = self._whole(_stack(prefixes), scores)  # type: ignore[arg-type]
            return result
        processed = []
        for i, (row, prefix) in enumerate(zip(rows, prefixes, strict=True)):
            processed.append(self._rows[row](prefix[None], scores[i : i + 1]))  # type: ignore[arg-type]
        return _stack([row[0] for row in processed])


def score_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Those that look at nothing but the scores: what a draft model can share with its target for nothing."""
    return LogitsProcessorList(processor for processor in processors if type(processor) in _OF_SCORES)


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """The repetition penalty alone holds one number a row: how much left padding to ignore."""
    if type(processor) is not RepetitionPenaltyLogitsProcessor:
        return processor
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor) or ignored.numel() == 1:
        return processor
    return RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored[row : row + 1])


def _stack(rows: Sequence[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(list(rows))
