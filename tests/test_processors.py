"""Which processors may run a row at a time, and which must see the whole batch in step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import logits_process

from hf_specdec import processors
from hf_specdec.processors import RowProcessors, score_processors


class Own(LogitsProcessor):
    """Nobody knows what it looks at."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + input_ids.shape[0]


class OwnTemperature(TemperatureLogitsWarper):
    """A subclass may do anything."""


def test_known_processors_run_row_by_row() -> None:
    rows = RowProcessors(LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]), 4)

    assert rows.stateless
    assert not rows.lockstep
    assert len(rows) == 2


@pytest.mark.parametrize("unknown", [Own(), OwnTemperature(0.5)])
def test_unknown_processors_keep_the_batch_in_step(unknown: LogitsProcessor) -> None:
    assert RowProcessors(LogitsProcessorList([unknown]), 2).lockstep
    assert not RowProcessors(LogitsProcessorList([unknown]), 1).lockstep
    assert not RowProcessors(LogitsProcessorList([unknown]), 1).stateless


def test_a_subset_of_rows_equals_the_batch() -> None:
    """The repetition penalty holds one number a row: how much padding to ignore."""
    penalty = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([0, 2, 1]))
    whole = LogitsProcessorList([penalty, TemperatureLogitsWarper(0.5)])
    prefixes = torch.tensor([[1, 2, 3], [0, 0, 4], [0, 5, 5]])
    scores = torch.randn(3, 8)
    expected = whole(prefixes, scores.clone())

    rows = RowProcessors(whole, 3)

    ours = rows([2, 1], [prefixes[2], prefixes[1]], scores[[2, 1]].clone())
    torch.testing.assert_close(ours, expected[[2, 1]])


def test_without_processors_scores_pass() -> None:
    scores = torch.randn(2, 5)

    assert RowProcessors(LogitsProcessorList(), 2)([0, 1], [torch.tensor([1])] * 2, scores) is scores


def test_drafts_share_what_looks_at_scores_alone() -> None:
    temperature, penalty = TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.2)

    assert list(score_processors(LogitsProcessorList([penalty, temperature, Own()]))) == [temperature]


def test_every_processor_of_transformers_is_known_or_deliberately_not() -> None:
    """A new one in transformers must be looked at: unknown ones are right, but slow in batches."""
    shipped = {
        name
        for name, one in vars(logits_process).items()
        if isinstance(one, type) and issubclass(one, LogitsProcessor) and one is not LogitsProcessor
    }
    known = {one.__name__ for one in processors._OF_SCORES | processors._OF_ROW}
    whole_batch = {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSChannelFilterLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "BarkEosPrioritizerLogitsProcessor",
        "HammingDiversityLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
        "WhisperNoSpeechDetection",
        "WhisperTimeStampLogitsProcessor",
    }

    assert known <= shipped
    assert shipped - known <= whole_batch
