"""A model run in two parts over one cache: its first layers draft, the others complete what was drafted."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.cache import CacheView, TreeCache
from hf_specdec.compat import forward_parameters
from hf_specdec.errors import DrafterError
from hf_specdec.layers import SplitModel
from hf_specdec.runner import ForwardOutput, ModelRunner


class SplitRunner(ModelRunner):
    """Drives a model whose first layers may run ahead of the others.

    `draft` runs the first layers on new nodes; `forward` runs the other layers on them, and all layers on nodes that
    were not drafted. Until then the first layers have a longer tail in the cache than the others. A round without
    `draft` is a plain forward of the whole model.

    Args:
        exit_layer: number of layers of the first part.
        model, cache, batch_size, visible, next_positions: as for `ModelRunner`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        exit_layer: int,
        cache: TreeCache,
        batch_size: int,
        visible: Tensor | None,
        next_positions: Tensor,
    ) -> None:
        super().__init__(model, cache, batch_size, visible, next_positions)
        self._exit_layer = exit_layer
        self._split: SplitModel | None = None
        self._drafted: _Drafted | None = None

    def draft(self, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Run the first layers, the norm and the head on m new nodes.

        Args:
            tokens: int64 `[B, m]`; the round's first node is the pending token.
            depths, ancestors: as for `forward`, counting the nodes of this round's earlier drafts.

        Returns:
            Logits `[B, m, V]`, in the model's dtype. This is drafting: `seconds` does not grow.

        Raises:
            DrafterError: called while nodes of an earlier round are open, as in `begin`.
        """
        if self.view.tail:
            raise DrafterError("lower_layers may run only in propose, when the last round is settled")
        if self._drafted is None:
            self._drafted = _Drafted(self.view.part(slice(self._exit_layer)))
        return self._run_lower(self._drafted, tokens, depths, ancestors)

    def forward(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, hidden_states: bool | int = False
    ) -> ForwardOutput:
        """Run m new nodes, which join the uncommitted tail, without repeating what `draft` ran of them.

        With `hidden_states` the first layers run again, since `draft` keeps the states behind the last of them only.
        """
        drafted, self._drafted = self._drafted, None
        if drafted is None:
            return super().forward(tokens, depths, ancestors, hidden_states)
        num_same = 0 if hidden_states else drafted.num_same(tokens, depths, ancestors)
        drafted.cut(num_same)
        if not num_same:
            return super().forward(tokens, depths, ancestors, hidden_states)
        start = time.perf_counter()
        if num_same < tokens.shape[1]:
            keep_none = {"logits_to_keep": torch.empty(0, dtype=torch.int64, device=self.model.device)}
            parameters = keep_none if "logits_to_keep" in forward_parameters(self.model) else {}
            self._run_lower(drafted, tokens[:, num_same:], depths[:, num_same:], ancestors[:, num_same:], **parameters)
        split = self._parts()
        split.hidden_states = torch.cat(drafted.hidden_states, dim=1)
        inputs = self._inputs(self.view, tokens, depths, ancestors)
        logits: Tensor = split.upper(cache=self._upper_cache(), use_cache=True, return_dict=True, **inputs).logits
        self.view.extend_tail(depths.to(self.model.device))
        self.seconds += time.perf_counter() - start
        return ForwardOutput(logits, None)

    def _run_lower(
        self, drafted: _Drafted, tokens: Tensor, depths: Tensor, ancestors: Tensor, **parameters: Tensor
    ) -> Tensor:
        split = self._parts()
        inputs: dict[str, Any] = self._inputs(drafted.view, tokens, depths, ancestors)
        logits: Tensor = split.lower(
            cache=self.view.cache, use_cache=True, return_dict=True, **inputs, **parameters
        ).logits
        drafted.add(tokens, depths, ancestors, split.hidden_states)
        return logits

    def _parts(self) -> SplitModel:
        """Made for each call, after the prompt: what happened to the model before it holds in its parts."""
        if self._split is None:
            self._split = SplitModel(self.model, self._exit_layer)
        return self._split

    def _upper_cache(self) -> TreeCache:
        """The same layers, but whoever asks the first ones for their length hears that of the others."""
        cache, layers = TreeCache(), self.view.cache.layers
        cache.rows = self.view.cache.rows
        cache.layers = [layers[self._exit_layer]] * self._exit_layer + layers[self._exit_layer :]
        return cache


class _Drafted:
    """What the first layers ran in this round."""

    def __init__(self, view: CacheView) -> None:
        self.view = view
        self.hidden_states: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._depths: list[Tensor] = []
        self._ancestors: list[Tensor] = []

    def add(self, tokens: Tensor, depths: Tensor, ancestors: Tensor, hidden_states: Tensor) -> None:
        self.view.extend_tail(depths.to(hidden_states.device))
        self.hidden_states.append(hidden_states)
        self._tokens.append(tokens)
        self._depths.append(depths)
        self._ancestors.append(ancestors)

    def num_same(self, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> int:
        """How many of the first columns of a tree were drafted as they are; those of dead nodes may hold anything."""
        num_drafted = sum(one.shape[1] for one in self._tokens)
        width = min(num_drafted, tokens.shape[1])
        drafted = [torch.nn.functional.pad(one, (0, num_drafted - one.shape[-1])) for one in self._ancestors]
        same = torch.cat(self._tokens, dim=1)[:, :width] == tokens[:, :width]
        same &= torch.cat(self._depths, dim=1)[:, :width] == depths[:, :width]
        same &= (torch.cat(drafted, dim=1)[:, :width, :width] == ancestors[:, :width, :width]).all(dim=-1)
        dead = ~ancestors[:, :width, 0]  # every other node descends from the root
        return int((same | dead).all(dim=0).cumprod(dim=0).sum())

    def cut(self, num_kept: int) -> None:
        """Forget all but the first columns."""
        self.view.cut_tail(num_kept)
        self.hidden_states = [torch.cat(self.hidden_states, dim=1)[:, :num_kept]]
