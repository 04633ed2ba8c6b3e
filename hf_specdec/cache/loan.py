"""A user's cache, lent for one call: its content moves into a `TreeCache` and the longer content moves back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_specdec.cache.layers import TreeCache, TreeLayer
from hf_specdec.errors import ArgumentError, UnsupportedError

_SUPPORTED = (TreeLayer, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class CacheLoan:
    """Borrow a cache for one call.

    Tree rows never touch the lender: a static cache cannot overflow, a sliding one loses no history, and an exception
    leaves it as it was until `give_back`.

    Args:
        lender: the cache that `generate` was given or made.
        final_length: the longest text, in tokens, that the call may have to store.
        batch_size: rows of the prompt, B.
        keep_lender: False if nobody has seen the lender yet: then an empty growing cache is replaced for good.

    Attributes:
        cache: the cache to work on.
        lender: the cache that the caller will find the text in.

    Raises:
        UnsupportedError: the lender offloads, quantises, or holds recurrent state.
        ArgumentError: a static lender is too short for the text.
    """

    def __init__(self, lender: Cache, final_length: int, keep_lender: bool, batch_size: int) -> None:
        _check(lender, final_length)
        _check_rows(lender, batch_size)
        if not keep_lender and all(isinstance(layer, DynamicLayer) for layer in lender.layers):
            lender = TreeCache()
        self.lender = lender
        if isinstance(lender, TreeCache):
            self.cache = lender
        else:
            self.cache = TreeCache()
            for layer in lender.layers:
                self.cache.layers.append(_borrow(layer, self.cache))

    def give_back(self) -> None:
        """Write what the `TreeCache` holds now into the lender; its rows must be equally long."""
        if self.cache is self.lender:
            return
        make_layer = self.lender.layer_class_to_replicate
        while make_layer is not None and len(self.lender.layers) < len(self.cache.layers):
            self.lender.layers.append(make_layer())  # a DynamicCache makes its layers on first use
        for lent, layer in zip(self.cache.layers, self.lender.layers, strict=True):
            if lent.is_initialized:
                _give_back(lent, layer)


def _check(cache: Cache, final_length: int) -> None:
    if cache.offloading:
        raise UnsupportedError(
            "an offloaded cache cannot be lent to speculation; drop cache_implementation='offloaded'"
        )
    for layer in cache.layers:
        if type(layer) not in _SUPPORTED:
            raise UnsupportedError(
                f"a cache with {type(layer).__name__} layers cannot be rolled back exactly; "
                "pass a DynamicCache, StaticCache or TreeCache, or no cache at all"
            )
        if type(layer) is StaticLayer and layer.max_cache_len < final_length:
            raise ArgumentError(
                f"cache: a static cache of {layer.max_cache_len} slots cannot hold {final_length} tokens; "
                f"make it with max_cache_len={final_length} or lower max_new_tokens"
            )


def _check_rows(cache: Cache, batch_size: int) -> None:
    layers: list[Any] = [layer for layer in cache.layers if layer.is_initialized]  # type: ignore[union-attr]
    rows = next((layer.keys.shape[0] for layer in layers if layer.keys.numel()), batch_size)
    if rows != batch_size:
        raise ArgumentError(
            f"cache holds {rows} rows and the prompt has {batch_size}; bring them together with "
            "cache.batch_repeat_interleave(n) or cache.batch_select_indices(rows)"
        )


def _borrow(layer: Any, cache: TreeCache) -> TreeLayer:
    borrowed = TreeLayer(cache.rows)
    if not layer.is_initialized:
        return borrowed
    length = int(layer.get_seq_length())
    keys, values = _kept_rows(layer, length)
    # A sliding layer forgot its oldest rows. Their slots stay zero: the window hides them for good.
    borrowed.lazy_initialization(keys, values)
    forgotten = length - keys.shape[2]
    if forgotten:
        keys, values = (pad(states, (0, 0, forgotten, 0)) for states in (keys, values))
    borrowed.update(keys, values)
    return borrowed


def _kept_rows(layer: Any, length: int) -> tuple[Tensor, Tensor]:
    keys, values = layer.keys, layer.values
    if isinstance(layer, StaticLayer):
        stored = min(length, layer.max_cache_len)
        return keys[:, :, :stored], values[:, :, :stored]
    stored = min(length, keys.shape[2])  # while a layer records its past it may hold more than its window
    return keys[:, :, keys.shape[2] - stored :], values[:, :, values.shape[2] - stored :]


def _give_back(lent: TreeLayer, layer: Any) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(lent.keys[:, :, :0], lent.values[:, :, :0])
    if isinstance(layer, StaticLayer):
        _fill_static(lent, layer)
        return
    start = 0
    if isinstance(layer, DynamicSlidingWindowLayer):
        start = max(lent.length - layer.sliding_window + 1, 0)
        layer.cumulative_length = lent.length
    keys, values = lent.keys[:, :, start:], lent.values[:, :, start:]
    # A window of a long text must not keep the whole text's buffer alive.
    layer.keys, layer.values = (keys.clone(), values.clone()) if start else (keys, values)


def _fill_static(lent: TreeLayer, layer: Any) -> None:
    """In place: a compiled forward may hold the addresses of the static buffers."""
    start = max(lent.length - layer.max_cache_len, 0)
    stored = lent.length - start
    layer.keys[:, :, :stored] = lent.keys[:, :, start:]
    layer.values[:, :, :stored] = lent.values[:, :, start:]
    layer.cumulative_length.fill_(stored)
    if isinstance(layer, StaticSlidingWindowLayer):
        layer.cumulative_length_int = lent.length
