"""Medusa heads: small networks that guess the tokens after the next one from the target's last hidden state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.errors import ArgumentError


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), which is the identity until it is trained.

    Args:
        hidden_size: H.
        bias: whether there is a b.
    """

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., H]` to the same."""
        moved: Tensor = hidden_states + nn.functional.silu(self.linear(hidden_states))
        return moved


class MedusaHeads(nn.Module, PyTorchModelHubMixin, library_name="hf_specdec", tags=["medusa", "speculative-decoding"]):
    """K heads of L residual blocks each (Cai et al. 2024, "Medusa").

    The target's own head says what follows the last token it has read; head i (from 0) says what comes i + 1 tokens
    after that. All read the hidden state that the target's output matrix reads, so guessing needs no further forward.

    Args:
        hidden_size: H, that of the target.
        vocab_size: V, that of the target.
        num_heads: K.
        num_layers: L, residual blocks of each head.
        bias: whether blocks have a bias.
        own_output: whether each head has an output matrix of its own; otherwise all use the target's.
        draft_vocab_size: D; heads guess only tokens of this many, those in `token_map`. None: all V.
        tree: the tree to draft, as one tuple of ranks for each node: `(0, 2)` is the third guess of head 1 behind the
            best guess of head 0.
        rank_rates: for each head how often its guess of each rank came true, as measured on held-out text.
        base_model: name of the target.

    Raises:
        ArgumentError: a size below 1.
    """

    strategy: ClassVar[str] = "medusa"
    """Name of the strategy that drafts with these heads."""

    token_map: Tensor | None
    """int64 `[D]`: the tokens that heads can guess, or None for all."""

    def __init__(
        self,
        *,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 4,
        num_layers: int = 1,
        bias: bool = True,
        own_output: bool = False,
        draft_vocab_size: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        rank_rates: Sequence[Sequence[float]] | None = None,
        base_model: str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.bias = num_heads, num_layers, bias
        self.tree, self.rank_rates, self.base_model = tree, rank_rates, base_model
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size, bias) for _ in range(num_layers))) for _ in range(num_heads)
        )
        size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, size, bias=False) for _ in range(num_heads if own_output else 0)
        )
        self.register_buffer("token_map", None if draft_vocab_size is None else torch.arange(draft_vocab_size))

    @classmethod
    def for_target(cls, target: PreTrainedModel, *, token_map: Tensor | None = None, **settings: object) -> Self:
        """Untrained heads for a model; `token_map` restricts what they can guess."""
        config = target.config.get_text_config(decoder=True)
        size = None if token_map is None else len(token_map)
        heads = cls(
            hidden_size=config.hidden_size, vocab_size=config.vocab_size, draft_vocab_size=size, **settings
        )
        if token_map is not None:
            heads.token_map = token_map.clone()
        return heads

    def features(self, hidden_states: Tensor) -> Tensor:
        """What the output matrix reads: `[..., H]` to `[K, ..., H]`."""
        return torch.stack([block(hidden_states) for block in self.blocks])
