"""The preallocated cache behaves like transformers' own, for whoever uses it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import texts
import zoo
from hf_specdec import TreeCache
from hf_specdec.cache.layers import RaggedRows, TreeLayer


def states(batch: int, count: int, start: int = 0) -> Tensor:
    """Keys `[batch, 2, count, 3]`, every number different."""
    numbers = torch.arange(batch * 2 * count * 3, dtype=torch.float32).view(batch, 2, count, 3)
    return numbers + 1000 * start


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_in_stock_generate(family: str) -> None:
    """Sliding layers too: full rows are kept, and the model's own mask hides what lies outside."""
    model = zoo.make(family, attention="eager")
    for batch in (texts.padded([9]), texts.padded([12, 5])):
        expected = texts.greedy(model, **batch, max_new_tokens=12)

        assert texts.greedy(model, **batch, max_new_tokens=12, cache=TreeCache()).tolist() == expected.tolist()


def test_in_a_forward(target: PreTrainedModel) -> None:
    ids = texts.prompt(12)
    cache = TreeCache()
    with torch.no_grad():
        whole = target(ids).logits
        parts = [target(ids[:, start : start + 4], cache=cache).logits for start in (0, 4, 8)]

    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == 12


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 30))
def test_appends_and_crops_like_a_dynamic_layer(counts: list[int], removed: int) -> None:
    ours, stock = TreeCache(), DynamicCache()
    for i, count in enumerate(counts):
        keys, values = states(2, count, i), -states(2, count, i)
        mine, theirs = ours.update(keys, values, 0), stock.update(keys, values, 0)
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert ours.get_mask_sizes(3, 0) == stock.get_mask_sizes(3, 0)

    for cache in (ours, stock):
        cache.crop(-removed)

    assert ours.get_seq_length() == stock.get_seq_length() == max(sum(counts) - removed, 0)
    assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)


def test_crop_refuses_a_positive_number() -> None:
    cache = TreeCache()
    cache.update(states(1, 3), states(1, 3), 0)

    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)


def test_appending_copies_rarely() -> None:
    """Single tokens up to 2000: the buffers move a few dozen times, and spare room stays at a quarter."""
    layer = TreeLayer(RaggedRows())
    addresses = []
    for _ in range(2000):
        keys, _ = layer.update(states(1, 1), states(1, 1))
        addresses.append(keys.data_ptr())
    capacity = layer.keys.untyped_storage().nbytes() // (2 * 3 * 4)

    assert len(set(addresses)) < 40
    assert capacity <= 2000 * 1.25 + 17


def test_views_not_copies() -> None:
    layer = TreeLayer(RaggedRows())
    layer.update(states(1, 5), states(1, 5))
    address = layer.keys.data_ptr()

    layer.set_length(2)
    keys, _ = layer.update(states(1, 1), states(1, 1))

    assert keys.data_ptr() == address
    assert keys.shape == (1, 2, 3, 3)


def test_spare_room_holds_no_nan() -> None:
    """Hidden slots get attention weight 0, and 0 times NaN is NaN."""
    layer = TreeLayer(RaggedRows())
    layer.update(states(1, 3), states(1, 3))
    layer.set_length(10)

    assert bool(layer.keys.isfinite().all())


def test_batch_operations() -> None:
    ours, stock = TreeCache(), DynamicCache()
    for cache in (ours, stock):
        cache.update(states(3, 4), -states(3, 4), 0)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
        cache.reorder_cache(torch.tensor([2, 0, 1]))

    assert torch.equal(ours.layers[0].keys, stock.layers[0].keys)
    assert torch.equal(ours.layers[0].values, stock.layers[0].values)
    more = states(3, 2, 7)
    assert torch.equal(ours.update(more, more, 0)[0], stock.update(more, more, 0)[0])


def test_beam_search_of_stock_generate(target: PreTrainedModel) -> None:
    settings = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 8, "num_beams": 3}

    ours = texts.greedy(target, **settings, cache=TreeCache())

    assert ours.tolist() == texts.greedy(target, **settings).tolist()


def test_reset_and_move() -> None:
    cache = TreeCache()
    cache.update(states(2, 4), -states(2, 4), 0)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert torch.equal(cache.layers[0].keys, states(2, 4))

    cache.reset()

    assert cache.get_seq_length() == 0
    assert torch.equal(cache.update(states(2, 1, 3), states(2, 1, 3), 0)[0], states(2, 1, 3))


def test_a_copy_is_independent(target: PreTrainedModel) -> None:
    cache = TreeCache()
    with torch.no_grad():
        target(texts.prompt(6), cache=cache)
        twin = copy.deepcopy(cache)
        target(texts.prompt(3, seed=4), cache=cache)

    assert (twin.get_seq_length(), cache.get_seq_length()) == (6, 9)
    assert twin.layers[0].keys.data_ptr() != cache.layers[0].keys.data_ptr()


def test_an_empty_cache() -> None:
    cache = TreeCache()

    assert cache.get_seq_length() == 0
    assert len(cache.layers) == 0
    cache.crop(-3)
    cache.reset()
