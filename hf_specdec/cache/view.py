"""What one forward may see and what stays afterwards: masks by position, keeping a path, rolling back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdec.cache.layers import TreeCache
from hf_specdec.errors import UnsupportedModelError


@dataclass(frozen=True)
class AttentionKinds:
    """The kinds of attention in a model and their windows in tokens (None: unlimited).

    Attributes:
        windows: a window for each name in the config's `layer_types`.
        takes_dict: whether the model's layers differ, so that its forward wants a dict of masks.
    """

    windows: dict[str, int | None]
    takes_dict: bool

    @classmethod
    def of(cls, config: PreTrainedConfig) -> AttentionKinds:
        """Read them from the layers that transformers itself would cache.

        Raises:
            UnsupportedModelError: the model has recurrent, chunked, compressed or other layers than these two.
        """
        text_config = config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        names: list[str] = getattr(text_config, "layer_types", None) or ["attention"] * len(layers)
        windows: dict[str, int | None] = {}
        for name, layer in zip(names, layers, strict=True):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or "chunk" in name:
                raise UnsupportedModelError(
                    f"{type(config).__name__} has {name} layers ({type(layer).__name__}), whose state cannot be "
                    "rolled back to the accepted tokens; use stock generate for this model"
                )
            window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
            if windows.setdefault(name, window) != window:
                raise UnsupportedModelError(f"{type(config).__name__} has {name} layers with different windows")
        if getattr(text_config, "attention_chunk_size", None) is not None:
            raise UnsupportedModelError(f"{type(config).__name__} attends in chunks, which tree masks do not follow")
        if "local" in getattr(text_config, "attention_layers", ()):
            raise UnsupportedModelError(
                f"{type(config).__name__} applies its local window by cache slot, where the branches of a tree do not "
                "stand at their positions; use stock generate for this model"
            )
        return cls(windows, takes_dict=len(windows) > 1)


class CacheView:
    """A `TreeCache` during a call: committed rows, and behind them the uncommitted tail of the current round.

    Row b of the batch owns the slots `0 .. lengths[b] - 1`, one a column of its text, and then `tail` more for nodes
    whose fate is open. Nothing in the tail counts until `commit`, so an interrupted forward leaves no trace.

    Args:
        cache: an empty or filled cache with rows of equal length.
        kinds: the model's attention kinds.
        batch_size: B.
        visible: bool `[B, columns]`: False where a column of the text is padding. Columns beyond are visible.
    """

    def __init__(self, cache: TreeCache, kinds: AttentionKinds, batch_size: int, visible: Tensor | None) -> None:
        self.cache = cache
        self.kinds = kinds
        self.visible = visible
        self._layers = slice(None)
        self.lengths = [int(cache.get_seq_length())] * batch_size
        self.tail = 0
        self._tail_depths = torch.empty(batch_size, 0, dtype=torch.int64)

    def part(self, layers: slice) -> CacheView:
        """A view of some layers of the same cache, whose tail may be longer than that of the others.

        It serves until lengths or tail of this view change.
        """
        part = copy.copy(self)
        part._layers = layers
        return part

    def commit_prefill(self, num_open: int) -> None:
        """What the layers hold now is text, but for the last `num_open` columns: they are the tail, one a level."""
        batch_size = len(self.lengths)
        filled = max(layer.length for layer in self.cache.layers)
        self._level(filled)
        self.lengths = [filled - num_open] * batch_size
        self.tail, self._tail_depths = num_open, torch.arange(num_open).expand(batch_size, num_open)

    def masks(
        self, depths: Tensor, ancestors: Tensor, additive_dtype: torch.dtype | None
    ) -> Tensor | dict[str, Tensor]:
        """The attention mask for a forward of m new nodes.

        Args:
            depths: int64 `[B, m]`, distance of each new node from the first token after the committed text.
            ancestors: bool `[B, m, tail + m]`: which tail nodes and new nodes each new node may see.
            additive_dtype: a float dtype for an additive mask (0 or the dtype's minimum), None for a bool mask.

        Returns:
            `[B, 1, m, slots]`, or a dict of such masks by layer type for models whose layers differ.
        """
        device = depths.device
        tail_depths = torch.cat([self._tail_depths.to(device), depths], dim=1)
        starts = torch.tensor(self.lengths, device=device)[:, None]
        tail_slots = starts + torch.arange(ancestors.shape[-1], device=device)
        longest = max(self.lengths)
        slots = longest + ancestors.shape[-1]
        committed = torch.arange(slots, device=device) < starts
        if self.visible is not None:
            columns = min(self.visible.shape[1], longest)
            committed[:, :columns] &= self.visible[:, :columns].to(device)
        see = committed[:, None].repeat(1, depths.shape[1], 1)
        see.scatter_(2, tail_slots[:, None].expand_as(ancestors), ancestors)
        # A node's column is where it would stand in the text, which is not where its slot is.
        key_columns = torch.arange(slots, device=device).repeat(len(self.lengths), 1)
        key_columns.scatter_(1, tail_slots, starts + tail_depths)
        distance = (starts + depths)[:, :, None] - key_columns[:, None]
        masks = {
            name: _finish(see if window is None else see & (distance < window), additive_dtype)
            for name, window in self.kinds.windows.items()
        }
        return masks if self.kinds.takes_dict else next(iter(masks.values()))

    def extend_tail(self, depths: Tensor) -> None:
        """A forward of m new nodes has succeeded: they are in the tail. `depths` as in `masks`."""
        self.tail += depths.shape[1]
        self._tail_depths = torch.cat([self._tail_depths.to(depths.device), depths], dim=1)
        self._level(max(self.lengths) + self.tail)

    def cut_tail(self, num_kept: int) -> None:
        """Keep the first nodes of the tail alone; also repairs layers after an interrupted forward."""
        self.tail, self._tail_depths = num_kept, self._tail_depths[:, :num_kept]
        self._level(max(self.lengths) + num_kept)

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep some tail rows of each batch row as text, in the given order, and drop the rest of the tail.

        Args:
            kept: for each batch row the indices into its tail, strictly increasing.
        """
        moved = [
            [(start + j, start + i) for j, i in enumerate(row) if i != j]
            for start, row in zip(self.lengths, kept, strict=True)
        ]
        if any(moved):
            self._move(moved)
        self.set_lengths([start + len(row) for start, row in zip(self.lengths, kept, strict=True)])

    def truncate(self, limits: Sequence[int]) -> None:
        """Make no row longer than its limit, in columns."""
        if any(length > limit for length, limit in zip(self.lengths, limits, strict=True)):
            self.set_lengths([min(pair) for pair in zip(self.lengths, limits, strict=True)])

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Make row b hold its first `lengths[b]` columns, dropping what lies behind and the tail."""
        self.lengths = list(lengths)
        self.tail, self._tail_depths = 0, torch.empty(len(lengths), 0, dtype=torch.int64)
        longest = max(lengths)
        ragged = min(lengths) != longest
        self.cache.rows.lag = torch.tensor([longest - length for length in lengths]) if ragged else None
        self._level(longest)

    def drop_tail(self) -> None:
        """Roll back to the committed text; also repairs layers after an interrupted forward."""
        self.set_lengths(self.lengths)

    def _move(self, moved: list[list[tuple[int, int]]]) -> None:
        width = max(len(row) for row in moved)
        # Shorter rows repeat their last move; a row without any moves a slot of its own onto itself.
        filled = [
            row + (row[-1:] or [(start, start)]) * (width - len(row))
            for start, row in zip(self.lengths, moved, strict=True)
        ]
        target, source = torch.tensor(filled).unbind(-1)
        for layer in self.cache.layers[self._layers]:
            layer.move_rows(source, target)

    def _level(self, length: int) -> None:
        """All layers have so many slots; also those that a forward left out, which store nothing."""
        for layer in self.cache.layers[self._layers]:
            if layer.length != length:
                layer.set_length(length)


def _finish(see: Tensor, additive_dtype: torch.dtype | None) -> Tensor:
    see = see[:, None]
    if additive_dtype is None:
        return see
    return torch.zeros((), dtype=additive_dtype, device=see.device).masked_fill(~see, torch.finfo(additive_dtype).min)
