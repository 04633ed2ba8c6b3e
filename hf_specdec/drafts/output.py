"""An output matrix with fewer rows than the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ReducedOutput(nn.Module):
    """Stands in place of a model's head: scores D tokens and rules out all others.

    Logits come over the whole vocabulary, so that the model stays a model like any other; what is ruled out has a
    logit of -inf, so its probability is zero.

    Args:
        weight: `[D, H]`.
        bias: `[D]`, or None.
        token_map: int64 `[D]`, the token of each row.
        vocab_size: V.
    """

    token_map: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, token_map: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("token_map", token_map.to(weight.device), persistent=False)
        self.vocab_size = vocab_size

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Logits of all tokens, `[..., H]` to `[..., V]`."""
        known = nn.functional.linear(hidden_states, self.weight, self.bias)
        logits = known.new_full((*known.shape[:-1], self.vocab_size), -torch.inf)
        return logits.index_copy_(-1, self.token_map, known)
