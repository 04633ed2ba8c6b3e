"""Two parts over one cache: what was drafted is not run again, and what was not drafted is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import DraftContext, Drafter, DrafterError, DraftTree, TreeCache, UnsupportedModelError, generate
from hf_specdec.layers import SplitModel, decoder_layers
from hf_specdec.runner import ModelRunner
from hf_specdec.selftest import check_split_logits
from hf_specdec.split import SplitRunner
from hf_specdec.tree import chain_parents

PREFIX = texts.prompt(6)
CHAIN = DraftTree([[7, 30, 12, 55, 8]], [chain_parents(5)])
TREE = DraftTree([[7, 30, 12, 55, 8]], [[-1, 0, 0, 1, 2]])


@pytest.fixture
def model() -> PreTrainedModel:
    made = zoo.make("llama", num_hidden_layers=4)
    SplitModel(made, 1)  # the probe of a model that is seen first is behind us
    return made


def runner(model: PreTrainedModel, exit_layer: int | None = None, prefix: torch.Tensor = PREFIX) -> Any:
    rest = TreeCache(), prefix.shape[0], None, torch.zeros(prefix.shape[0], dtype=torch.int64)
    made = ModelRunner(model, *rest) if exit_layer is None else SplitRunner(model, exit_layer, *rest)
    with torch.no_grad():
        made.prefill(prefix)
    return made


def inputs(tree: DraftTree) -> tuple[torch.Tensor, ...]:
    return tree.padded_tokens(), tree.padded_depths(), tree.ancestors()


def first(tree: DraftTree, count: int) -> tuple[torch.Tensor, ...]:
    tokens, depths, ancestors = inputs(tree)
    return tokens[:, :count], depths[:, :count], ancestors[:, :count, :count]


def rows_run(model: PreTrainedModel) -> list[int]:
    """For each layer the rows that it ran, from now on."""
    rows = [0] * len(decoder_layers(model))
    for index, layer in enumerate(decoder_layers(model)):

        def count(module: Any, args: Any, output: Any, index: int = index) -> None:
            rows[index] += output.shape[1]

        layer.register_forward_hook(count)
    return rows


@torch.no_grad()
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("num_drafted", [1, 3, 5])
@pytest.mark.parametrize("exit_layer", [1, 3])
def test_a_round(model: PreTrainedModel, exit_layer: int, num_drafted: int, tree: DraftTree) -> None:
    whole = runner(model)
    expected = whole.forward(*inputs(tree)).logits
    split = runner(model, exit_layer)
    rows = rows_run(model)

    split.draft(*first(tree, num_drafted))
    assert rows == [num_drafted] * exit_layer + [0] * (4 - exit_layer)
    ours = split.forward(*inputs(tree)).logits

    assert rows == [5] * 4
    torch.testing.assert_close(ours, expected)
    for one in (whole, split):
        one.commit([[0, 1, 3]])
    for mine, theirs in zip(split.view.cache.layers, whole.view.cache.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys)
        torch.testing.assert_close(mine.values, theirs.values)


DIFFERENT: dict[str, tuple[DraftTree, int]] = {
    "the root": (DraftTree([[8, 30, 12, 55]], [chain_parents(4)]), 0),
    "a token": (DraftTree([[7, 30, 13, 55]], [chain_parents(4)]), 2),
    "a parent": (DraftTree([[7, 30, 12, 55]], [[-1, 0, 0, 2]]), 2),
    "fewer nodes": (DraftTree([[7, 30]], [chain_parents(2)]), 2),
}


@torch.no_grad()
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_tree_that_was_not_drafted_like_that(model: PreTrainedModel, case: str) -> None:
    """What differs runs again; nothing of the draft is left behind."""
    tree, num_same = DIFFERENT[case]
    whole, split = runner(model), runner(model, 2)
    split.draft(*first(CHAIN, 4))
    rows = rows_run(model)

    ours = split.forward(*inputs(tree)).logits

    assert rows == [tree.width - num_same] * 2 + [tree.width] * 2
    torch.testing.assert_close(ours, whole.forward(*inputs(tree)).logits)
    assert {layer.length for layer in split.view.cache.layers} == {6 + tree.width}


@torch.no_grad()
def test_dead_nodes_may_hold_anything(model: PreTrainedModel) -> None:
    """A row that stops early is drafted on with tokens that the tree does not have."""
    prefix = torch.cat([PREFIX, PREFIX.flip(1)])
    drafted = DraftTree([[7, 30, 12], [9, 40, 40]], [chain_parents(3)] * 2)
    tree = DraftTree([[7, 30, 12], [9, 40]], [chain_parents(3), chain_parents(2)])
    whole, split = runner(model, prefix=prefix), runner(model, 2, prefix)
    split.draft(*first(drafted, 3))
    rows = rows_run(model)

    ours, expected = (one.forward(*inputs(tree)).logits for one in (split, whole))

    assert rows == [0 + 3] * 2 + [3 + 3] * 2
    torch.testing.assert_close(ours[0], expected[0])
    torch.testing.assert_close(ours[1, :2], expected[1, :2])


@torch.no_grad()
def test_hidden_states_come_from_the_whole_model(model: PreTrainedModel) -> None:
    whole, split = runner(model), runner(model, 2)
    split.draft(*first(CHAIN, 3))

    ours, expected = (one.forward(*inputs(CHAIN), True).hidden_states for one in (split, whole))

    torch.testing.assert_close(ours, expected)
    assert len(ours) == 5


@torch.no_grad()
def test_drafting_is_not_verification(model: PreTrainedModel) -> None:
    split = runner(model, 2)
    before = split.seconds
    split.draft(*first(CHAIN, 3))
    assert split.seconds == before
    split.forward(*inputs(CHAIN))
    assert split.seconds > before


@torch.no_grad()
def test_an_interrupt_in_a_draft_is_repaired(model: PreTrainedModel) -> None:
    whole, split = runner(model), runner(model, 3)
    split.draft(*first(CHAIN, 1))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    tokens, depths, ancestors = inputs(CHAIN)
    with pytest.raises(KeyboardInterrupt):
        split.draft(tokens[:, 1:2], depths[:, 1:2], ancestors[:, 1:2, :2])
    handle.remove()

    ours, expected = (one.forward(*inputs(CHAIN)).logits for one in (split, whole))
    torch.testing.assert_close(ours, expected)


class RunsLowerLayers(Drafter):
    """Drafts through the lower layers whatever it is told to, and proposes what it is told to."""

    def __init__(self, drafts: Callable[[int], Sequence[int]], proposes: Callable[[int], DraftTree]) -> None:
        self.drafts = drafts
        self.proposes = proposes

    def num_shared_layers(self, target: PreTrainedModel) -> int:
        return 1

    def propose(self, context: DraftContext) -> DraftTree:
        pending = context.pending_tokens[0]
        drafted = DraftTree([[pending, *self.drafts(pending)]], [chain_parents(1 + len(self.drafts(pending)))])
        assert context.lower_layers is not None
        logits = context.lower_layers(*inputs(drafted))
        assert logits.shape == (1, drafted.width, zoo.VOCAB_SIZE)
        return self.proposes(pending)


def test_a_drafter_that_proposes_something_else() -> None:
    """It costs time, not tokens."""
    target = zoo.make("llama")
    settings = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 16}
    expected = texts.greedy(target, **settings).tolist()
    for proposes in (
        lambda token: DraftTree([[token]], [[-1]]),
        lambda token: DraftTree([[token, 5, 3, 7, 9]], [[-1, 0, 0, 1, 2]]),
        lambda token: DraftTree([[token, 5, 6]], [chain_parents(3)]),
    ):
        drafter = RunsLowerLayers(lambda token: [5, 6, 7], proposes)
        assert generate(target, **settings, do_sample=False, strategy=drafter).tolist() == expected


def test_lower_layers_wait_for_the_round_to_be_settled() -> None:
    class RunsThemInBegin(RunsLowerLayers):
        def begin(self, context: DraftContext) -> RunsThemInBegin:
            self.propose(context)
            return self

    drafter = RunsThemInBegin(lambda token: [], lambda token: DraftTree([[token]], [[-1]]))

    with pytest.raises(DrafterError, match="only in propose"):
        generate(zoo.make("llama"), **texts.inputs(texts.prompt(9)), max_new_tokens=4, strategy=drafter)


def test_a_model_whose_layers_share_more_than_one_tensor_is_refused(model: PreTrainedModel) -> None:
    """Such as one whose upper layers read what a lower one left on the side."""
    left: list[torch.Tensor] = []
    lower, upper = model.model.layers[0], model.model.layers[3]
    lower.register_forward_hook(lambda module, args, output: left.append(output))
    upper.register_forward_hook(lambda module, args, output: output + left[-1].mean(dim=1, keepdim=True))

    with pytest.raises(UnsupportedModelError, match="whose first 2 layers run before the others"):
        check_split_logits(model, 2)


def test_a_model_that_runs_its_layers_from_somewhere_else_is_refused(model: PreTrainedModel) -> None:
    """A view cannot leave them out then; the lengths in the cache give it away."""
    hidden = list(model.model.layers)

    class Loop(type(model.model.layers)):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            return hidden[index]

    model.model.layers = Loop(hidden)

    with pytest.raises(UnsupportedModelError, match="whose first 2 layers run before the others"):
        check_split_logits(model, 2)
