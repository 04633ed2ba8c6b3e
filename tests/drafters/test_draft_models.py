"""Strategies with a draft model: their settings take effect, and the draft's cache stays in step with the text."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import texts
import zoo
from contexts import context
from hf_specdec import Assisted, DraftContext, Drafter, DraftTree, SpeculativeOutput, Tree, generate
from hf_specdec.sampling import Sampling

PROMPT = texts.prompt(9)
SETTINGS = {
    **texts.inputs(PROMPT),
    "max_new_tokens": 24,
    "do_sample": False,
    "pad_token_id": texts.PAD,
    "return_dict_in_generate": True,
}


def run(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: Any = "assisted", **settings: Any
) -> SpeculativeOutput:
    return generate(target, **(SETTINGS | settings), strategy=strategy, assistant_model=draft)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Shapes of the inputs of every forward inside the block."""
    shapes: list[tuple[int, int]] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


@pytest.fixture
def twin(target: PreTrainedModel) -> PreTrainedModel:
    """A copy of the target: every guess is right."""
    model = copy.deepcopy(target)
    model.generation_config.assistant_confidence_threshold = 0
    return model


@pytest.mark.parametrize("tokens", [1, 2, 5, 21, 22, 40])
def test_num_assistant_tokens(target: PreTrainedModel, twin: PreTrainedModel, tokens: int) -> None:
    """One draft forward a guess, and the last guess is not fed."""
    run(target, twin, num_assistant_tokens=tokens)
    with counted(twin) as shapes:
        stats = run(target, twin, num_assistant_tokens=tokens).speculation

    assert stats.rounds == 1 + math.ceil(23 / (tokens + 1))  # the prompt's round gives the first of 24 tokens
    assert stats.accepted == stats.drafted == 24 - stats.rounds
    assert max(stats.accepted_lengths) == min(tokens, 22)
    assert len(shapes) == 1 + stats.drafted


@pytest.mark.parametrize("place", ["call", "generation_config", "draft"])
def test_where_draft_settings_come_from(target: PreTrainedModel, twin: PreTrainedModel, place: str) -> None:
    """The call, an object given to it, or the draft's own config; the call wins."""
    settings: dict[str, Any] = {}
    if place == "call":
        twin.generation_config.num_assistant_tokens = 9
        settings["num_assistant_tokens"] = 3
    elif place == "generation_config":
        twin.generation_config.num_assistant_tokens = 9
        settings["generation_config"] = GenerationConfig(num_assistant_tokens=3)
    else:
        twin.generation_config.num_assistant_tokens = 3

    assert max(run(target, twin, **settings).speculation.accepted_lengths) == 3


