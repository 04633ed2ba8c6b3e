"""Which layers of a model can be left out of its draft: a greedy search on texts that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.checks import require_whole
from hf_specdec.compat import forward_parameters
from hf_specdec.drafters.payoff import best_length, guess_cost, speedup
from hf_specdec.errors import ArgumentError
from hf_specdec.layers import decoder_layers, with_layers

Progress = Callable[[Sequence[int], float, float], None]

_LONGEST_PROMPT = 96  # tokens; agreement is counted behind the prompt, so more of it costs time and tells little
_LONGEST_CHAIN = 6
_STEPS = 10  # layers left out at a time are the model's layers over this


class FoundLayers(NamedTuple):
    """The best set that was seen."""

    layers: tuple[int, ...]
    agreement: float
    """Share of the target's own tokens that the set guesses, each after the right text."""
    num_tokens: int
    """The length of chain that promises most."""
    speedup: float
    """Expected tokens a round over the time of a round; plain decoding is 1."""


@dataclass(frozen=True)
class _Text:
    """A prompt and the target's own continuation."""

    tokens: Tensor
    """int64 `[1, length]`."""
    num_new: int


def search_layers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int] | Tensor], max_new_tokens: int, progress: Progress | None
) -> FoundLayers:
    """See `EarlyExit.search`.

    Each step measures, for every layer that is still kept, the agreement without it, and leaves out the layers that
    are missed least. It ends when one layer is left or nothing is guessed any more.
    """
    require_whole(max_new_tokens=max_new_tokens)
    kept = tuple(range(len(decoder_layers(model))))
    if len(kept) < 2:
        raise ArgumentError(f"{type(model).__name__} has {len(kept)} layer, so none can be left out")
    texts = [_continued(model, prompt, max_new_tokens) for prompt in _checked(prompts)]
    num_removed = max(len(kept) // _STEPS, 1)
    found: list[FoundLayers] = []
    while len(kept) > 1:
        without = {layer: _agreement(model, [one for one in kept if one != layer], texts) for layer in kept}
        missed_least = sorted(kept, key=lambda layer: (-without[layer], -layer))
        removed = set(islice(missed_least, min(num_removed, len(kept) - 1)))
        kept = tuple(layer for layer in kept if layer not in removed)
        found.append(_rated(model, kept, _agreement(model, kept, texts)))
        if progress is not None:
            progress(kept, found[-1].agreement, found[-1].speedup)
        if not found[-1].agreement:
            break
    return max(found, key=lambda one: one.speedup)


def _checked(prompts: Sequence[Sequence[int] | Tensor]) -> list[Tensor]:
    tensors = [torch.as_tensor(prompt).reshape(1, -1)[:, -_LONGEST_PROMPT:] for prompt in prompts]
    if not tensors or any(one.is_floating_point() or not one.numel() for one in tensors):
        raise ArgumentError("prompts must be at least one list or tensor of token ids, and none may be empty")
    return tensors


def _continued(model: PreTrainedModel, prompt: Tensor, max_new_tokens: int) -> _Text:
    generate: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]  # a mixin's method
    prompt = prompt.to(model.device)
    tokens = generate(
        model,
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=False,
    )
    return _Text(tokens, tokens.shape[1] - prompt.shape[1])


@torch.no_grad()
def _agreement(model: PreTrainedModel, kept: Sequence[int], texts: Sequence[_Text]) -> float:
    """Share of the continuations' tokens that the kept layers find most likely."""
    view = with_layers(model, kept)
    right = 0
    for text in texts:
        # The last token's logits guess what comes after the text.
        scored = text.num_new + 1
        keep = {"logits_to_keep": scored} if "logits_to_keep" in forward_parameters(model) else {}
        logits = view(input_ids=text.tokens, use_cache=False, return_dict=True, **keep).logits[:, -scored:-1]
        right += int((logits.argmax(-1) == text.tokens[:, -text.num_new :]).sum())
    return right / sum(text.num_new for text in texts)


def _rated(model: PreTrainedModel, kept: tuple[int, ...], agreement: float) -> FoundLayers:
    cost = guess_cost(model, kept)
    length = max(best_length(agreement, cost, _LONGEST_CHAIN), 1)
    return FoundLayers(kept, agreement, length, speedup(agreement, cost, length))
