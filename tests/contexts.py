"""Contexts for drafters that are tested without a loop around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

import zoo
from hf_specdec import DraftContext
from hf_specdec.sampling import Sampling


def context(
    rows: Sequence[Sequence[int]],
    target: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    budgets: Sequence[int] | None = None,
    num_generated: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    explicit: frozenset[str] = frozenset(),
    **settings: Any,
) -> DraftContext:
    """The state at the start of a round, as if the call had begun with these texts."""
    width = max(len(row) for row in rows)
    config = GenerationConfig(**settings)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    return DraftContext(
        texts=[list(row) for row in rows],
        num_generated=list(num_generated or [0] * len(rows)),
        budgets=list(budgets or [20] * len(rows)),
        vocab_size=zoo.VOCAB_SIZE,
        sampling=sampling or Sampling(None),
        score_processors=LogitsProcessorList(),
        config=config,
        prompt=torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        prompt_mask=torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows]),
        target=target,
        draft_model=draft,
        explicit=explicit | frozenset(settings),
    )
