"""Masks, keeping a path, rolling back: against a naive list of (token, column) for every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zoo
from hf_specdec import TreeCache, UnsupportedModelError
from hf_specdec.cache import CacheView
from hf_specdec.cache.view import AttentionKinds

FULL = AttentionKinds({"attention": None}, takes_dict=False)


def kinds(window: int | None) -> AttentionKinds:
    return AttentionKinds({"attention": window}, takes_dict=False)


def write(cache: TreeCache, labels: list[list[int]]) -> None:
    """Append rows whose keys hold a label."""
    keys = torch.tensor(labels, dtype=torch.float32)[:, None, :, None]
    for layer in range(2):
        cache.update(keys.repeat(1, 2, 1, 1) + layer / 10, -keys.repeat(1, 2, 1, 1), layer)


def read(cache: TreeCache, lengths: list[int]) -> list[list[int]]:
    """The labels of each row's committed slots, the same in all layers, heads, keys and values."""
    rows = []
    for row, length in enumerate(lengths):
        found = cache.layers[0].keys[row, 0, :length, 0]
        for layer in range(2):
            for head in range(2):
                assert torch.allclose(cache.layers[layer].keys[row, head, :length, 0] - layer / 10, found)
                assert torch.equal(cache.layers[layer].values[row, head, :length, 0], -found)
        rows.append([round(label) for label in found.tolist()])
    return rows


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[list[int]], list[int] | None]]]:
    """A batch size, and rounds of (nodes appended, nodes kept of each row, rows to truncate by)."""
    batch = draw(st.integers(1, 3))
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.integers(1, 6))
        kept = [sorted(draw(st.sets(st.integers(0, count - 1)))) for _ in range(batch)]
        cut = draw(st.none() | st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        steps.append((count, kept, cut))
    return batch, steps


@given(rounds(), st.integers(1, 5))
def test_appending_keeping_and_cutting(plan: tuple[int, Any], prefix: int) -> None:
    """What a row holds is what a list would hold, however ragged the batch has become."""
    batch, steps = plan
    cache = TreeCache()
    write(cache, [[100 * row + i for i in range(prefix)] for row in range(batch)])
    view = CacheView(cache, FULL, batch, None)
    naive = [[100 * row + i for i in range(prefix)] for row in range(batch)]
    label = 1000
    for count, kept, cut in steps:
        labels = [[label + 10 * row + i for i in range(count)] for row in range(batch)]
        label += 100
        depths = torch.zeros(batch, count, dtype=torch.int64)
        view.masks(depths, torch.eye(count, dtype=torch.bool).expand(batch, -1, -1), None)
        write(cache, labels)
        view.extend_tail(depths)
        assert view.tail == count

        view.commit(kept)
        naive = [row + [new[i] for i in keep] for row, new, keep in zip(naive, labels, kept, strict=True)]
        if cut is not None:
            limits = [max(len(row) - less, 1) for row, less in zip(naive, cut, strict=True)]
            view.truncate(limits)
            naive = [row[:limit] for row, limit in zip(naive, limits, strict=True)]

        assert view.tail == 0
        assert view.lengths == [len(row) for row in naive]
        assert cache.get_seq_length() == max(view.lengths)
        assert read(cache, view.lengths) == naive


@pytest.mark.parametrize("num_open", [0, 1, 3])
def test_the_last_columns_of_a_prompt_may_stay_open(num_open: int) -> None:
    """They are a tail like any other: a chain, one level a column, kept or dropped by the next `commit`."""
    for kept in range(num_open + 1):
        cache = TreeCache()
        view = CacheView(cache, kinds(window=4), 2, None)
        text = [[100 * row + i for i in range(6)] for row in range(2)]
        write(cache, text)
        view.commit_prefill(num_open)
        assert (view.lengths, view.tail) == ([6 - num_open] * 2, num_open)

        mask = view.masks(torch.full((2, 1), num_open), torch.ones(2, 1, num_open + 1, dtype=torch.bool), None)
        view.commit([range(kept), range(num_open)])

        assert isinstance(mask, Tensor)
        assert mask.tolist() == [[[[False] * 3 + [True] * 4]]] * 2  # the new node at column 6 and three before it
        assert view.lengths == [6 - num_open + kept, 6]
        assert read(cache, view.lengths) == [text[0][: 6 - num_open + kept], text[1]]


@given(rounds())
def test_an_interrupted_round_leaves_no_trace(plan: tuple[int, Any]) -> None:
    """Layers may have grown, some more than others; `drop_tail` is enough."""
    batch, steps = plan
    cache = TreeCache()
    write(cache, [[row, row + 1] for row in range(batch)])
    view = CacheView(cache, FULL, batch, None)
    for count, _, _ in steps:
        view.masks(torch.zeros(batch, count, dtype=torch.int64), torch.ones(batch, count, count).bool(), None)
        keys = torch.full((batch, 2, count, 1), 7.0)
        cache.update(keys, keys, 0)  # the second layer was not reached
        view.drop_tail()

    assert read(cache, view.lengths) == [[row, row + 1] for row in range(batch)]
    assert {layer.get_seq_length() for layer in cache.layers} == {2}


@st.composite
def masks(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged committed rows with padding in front, a tail that was run, and new nodes; trees at random."""
    batch = draw(st.integers(1, 3))
    lengths = [draw(st.integers(1, 9)) for _ in range(batch)]
    padding = [draw(st.integers(0, length - 1)) for length in lengths]
    tail, new = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    parents = [[-1, *(draw(st.integers(-1, i - 1)) for i in range(1, tail + new))] for _ in range(batch)]
    window = draw(st.none() | st.integers(1, 8))
    return {"lengths": lengths, "padding": padding, "tail": tail, "new": new, "parents": parents, "window": window}


def paths(parents: list[int]) -> list[list[int]]:
    """For each node its ancestors and itself, root first."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@given(masks())
def test_masks(case: dict[str, Any]) -> None:
    """A node sees what it would see if its path stood in the text: by column, so by window, and no padding."""
    lengths, tail, new, window = case["lengths"], case["tail"], case["new"], case["window"]
    batch, longest = len(lengths), max(lengths)
    cache = TreeCache()
    write(cache, [[0] * longest for _ in lengths])
    visible = torch.tensor([[column >= pad for column in range(longest)] for pad in case["padding"]])
    view = CacheView(cache, kinds(window), batch, visible)
    view.set_lengths(lengths)
    trees = [paths(parents) for parents in case["parents"]]
    depths = torch.tensor([[len(path) - 1 for path in tree] for tree in trees])
    ancestors = torch.zeros(batch, tail + new, tail + new, dtype=torch.bool)
    for row, tree in enumerate(trees):
        for node, path in enumerate(tree):
            ancestors[row, node, path] = True
    if tail:
        view.masks(depths[:, :tail], ancestors[:, :tail, :tail], None)
        write(cache, [[0] * tail for _ in lengths])
        view.extend_tail(depths[:, :tail])

    mask = view.masks(depths[:, tail:], ancestors[:, tail:], None)

    assert isinstance(mask, Tensor)
    assert mask.shape == (batch, 1, new, longest + tail + new)
    assert mask.dtype == torch.bool
    for row, tree in enumerate(trees):
        for i in range(new):
            path = tree[tail + i]
            column = lengths[row] + len(path) - 1
            columns = {slot: slot for slot in range(case["padding"][row], lengths[row])}
            columns |= {lengths[row] + node: lengths[row] + depth for depth, node in enumerate(path)}
            expected = {slot for slot, at in columns.items() if window is None or column - at < window}
            assert {slot for slot, sees in enumerate(mask[row, 0, i].tolist()) if sees} == expected


@given(masks())
def test_additive_masks_say_the_same(case: dict[str, Any]) -> None:
    """Eager attention adds the mask, where a bool would be silently wrong."""
    lengths, new = case["lengths"], case["new"]
    cache = TreeCache()
    write(cache, [[0] * max(lengths) for _ in lengths])
    view = CacheView(cache, kinds(case["window"]), len(lengths), None)
    view.set_lengths(lengths)
    depths = torch.zeros(len(lengths), new, dtype=torch.int64)
    ancestors = torch.eye(new, dtype=torch.bool).expand(len(lengths), -1, -1)
    as_bool = view.masks(depths, ancestors, None)
    view.drop_tail()
    view.set_lengths(lengths)

    for dtype in (torch.float32, torch.bfloat16):
        added = view.masks(depths, ancestors, dtype)
        view.set_lengths(lengths)
        assert added.dtype == dtype
        assert torch.equal(added == 0, as_bool)
        assert bool((added[~as_bool] == torch.finfo(dtype).min).all())


def test_models_whose_layers_differ_get_a_mask_for_each_kind() -> None:
    found = AttentionKinds.of(zoo.FAMILIES["gemma3"].make(0, "sdpa").config)

    assert found.takes_dict
    assert found.windows == {"sliding_attention": zoo.WINDOW, "full_attention": None}
    cache = TreeCache()
    write(cache, [[0] * 9])
    made = CacheView(cache, found, 1, None).masks(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, 1, dtype=torch.bool), None
    )
    assert isinstance(made, dict)
    assert {name: int(mask.sum()) for name, mask in made.items()} == {"sliding_attention": 6, "full_attention": 10}


@pytest.mark.parametrize(
    ("family", "window"), [("llama", None), ("mistral", zoo.WINDOW), ("qwen2", None), ("gpt2", None)]
)
def test_models_whose_layers_agree_get_one_mask(family: str, window: int | None) -> None:
    found = AttentionKinds.of(zoo.make(family).config)

    assert not found.takes_dict
    assert list(found.windows.values()) == [window]


@pytest.mark.parametrize("family", ["qwen3-next", "lfm2"])
def test_other_layers_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be rolled back"):
        AttentionKinds.of(zoo.make(family, attention="eager").config)
