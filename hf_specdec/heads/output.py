"""The target's output matrix, as heads use it: its sizes, its place, and its columns for a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import UnsupportedModelError


def output_module(target: PreTrainedModel) -> nn.Module:
    """The target's output matrix.

    Raises:
        UnsupportedModelError: it has none.
    """
    module: nn.Module | None = target.get_output_embeddings()
    if module is None:
        raise UnsupportedModelError(f"{type(target).__name__} has no output matrix that heads could share")
    return module


def output_sizes(target: PreTrainedModel) -> tuple[int, int]:
    """H and V: the size of the hidden state that the output matrix reads, and of the vocabulary."""
    config, module = target.config.get_text_config(decoder=True), output_module(target)
    # A few models project the last hidden state to another size first.
    hidden_size = module.in_features if isinstance(module, nn.Linear) else config.hidden_size
    return int(hidden_size), int(config.vocab_size)


def output_device(target: PreTrainedModel) -> torch.device:
    """Where the output matrix computes."""
    device = next(output_module(target).parameters()).device
    return target.device if device.type == "meta" else device  # offloaded: it visits that device for each forward


def shared_output(target: PreTrainedModel, token_map: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The target's output matrix as a function, for all tokens or for some.

    What some models do with logits afterwards, such as to scale or cap them, is left out: it does not change an order.

    Args:
        target: the model; no gradient reaches it.
        token_map: int64 `[D]`, or None for all tokens.

    Returns:
        A function from `[..., H]` to `[..., D]`, in the matrix's dtype.
    """
    module = output_module(target)
    linear = _plain(module)
    if linear is None:
        return module if token_map is None else _Columns(module, token_map)
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    if token_map is not None:
        columns = token_map.to(weight.device)
        weight, bias = weight[columns], None if bias is None else bias[columns]
    return lambda features: nn.functional.linear(features.to(weight.dtype), weight, bias)


def output_weight(target: PreTrainedModel, token_map: Tensor | None) -> Tensor:
    """The rows of the output matrix for all tokens or for some, `[D, H]`, as a copy.

    Raises:
        UnsupportedModelError: it has a bias, or it is quantised, so that a matrix alone does not say what it computes.
    """
    linear = _plain(output_module(target))
    if linear is None:
        raise UnsupportedModelError(
            f"the output matrix of {type(target).__name__} cannot be copied, since it is quantised, adapted or "
            "offloaded; load the model without that"
        )
    if linear.bias is not None:
        raise UnsupportedModelError(
            f"the output of {type(target).__name__} has a bias, which output matrices of heads cannot hold"
        )
    weight = linear.weight.detach()
    return weight.clone() if token_map is None else weight[token_map.to(weight.device)]


def _plain(module: nn.Module) -> nn.Linear | None:
    """The module if its weights say what it computes.

    A quantised or adapted one computes in its own way, and an offloaded one has no weights between its forwards.
    """
    plain = type(module) is nn.Linear and type(module.weight.data) is Tensor and not module.weight.is_meta
    return module if plain and isinstance(module, nn.Linear) else None


@dataclass(frozen=True)
class _Columns:
    """Some columns of what a module computes."""

    module: nn.Module
    token_map: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        logits: Tensor = self.module(features)
        return logits[..., self.token_map.to(logits.device)]
