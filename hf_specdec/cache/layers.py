"""A key/value cache that appends without copying the past and whose rows may have different lengths."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_SPARE = 16


class RaggedRows:
    """How far each row lags behind the longest one; shared by the layers of one cache.

    Attributes:
        lag: int64 `[B]`, slots that row b is shorter than the layer's length; None while all rows are equally long.
    """

    def __init__(self) -> None:
        self.lag: Tensor | None = None


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer in preallocated buffers `[B, heads, capacity, head_dim]`.

    `keys` and `values` are views of the filled part, as in transformers' own layers. Rows of a sliding-window layer
    are all kept: the window is applied by the mask. New rows are written behind each batch row's own last one, so a
    ragged batch has no holes.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, rows: RaggedRows | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0
        self.keys: Tensor = torch.empty(0)
        self.values: Tensor = torch.empty(0)
        self._rows = rows if rows is not None else RaggedRows()
        self._key_buffer: Tensor = torch.empty(0)
        self._value_buffer: Tensor = torch.empty(0)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take batch size, heads, dtype and device from the first states."""
        self.device = key_states.device
        self._key_buffer = key_states.new_zeros((*key_states.shape[:2], 0, key_states.shape[-1]))
        self._value_buffer = value_states.new_zeros((*value_states.shape[:2], 0, value_states.shape[-1]))
        self.is_initialized = True
        self.set_length(0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append n rows; returns all keys and values `[B, heads, length, head_dim]` as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        self._reserve(end)
        if self._rows.lag is None:
            self._key_buffer[:, :, start:end] = key_states
            self._value_buffer[:, :, start:end] = value_states
        else:
            slots = torch.arange(start, end, device=self.device) - self._rows.lag.to(self.device)[:, None]
            batch = torch.arange(slots.shape[0], device=self.device)[:, None]
            self._key_buffer[batch, :, slots] = key_states.transpose(1, 2)
            self._value_buffer[batch, :, slots] = value_states.transpose(1, 2)
        self.set_length(end)
        return self.keys, self.values

    def set_length(self, length: int) -> None:
        """Move the end of the filled part; nothing is copied."""
        self.length = length
        if self.is_initialized:
            self.keys = self._key_buffer[:, :, :length]
            self.values = self._value_buffer[:, :, :length]

    def move_rows(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to slots `target` of each batch row, int64 `[B, k]`; `[1, k]` serves all rows."""
        if not self.is_initialized:
            return
        source, target = source.to(self.device), target.to(self.device)
        if source.shape[0] == 1:
            self._key_buffer[:, :, target[0]] = self._key_buffer[:, :, source[0]]
            self._value_buffer[:, :, target[0]] = self._value_buffer[:, :, source[0]]
        else:
            batch = torch.arange(source.shape[0], device=self.device)[:, None]
            self._key_buffer[batch, :, target] = self._key_buffer[batch, :, source]
            self._value_buffer[batch, :, target] = self._value_buffer[batch, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of key slots during the next update, and the first one's index (always 0)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of filled slots."""
        return self.length

    def get_max_length(self) -> int:
        """-1: the layer grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` slots, as transformers' layers do (a positive number is refused)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, not {tokens_to_remove}")
        self.set_length(max(self.length + tokens_to_remove, 0))

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        self.set_length(0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows of the batch, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch."""
        if self.is_initialized:
            indices = indices.to(self.device)
            self._replace_buffers(self._key_buffer[indices], self._value_buffer[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.is_initialized:
            self._replace_buffers(
                self._key_buffer.repeat_interleave(repeats, dim=0),
                self._value_buffer.repeat_interleave(repeats, dim=0),
            )

    def offload(self) -> None:
        """Move the buffers to the CPU."""
        if self.is_initialized:
            self._replace_buffers(self._key_buffer.to("cpu"), self._value_buffer.to("cpu"))

    def prefetch(self) -> None:
        """Move the buffers back to their device."""
        if self.is_initialized:
            self._replace_buffers(self._key_buffer.to(self.device), self._value_buffer.to(self.device))

    def _reserve(self, length: int) -> None:
        """Grow by a quarter of the text, so that appending is O(1) amortised and spare room stays bounded."""
        # Buffers made under torch.inference_mode() cannot be written outside it.
        stale = self._key_buffer.is_inference() and not torch.is_inference_mode_enabled()
        if length <= self._key_buffer.shape[2] and not stale:
            return
        capacity = length + max(_MIN_SPARE, length // 4)
        grown = []
        for buffer in (self._key_buffer, self._value_buffer):
            # Zeros, not empty: hidden slots get attention weight 0, and 0 times a NaN left in memory is NaN.
            bigger = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
            bigger[:, :, : self.length] = buffer[:, :, : self.length]
            grown.append(bigger)
        self._replace_buffers(*grown)

    def _replace_buffers(self, key_buffer: Tensor, value_buffer: Tensor) -> None:
        self._key_buffer, self._value_buffer = key_buffer, value_buffer
        self.set_length(self.length)


class TreeCache(Cache):
    """A `Cache` for speculative decoding: append without copying the past, roll back by moving one number.

    Works in stock `generate(cache=TreeCache())` and in any model's forward too. Spare room is at most a quarter of the
    text plus 16 slots. Layers are created as the model asks for them; every layer keeps full rows, also where the
    model attends through a sliding window.
    """

    layers: list[TreeLayer]  # type: ignore[assignment]

    def __init__(self) -> None:
        self.rows = rows = RaggedRows()
        # Layers know the rows, not the cache: a circle would keep all keys and values until Python looks for one.
        super().__init__(layer_class_to_replicate=partial(TreeLayer, rows))  # type: ignore[arg-type]
