"""Private names of transformers, and attributes that some of its models lack: each in one place."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.candidate_generator import CandidateGenerator


def attention_implementation(model: PreTrainedModel) -> str:
    """The attention that the text model runs: "eager", "sdpa", "flash_attention_2", ..."""
    name: str = model.config.get_text_config(decoder=True)._attn_implementation
    return name


def pad_token(config: GenerationConfig) -> int | None:
    """The padding id that `generate` settled on (EOS where the model names none)."""
    token = config._pad_token_tensor
    return None if token is None else int(token)


def dropped_mask_length(config: GenerationConfig) -> int | None:
    """Columns of an attention mask that `generate` dropped because it was all ones."""
    return getattr(config, "_mask_length", None)


def is_users_cache(cache: Cache) -> bool:
    """Whether the cache was passed to `generate`, as opposed to made by it."""
    return getattr(cache, "_is_user_defined", False)


def forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Names of the arguments of the model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def num_positions(model: PreTrainedModel) -> int | None:
    """The longest text that the model takes, in tokens; None where its config names no bound."""
    positions: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions


@contextmanager
def candidate_generator_override(model: PreTrainedModel, generator: CandidateGenerator) -> Iterator[None]:
    """Make the model's assisted decoding use `generator`, which `generate` has no argument for."""
    name = "_get_candidate_generator"
    before = {name: vars(model)[name]} if name in vars(model) else {}
    vars(model)[name] = lambda **kwargs: generator
    try:
        yield
    finally:
        del vars(model)[name]
        vars(model).update(before)


def default_generation_settings(config: GenerationConfig) -> dict[str, Any]:
    """The values that `generate` fills in where nobody set anything."""
    defaults: dict[str, Any] = config._get_default_generation_params()
    return defaults