def test_schedules(target: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Two more after a round without a miss, one less after a miss; "constant" never changes."""
    for schedule in ("constant", "heuristic", "heuristic_transient"):
        stats = run(target, twin, num_assistant_tokens=3, num_assistant_tokens_schedule=schedule).speculation
        if schedule == "constant":
            assert stats.accepted_lengths == {0: 1, 3: 5, 2: 1}
        else:
            assert stats.accepted_lengths == {0: 1, 3: 1, 5: 1, 7: 1, 4: 1}

    useless = zoo.make("llama", seed=5)
    useless.generation_config.assistant_confidence_threshold = 0
    fixed = run(target, useless, num_assistant_tokens=6, num_assistant_tokens_schedule="constant").speculation
    shrinking = run(target, useless, num_assistant_tokens=6, num_assistant_tokens_schedule="heuristic").speculation
    assert fixed.accepted <= 2
    assert shrinking.drafted < fixed.drafted / 2


def test_schedules_start_afresh_in_every_call(target: PreTrainedModel, twin: PreTrainedModel) -> None:
    before = twin.generation_config.to_dict()
    first, second = (
        run(target, twin, num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic").speculation
        for _ in range(2)
    )

    assert first.accepted_lengths == second.accepted_lengths
    assert twin.generation_config.to_dict() == before


def test_confidence_threshold(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """An unsure draft stops early; its unsure token stays in the tree."""
    counts = {
        threshold: run(target, draft, num_assistant_tokens=8, assistant_confidence_threshold=threshold).speculation
        for threshold in (0.0, 0.3, 1.0)
    }

    assert counts[0.0].drafted / counts[0.0].rounds > counts[0.3].drafted / counts[0.3].rounds
    assert counts[1.0].drafted <= counts[1.0].rounds
    assert counts[1.0].drafted > 0


class Recording(Drafter):
    """Any drafter, with the trees that it proposed and the contexts that it saw."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.trees: list[DraftTree] = []
        self.seen: list[list[list[int]]] = []
        self.trust: list[Any] = []
        self.needs_draft_model = inner.needs_draft_model

    def begin(self, context: DraftContext) -> Recording:
        begun = copy.copy(self)
        begun.inner = self.inner.begin(context)
        return begun

    def propose(self, context: DraftContext) -> DraftTree:
        self.trust.append(copy.copy(getattr(self.inner, "_trust", None)))
        self.trees.append(self.inner.propose(context))
        self.seen.append([list(text) for text in context.texts])
        return self.trees[-1]

    def observe(self, tree: DraftTree, accepted: Any, outputs: Any) -> None:
        self.inner.observe(tree, accepted, outputs)


@pytest.mark.parametrize(
    "mode", [{}, {"do_sample": True, "seed": 1}, {"do_sample": True, "verification": "rejection"}]
)
@pytest.mark.parametrize(
    ("nodes", "depth", "branching", "width"), [(1, 4, 4, 4), (7, 3, 2, 2), (24, 5, 4, 4), (5, 1, 9, 1), (30, 8, 1, 1)]
)
def test_shape_of_a_tree(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    nodes: int,
    depth: int,
    branching: int,
    width: int,
    mode: dict[str, Any],
) -> None:
    drafter = Recording(Tree(nodes=nodes, depth=depth, branching=branching, width=width, min_gain=0.0, min_score=0.0))
    run(target, draft, drafter, **mode)
    with counted(draft) as shapes:
        run(target, draft, drafter, **mode)

    for tree in drafter.trees:
        assert tree.num_drafted[0] <= nodes
        assert max(tree.row_depths[0]) <= depth
        assert max(len(children) for children in tree.children[0]) <= branching
        for children in tree.children[0]:
            tokens = [tree.tokens[0][child] for child in children]
            assert len(set(tokens)) == len(tokens)
    largest = max(tree.num_drafted[0] for tree in drafter.trees)
    full = min(nodes, branching * (1 + width * (depth - 1)))
    assert largest == full or (mode.get("verification") == "rejection" and largest >= full / 2)
    assert all(columns <= max(width, depth + 1) for _, columns in shapes[1:])


def test_min_gain_stops_growing(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Levels that promise little are not drafted, which saves draft forwards."""
    forwards = {}
    for gain in (0.0, 0.3, 10.0):
        run(target, draft, Tree(depth=6, min_gain=gain))
        with counted(draft) as shapes:
            stats = run(target, draft, Tree(depth=6, min_gain=gain)).speculation
        forwards[gain] = len(shapes) / stats.rounds

    assert forwards[0.0] > forwards[0.3] > forwards[10.0]
    assert forwards[10.0] < 1.2


def test_depth_comes_from_num_assistant_tokens(target: PreTrainedModel, twin: PreTrainedModel) -> None:
    for settings, strategy, deepest in (
        ({"num_assistant_tokens": 2}, Tree(min_gain=0.0, min_score=0.0, branching=1), 2),
        ({"num_assistant_tokens": 2}, Tree(min_gain=0.0, min_score=0.0, branching=1, depth=3), 2),
        ({}, Tree(min_gain=0.0, min_score=0.0, branching=1, depth=3), 3),
        ({}, Tree(min_gain=0.0, min_score=0.0, branching=1), 5),
    ):
        assert max(run(target, twin, strategy, **settings).speculation.accepted_lengths) == deepest


@pytest.mark.parametrize(
    "strategy", [Assisted(), Tree(nodes=12, depth=4, min_gain=0.0, min_score=0.0)], ids=["chain", "tree"]
)
@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "keyed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_the_draft_sees_the_text_and_nothing_else(family: str, strategy: Drafter, mode: dict[str, Any]) -> None:
    """In every round of a ragged batch the proposal is that of a drafter which reads the whole text afresh."""
    target = zoo.make(family)
    draft = zoo.make_draft(target)
    draft.generation_config.num_assistant_tokens = 4
    drafter = Recording(strategy)
    lengths = [9, 4, 6]
    batch = texts.padded(lengths)

    generate(
        target,
        **batch,
        max_new_tokens=20,
        strategy=drafter,
        assistant_model=draft,
        pad_token_id=texts.PAD,
        top_k=0,
        **({"do_sample": False} | mode),
    )

    seeds = [(3, row) for row in range(3)] if mode else None
    assert [len(text) for text in drafter.seen[0]] == [length + 1 for length in lengths]
    for tree, seen, trust in zip(drafter.trees, drafter.seen, drafter.trust, strict=True):
        generated = [len(text) - length for text, length in zip(seen, lengths, strict=True)]
        open_rows = [row for row, count in enumerate(generated) if count < 19]
        rows = [seen[row] for row in open_rows]
        if not rows:
            continue
        fresh = context(
            rows,
            target,
            draft,
            budgets=[19 - generated[row] for row in open_rows],
            num_generated=[generated[row] for row in open_rows],
            sampling=Sampling([seeds[row] for row in open_rows] if seeds else None),
        )
        begun = strategy.begin(fresh)
        if trust is not None:
            begun._trust = trust  # what was learned shapes the tree; what was read decides its tokens
        with torch.no_grad():
            expected = begun.propose(fresh)
        for i, row in enumerate(open_rows):
            assert (tree.tokens[row], tree.parents[row]) == (expected.tokens[i], expected.parents[i])


def test_the_draft_reads_every_token_once(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Prompt and accepted text are never fed again; a chain's rejected guesses are all that is wasted."""
    run(target, draft, num_assistant_tokens=4)
    with counted(draft) as shapes:
        stats = run(target, draft, num_assistant_tokens=4).speculation

    fed = sum(columns for _, columns in shapes)
    assert fed <= PROMPT.shape[1] + stats.emitted + (stats.drafted - stats.accepted)


def test_nested_generate_is_never_used(target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: Any) -> None:
    """Raw forwards alone: a draft's own generate would cost more than it saves."""
    monkeypatch.setattr(draft, "generate", None)

    assert run(target, draft, "tree").sequences.shape == (1, 33)


def test_the_draft_computes_no_logits_for_the_prompt(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    sizes: list[int] = []
    handle = draft.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[1]))
    run(target, draft, "assisted", num_assistant_tokens=3)
    sizes.clear()
    run(target, draft, "assisted", num_assistant_tokens=3)
    handle.remove()

    assert max(sizes) <= 4


def test_a_long_prompt_is_read_in_chunks(target: PreTrainedModel) -> None:
    target = zoo.make("llama", max_position_embeddings=2048)
    draft = zoo.make_draft(target)
    ids = texts.prompt(1100)
    batch = {"input_ids": ids.expand(2, -1).clone(), "attention_mask": torch.ones(2, 1100, dtype=torch.int64)}
    batch["attention_mask"][1, :700] = 0
    expected = texts.greedy(target, **batch, max_new_tokens=8)
    with counted(draft) as shapes:
        output = run(target, draft, "tree", **batch, max_new_tokens=8)

    assert output.sequences.tolist() == expected.tolist()
    assert max(columns for _, columns in shapes) < 1099
