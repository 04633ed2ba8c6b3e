"""A chain drafter inside transformers' own assisted decoding, as a `CandidateGenerator`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_specdec.compat import candidate_generator_override, default_generation_settings, num_positions
from hf_specdec.drafters import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.draft_check import check_draft_model
from hf_specdec.errors import ArgumentError
from hf_specdec.sampling import Sampling
from hf_specdec.tree import DraftTree


class DrafterCandidateGenerator(CandidateGenerator):
    """Lets stock assisted decoding verify what a chain drafter proposes.

    Drafts are the drafter's best guesses without randomness and are returned without probabilities: stock generate
    then samples from the target and compares, which is exact. It is that loop, with its limits (one row, stop rules
    once a block); `strategy=` has none of them.

    Args:
        drafter: any drafter with `chains_only`.
        model: the target.
        assistant_model: for drafters that need one.
        generation_config: the call's settings (`num_assistant_tokens`, `max_length`, ...); by default the model's own,
            completed by transformers' defaults.

    Raises:
        ArgumentError: a tree drafter, settings that the target does not fit, or a missing draft model.
        DraftModelError: a draft model that does not fit.
        UnsupportedModelError: the drafter does not serve the target; may come as late as the first candidates, before
            any forward of the call.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
        generation_config: GenerationConfig | None = None,
    ) -> None:
        if not isinstance(drafter, Drafter) or not drafter.chains_only:
            raise ArgumentError(f"the stock loop verifies chains only; {drafter!r} may draft trees (see chains_only)")
        if drafter.needs_draft_model:
            check_draft_model(model, assistant_model, None, None, chains_only=True, single_row=True)
        drafter.check(model)
        self._settings = drafter
        self._model = model
        self._assistant_model = assistant_model
        self._config = _complete(generation_config or model.generation_config, model)
        self._drafter: Drafter | None = None
        self._context: DraftContext | None = None
        self._tree: DraftTree | None = None

    def get_candidates(  # type: ignore[override]  # transformers' own lookup generator returns None too
        self, input_ids: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Extend `input_ids`, int64 `[1, length]`, by the drafted chain."""
        context = self._updated_context(input_ids)
        if self._drafter is None:
            self._settings.self_test(self._model)
            self._drafter = self._settings.begin(context)
        tree = self._drafter.propose(context)
        tree.check(context.pending_tokens, context.vocab_size)
        self._tree = tree = tree.clip(context.budgets)
        guesses = input_ids.new_tensor([tree.tokens[0][1:]])
        return torch.cat([input_ids, guesses], dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tell the drafter how many of its guesses were accepted; `scores` are the target's, `[1, n, V]`."""
        if self._drafter is not None and self._tree is not None:
            accepted = list(range(min(int(num_matches), self._tree.num_drafted[0]) + 1))
            self._drafter.observe(self._tree, [accepted], RoundOutputs(scores, None))

    def _updated_context(self, input_ids: Tensor) -> DraftContext:
        text = input_ids[0].tolist()
        if self._context is None:
            self._context = DraftContext(
                texts=[text],
                num_generated=[0],
                budgets=[0],
                vocab_size=self._model.config.get_text_config(decoder=True).vocab_size,
                sampling=Sampling(None),
                score_processors=LogitsProcessorList(),
                config=self._config,
                prompt=input_ids,
                prompt_mask=torch.ones_like(input_ids, dtype=torch.bool),
                target=self._model,
                draft_model=self._assistant_model,
                explicit=frozenset(),
            )
        self._context.num_generated[0] += len(text) - len(self._context.texts[0])
        self._context.texts[0] = text
        self._context.budgets[0] = self._budget(len(text))
        return self._context

    def _budget(self, length: int) -> int:
        """Stock decoding adds one token of its own, so a chain may fill all but one of the free places."""
        new_tokens = self._config.max_new_tokens
        context = self._context
        limit: int = context.prompt.shape[1] + new_tokens if new_tokens and context else self._config.max_length
        return max(limit - length - 1, 0)


def _complete(config: GenerationConfig, model: PreTrainedModel) -> GenerationConfig:
    complete = GenerationConfig(**config.to_dict())
    complete.update(**default_generation_settings(config), defaults_only=True)
    if config.max_length is None:
        complete.max_length = num_positions(model) or 2**31
    return complete


@contextmanager
def stock_assisted(model: PreTrainedModel, generator: CandidateGenerator) -> Iterator[PreTrainedModel]:
    """Inside the block, `model.generate(..., prompt_lookup_num_tokens=1)` takes its candidates from `generator`.

    Use a new generator for each call of `generate`. The model is as before afterwards.
    """
    with candidate_generator_override(model, generator):
        yield model
