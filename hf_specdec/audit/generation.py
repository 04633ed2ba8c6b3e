"""Texts of stock `generate`: greedy, with keyed noise, sampled; and the clean slate that all arms start from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper

from hf_specdec.compat import forward_parameters
from hf_specdec.drafters.settings import eos_tokens
from hf_specdec.sampling import KeyedSampler

Inputs = dict[str, Any]


@contextmanager
def clean_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """The model's special tokens and nothing else of its generation config, for the time of the audit.

    Penalties and nucleus sizes that a checkpoint brings along would act on sampling calls of `generate` but not on the
    greedy calls that keyed noise turns into sampling.
    """
    kept = model.generation_config
    eos = sorted(eos_tokens(kept))
    pad = kept.pad_token_id if kept.pad_token_id is not None else (eos[0] if eos else 0)
    model.generation_config = GenerationConfig(
        bos_token_id=kept.bos_token_id, eos_token_id=eos or None, pad_token_id=pad
    )
    try:
        yield
    finally:
        model.generation_config = kept


def inputs_for(model: PreTrainedModel, prompts: Sequence[Tensor], padding: int = 0) -> Inputs:
    """Prompts `[1, length]` as one left-padded batch; the longest one gets so many columns of padding."""
    width = max(ids.shape[1] for ids in prompts) + padding
    pad: Any = model.generation_config.pad_token_id
    rows = [torch.nn.functional.pad(ids, (width - ids.shape[1], 0), value=pad) for ids in prompts]
    mask = [[0] * (width - ids.shape[1]) + [1] * ids.shape[1] for ids in prompts]
    return {
        "input_ids": torch.cat(rows).to(model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
    }


@torch.no_grad()
def read_prompt(model: PreTrainedModel, prompt: Tensor, rows: int) -> DynamicCache:
    """A cache with all of a prompt `[1, P]` but its last token, for so many rows: the model reads it once."""
    cache = DynamicCache(config=model.config)
    if prompt.shape[1] > 1:
        keep = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
        model(input_ids=prompt[:, :-1].to(model.device), cache=cache, use_cache=True, **keep)
        cache.batch_repeat_interleave(rows)
    return cache


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """The arguments of `generate` for a temperature, with nothing else between logits and choice."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def stock_keyed(
    model: PreTrainedModel, inputs: Inputs, max_new_tokens: int, temperature: float, seeds: Sequence[int]
) -> list[list[int]]:
    """Stock greedy decoding; above temperature 0 with the warper and `KeyedSampler` as its processors."""
    processors = LogitsProcessorList()
    if temperature > 0:
        processors += [TemperatureLogitsWarper(temperature), KeyedSampler(list(seeds))]
    return generate_texts(model, inputs, do_sample=False, logits_processor=processors, max_new_tokens=max_new_tokens)


def stock_sampled(
    model: PreTrainedModel, inputs: Inputs, max_new_tokens: int, temperature: float, seed: int
) -> list[list[int]]:
    """Stock sampling with torch's generator, which is as it was afterwards."""
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=True):
        torch.manual_seed(seed)
        return generate_texts(model, inputs, max_new_tokens=max_new_tokens, **sampling_arguments(temperature))


def generate_texts(model: PreTrainedModel, inputs: Inputs, **arguments: Any) -> list[list[int]]:
    """The new tokens of each row, up to and with its EOS token."""
    generate: Any = model.generate
    sequences: Tensor = generate(**inputs, **arguments)
    ends = eos_tokens(model.generation_config)
    new = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [_until_end(row, ends) for row in new]


def _until_end(row: list[int], ends: frozenset[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
