"""One forward of a tree through any transformers model, target or draft, through its public forward alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.cache import CacheView, TreeCache
from hf_specdec.cache.view import AttentionKinds
from hf_specdec.compat import attention_implementation, forward_parameters
from hf_specdec.errors import UnsupportedError, UnsupportedModelError
from hf_specdec.layers import OutputTap

TREE_ATTENTION = ("eager", "sdpa")


class ForwardOutput(NamedTuple):
    """What a forward of n nodes returned."""

    logits: Tensor
    """`[B, n, V]`, in the model's dtype."""
    hidden_states: tuple[Tensor, ...] | None
    """Per layer `[B, n, hidden_size]`, when asked for."""

    def last_column(self) -> ForwardOutput:
        """The last node alone."""
        states = None if self.hidden_states is None else tuple(layer[:, -1:] for layer in self.hidden_states)
        return ForwardOutput(self.logits[:, -1:], states)


class ModelRunner:
    """Drives one model with one cache.

    Args:
        model: any decoder-only transformers model.
        cache: its cache; what it holds already is continued.
        batch_size: B.
        visible: bool `[B, columns]`, False where a column of the text is padding; None if there is none.
        next_positions: int64 `[B]`, the position id of the first token that is not in the cache.
        last_position: position ids beyond this one are replaced by it; for nodes that nobody reads.

    Attributes:
        seconds: time spent in this model's forwards so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: TreeCache,
        batch_size: int,
        visible: Tensor | None,
        next_positions: Tensor,
        last_position: int | None = None,
    ) -> None:
        self.model = model
        self.view = CacheView(cache, AttentionKinds.of(model.config), batch_size, visible)
        self.seconds = 0.0
        self._next_positions = next_positions.to(model.device)
        self._last_position = last_position
        self._tap: OutputTap | None = None
        self._attention = attention_implementation(model)

    def prefill(self, tokens: Tensor, num_open: int = 0, **inputs: Any) -> ForwardOutput:
        """Run plain causal attention over the next columns of the text and commit them.

        Args:
            tokens: the columns, int64 `[B, k]`.
            num_open: how many of the last columns stay in the uncommitted tail.
            inputs: further arguments of the forward (a 2D `attention_mask`, `position_ids`, `logits_to_keep`, ...);
                `output_hidden_states=-1` gives what the output matrix reads alone.
        """
        device = self.model.device
        moved = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}
        output = self._call(input_ids=tokens.to(device), **moved)
        self.view.commit_prefill(num_open)
        self._next_positions = self._next_positions + tokens.shape[1] - num_open
        return output

    def set_next_positions(self, next_positions: Tensor) -> None:
        """Set the position id of the first token that is not in the cache, int64 `[B]`."""
        self._next_positions = next_positions.to(self.model.device)

    def forward(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, hidden_states: bool | int = False
    ) -> ForwardOutput:
        """Run m new nodes, which join the uncommitted tail.

        Args:
            tokens: int64 `[B, m]`.
            depths: int64 `[B, m]`, distance from the first token after the committed text.
            ancestors: bool `[B, m, tail + m]`, which tail nodes and new nodes each one sees.
            hidden_states: whether to return the hidden states of all layers; -1: what the output matrix reads alone.
        """
        inputs = self._inputs(self.view, tokens, depths, ancestors)
        output = self._call(**inputs, **({"output_hidden_states": hidden_states} if hidden_states else {}))
        self.view.extend_tail(depths.to(self.model.device))
        return output

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep tail nodes of each row as text (see `CacheView.commit`)."""
        self.view.commit(kept)
        counts = [len(row) for row in kept]
        if any(counts):
            self._next_positions = self._next_positions + self._next_positions.new_tensor(counts)

    def truncate(self, limits: Sequence[int]) -> None:
        """Make no row longer than its limit, in columns of text."""
        before = self.view.lengths
        self.view.truncate(limits)
        if self.view.lengths != before:
            removed = [old - new for old, new in zip(before, self.view.lengths, strict=True)]
            self._next_positions = self._next_positions - self._next_positions.new_tensor(removed)

    def _inputs(self, view: CacheView, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> dict[str, Any]:
        device = self.model.device
        depths = depths.to(device)
        return {
            "input_ids": tokens.to(device),
            "position_ids": self._positions(depths),
            "attention_mask": self._mask(view, depths, ancestors.to(device)),
        }

    def _mask(self, view: CacheView, depths: Tensor, ancestors: Tensor) -> Tensor | dict[str, Tensor] | None:
        if self._attention not in TREE_ATTENTION or self._is_plain_step(ancestors):
            return None  # one chain of one row: plain causal attention is the same
        return view.masks(depths, ancestors, self.model.dtype if self._attention == "eager" else None)

    def _positions(self, depths: Tensor) -> Tensor:
        positions = self._next_positions[:, None] + depths
        return positions if self._last_position is None else positions.clamp(max=self._last_position)

    def _is_plain_step(self, ancestors: Tensor) -> bool:
        """One token of one unpadded row behind all others: without a mask it takes plain decoding's very kernel."""
        return self.view.visible is None and ancestors.shape == (1, 1, 1)

    def _call(self, **inputs: Any) -> ForwardOutput:
        start = time.perf_counter()
        tap = self._output_tap() if inputs.get("output_hidden_states") == -1 else None
        if tap is not None:
            del inputs["output_hidden_states"]
        model = self.model if tap is None else tap.model
        output = model(cache=self.view.cache, use_cache=True, return_dict=True, **inputs)
        self.seconds += time.perf_counter() - start
        return ForwardOutput(output.logits, output.hidden_states if tap is None else (tap.hidden_states,))

    def _output_tap(self) -> OutputTap:
        if self._tap is None:
            self._tap = OutputTap(self.model)
        return self._tap


def check_runnable(model: PreTrainedModel) -> None:
    """Check without a forward that a model can be driven.

    Raises:
        UnsupportedModelError: encoder-decoder models, recurrent or chunked layers, forwards without position ids.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; speculation serves decoder-only models")
    parameters = forward_parameters(model)
    if not {"cache", "position_ids", "attention_mask"} <= parameters:
        missing = ", ".join(sorted({"cache", "position_ids", "attention_mask"} - parameters))
        raise UnsupportedModelError(
            f"{name}.forward takes no {missing}, so the nodes of a tree cannot be given their positions (as in models "
            "with ALiBi or recurrent state); use stock generate for this model"
        )
    AttentionKinds.of(model.config)


def check_attention(model: PreTrainedModel, chains_only: bool, single_row: bool) -> None:
    """Check that the attention implementation can verify what will be drafted.

    Args:
        model: target or draft.
        chains_only: whether only chains will be drafted.
        single_row: whether the prompt is one row without padding.

    Raises:
        UnsupportedError: a tree, or padding, under attention that takes no dense mask.
    """
    attention = attention_implementation(model)
    if attention in TREE_ATTENTION or (chains_only and single_row):
        return
    what = "a batch or a padded prompt" if chains_only else "a strategy that drafts trees"
    raise UnsupportedError(
        f"attention {attention!r} takes no dense tree mask, which {what} needs; "
        'call model.set_attn_implementation("sdpa"), or use a chain strategy with one row'
    )
