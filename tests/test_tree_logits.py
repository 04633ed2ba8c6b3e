"""One forward of a tree computes for every node what running its path alone computes, and keeps what is accepted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import DraftTree, TreeCache, UnsupportedModelError
from hf_specdec.runner import ModelRunner
from hf_specdec.selftest import check_tree_logits

LENGTHS = (9, 4)
# Two rows: a bushy tree, and a smaller one that is padded with dead nodes.
PARENTS = [[-1, 0, 0, 1, 1, 2, 5, 6], [-1, 0, 1, 0, 3]]


def lineage(parents: list[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else lineage(parents, parents[node])) + [node]


def fresh(model: PreTrainedModel, batch: dict[str, Tensor]) -> ModelRunner:
    mask = batch["attention_mask"]
    runner = ModelRunner(model, TreeCache(), len(mask), mask.bool(), torch.zeros(len(mask), dtype=torch.int64))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        runner.prefill(batch["input_ids"], attention_mask=mask, position_ids=positions)
    runner.set_next_positions(mask.sum(-1))
    return runner


def alone(model: PreTrainedModel, row: list[int]) -> Tensor:
    """Logits `[length, V]` of an unpadded text in one plain forward."""
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0]


@pytest.mark.parametrize(("family", "attention"), zoo.VARIANTS)
def test_tree_equals_its_paths(family: str, attention: str) -> None:
    """In a padded batch, in two rounds: the second after a ragged commit, so that rows differ in length."""
    model = zoo.make(family, attention=attention)
    batch = texts.padded(LENGTHS)
    rows = texts.rows_without_padding(batch, batch["input_ids"])
    runner = fresh(model, batch)
    generator = torch.Generator().manual_seed(5)
    accepted = [[0, 2, 5, 6], [0, 3]]
    for _ in range(2):
        tree = DraftTree(
            [torch.randint(0, zoo.VOCAB_SIZE, (len(p),), generator=generator).tolist() for p in PARENTS], PARENTS
        )
        with torch.no_grad():
            logits = runner.forward(tree.padded_tokens(), tree.padded_depths(), tree.ancestors()).logits
        for row, parents in enumerate(PARENTS):
            for node in range(len(parents)):
                path = [tree.tokens[row][step] for step in lineage(parents, node)]
                expected = alone(model, rows[row] + path)[-1]
                torch.testing.assert_close(logits[row, node], expected, atol=2e-4, rtol=2e-4)
        runner.commit(accepted)
        rows = [text + [tree.tokens[row][node] for node in accepted[row]] for row, text in enumerate(rows)]

    for row, text in enumerate(rows):
        reference = TreeCache()
        with torch.no_grad():
            model(torch.tensor([text]), cache=reference)
        length = runner.view.lengths[row]
        for ours, theirs in zip(runner.view.cache.layers, reference.layers, strict=True):
            for name in ("keys", "values"):
                stored = getattr(ours, name)[row, :, length - len(text) : length]
                torch.testing.assert_close(stored, getattr(theirs, name)[0], atol=2e-4, rtol=2e-4)


@settings(max_examples=25)
@given(data=st.data())
def test_random_trees_and_paths(data: st.DataObject) -> None:
    """Growing level by level, as a draft model does, and keeping any path of any row."""
    model = zoo.make("mistral")
    batch = texts.padded([7, 3])
    rows = texts.rows_without_padding(batch, batch["input_ids"])
    runner = fresh(model, batch)
    for _ in range(2):
        size = data.draw(st.integers(1, 6))
        parents = [[-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, size))] for _ in rows]
        tokens = [data.draw(st.lists(st.integers(0, 96), min_size=size, max_size=size)) for _ in rows]
        tree = DraftTree(tokens, parents)
        cut = data.draw(st.integers(0, size - 1))
        parts = [part for part in (slice(0, cut), slice(cut, size)) if part.start < part.stop]
        with torch.no_grad():
            logits = torch.cat(
                [
                    runner.forward(
                        tree.padded_tokens()[:, part],
                        tree.padded_depths()[:, part],
                        tree.ancestors()[:, part, : part.stop],
                    ).logits
                    for part in parts
                ],
                dim=1,
            )
        for row in range(2):
            node = data.draw(st.integers(0, size - 1))
            path = [tokens[row][step] for step in lineage(parents[row], node)]
            torch.testing.assert_close(logits[row, node], alone(model, rows[row] + path)[-1], atol=2e-4, rtol=2e-4)
        kept = [lineage(parents[row], data.draw(st.integers(0, size - 1))) for row in range(2)]
        runner.commit(kept)
        rows = [text + [tokens[row][node] for node in kept[row]] for row, text in enumerate(rows)]


def test_truncate_moves_positions_back() -> None:
    model = zoo.make("gpt2")
    batch = texts.padded([5, 5])
    rows = texts.rows_without_padding(batch, batch["input_ids"])
    runner = fresh(model, batch)
    tree = DraftTree([[1, 2, 3], [4, 5, 6]], [[-1, 0, 1]] * 2)
    with torch.no_grad():
        runner.forward(tree.padded_tokens(), tree.padded_depths(), tree.ancestors())
        runner.commit([[0, 1, 2], [0, 1, 2]])
        runner.truncate([6, 8])
        root = DraftTree([[9], [9]], [[-1], [-1]])
        logits = runner.forward(root.padded_tokens(), root.padded_depths(), root.ancestors()).logits

    torch.testing.assert_close(logits[0, 0], alone(model, [*rows[0], 1, 9])[-1], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(logits[1, 0], alone(model, [*rows[1], 4, 5, 6, 9])[-1], atol=2e-4, rtol=2e-4)


def test_self_test_runs_once_a_model_and_attention() -> None:
    model = zoo.make("llama")
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *args: forwards.append(1))

    check_tree_logits(model)
    first = len(forwards)
    check_tree_logits(model)
    assert first == len(forwards) > 0
    model.set_attn_implementation("eager")
    check_tree_logits(model)
    assert len(forwards) == 2 * first


@pytest.mark.parametrize("fault", ["positions", "mask"])
def test_self_test_finds_a_model_that_ignores(fault: str) -> None:
    """A forward that drops one of the two things that make a tree a tree."""
    model = zoo.make("llama")
    forward = model.forward

    def broken(**inputs: object) -> object:
        if (
            inputs.get("cache") is not None
            and inputs["attention_mask" if fault == "mask" else "position_ids"] is not None
        ):
            inputs["attention_mask" if fault == "mask" else "position_ids"] = None
        return forward(**inputs)

    def wrapped(input_ids=None, attention_mask=None, position_ids=None, cache=None, **others):  # type: ignore[no-untyped-def]
        return broken(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache, **others
        )

    model.forward = wrapped

    with pytest.raises(UnsupportedModelError, match="other logits for a tree than for its paths"):
        check_tree_logits(model)


def test_self_test_leaves_no_gradients_and_no_cache(target: PreTrainedModel) -> None:
    model = zoo.make("llama")

    check_tree_logits(model)

    assert all(weight.grad is None for weight in model.parameters())
