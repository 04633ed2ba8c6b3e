"""Strategies of other people: the contract of `Drafter`, the scripted fake, names and entry points."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_specdec
import texts
import zoo
from hf_specdec import (
    ArgumentError,
    DraftContext,
    Drafter,
    DrafterError,
    DraftTree,
    NoDraft,
    RoundOutputs,
    Scripted,
    drafter_names,
    generate,
    register_drafter,
    registry,
)
from strategies import mostly_right, oracle

PROMPT = texts.prompt(9)
NEW_TOKENS = 18


class Recorder(Drafter):
    """Proposes what another drafter proposes and writes down what it is told."""

    def __init__(self, inner: Drafter, needs_hidden_states: bool = False) -> None:
        self.inner = inner
        self.needs_hidden_states = needs_hidden_states
        self.contexts: list[DraftContext] = []
        self.rounds: list[tuple[DraftTree, list[list[int]], RoundOutputs]] = []
        self.begun = 0

    def begin(self, context: DraftContext) -> Recorder:
        self.begun += 1
        return self

    def propose(self, context: DraftContext) -> DraftTree:
        self.contexts.append(copy.copy(context))
        self.contexts[-1].texts = [list(text) for text in context.texts]
        self.contexts[-1].budgets = list(context.budgets)
        self.contexts[-1].num_generated = list(context.num_generated)
        return self.inner.propose(context)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        self.rounds.append((tree, [list(path) for path in accepted], outputs))


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 6)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_a_drafter_is_told(family: str, lengths: tuple[int, ...]) -> None:
    target = zoo.make(family)
    batch = texts.padded(lengths)
    eos = int(texts.greedy(target, **batch, max_new_tokens=8)[0, -1])
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, **batch}
    text = texts.greedy(target, **settings)
    rows = texts.rows_without_padding(batch, text)
    drafter = Recorder(mostly_right(rows), needs_hidden_states=True)

    ours = generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, strategy=drafter)

    assert ours.tolist() == text.tolist()
    assert drafter.begun == 1
    # The prompt's round comes first: nothing was asked of the drafter, which sees the last token of every prompt.
    roots, taken, outputs = drafter.rounds[0]
    assert roots.tokens == [[row[length - 1]] for row, length in zip(rows, lengths, strict=True)]
    assert roots.parents == [[-1]] * len(lengths)
    assert taken == [[0]] * len(lengths)
    assert outputs.logits.argmax(-1).tolist() == [[row[length]] for row, length in zip(rows, lengths, strict=True)]
    assert outputs.hidden_states is not None
    torch.testing.assert_close(target.lm_head(outputs.hidden_states[-1]), outputs.logits)
    assert drafter.contexts[0].num_generated == [1] * len(lengths)
    for state, (tree, accepted, outputs) in zip(drafter.contexts, drafter.rounds[1:], strict=True):
        assert state.vocab_size == zoo.VOCAB_SIZE
        assert state.target is target
        assert outputs.logits.shape == (len(lengths), tree.width, zoo.VOCAB_SIZE)
        assert outputs.hidden_states is not None
        last = outputs.hidden_states[-1]
        torch.testing.assert_close(target.lm_head(last), outputs.logits)
        for row, length in enumerate(lengths):
            seen = state.texts[row]
            stops = rows[row][length:].index(eos) + 1 if eos in rows[row][length:] else NEW_TOKENS
            open_row = len(seen) - length < stops
            assert seen == rows[row][: len(seen)]
            assert state.pending_tokens[row] == seen[-1]
            assert state.num_generated[row] == len(seen) - length
            assert state.budgets[row] == (NEW_TOKENS - state.num_generated[row] - 1 if open_row else 0)
            assert bool(accepted[row]) == open_row
            if open_row:
                tokens = [tree.tokens[row][node] for node in accepted[row]]
                assert accepted[row][0] == 0
                assert rows[row][len(seen) - 1 : len(seen) - 1 + len(tokens)] == tokens
                assert all(tree.parents[row][b] == a for a, b in zip(accepted[row], accepted[row][1:], strict=False))


def test_hidden_states_are_computed_for_those_who_want_them(target: PreTrainedModel) -> None:
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=6)
    drafter = Recorder(oracle(text.tolist()))

    generate(target, **texts.inputs(PROMPT), max_new_tokens=6, do_sample=False, strategy=drafter)

    assert all(outputs.hidden_states is None for _, _, outputs in drafter.rounds)


def test_begin_works_on_a_copy(target: PreTrainedModel) -> None:
    """A strategy object may serve several calls at once; its state belongs to the call."""

    class Counting(Drafter):
        calls = 0

        def propose(self, context: DraftContext) -> DraftTree:
            self.calls += 1
            return DraftTree.roots(context.pending_tokens)

    drafter = Counting()

    generate(target, **texts.inputs(PROMPT), max_new_tokens=6, strategy=drafter)

    assert drafter.calls == 0


def test_a_draft_deeper_than_the_budget_is_clipped(target: PreTrainedModel) -> None:
    """Learned positions end; so does the text that is asked for."""
    model = zoo.make("gpt2", n_positions=24)
    text = texts.greedy(model, **texts.inputs(PROMPT), max_new_tokens=15)
    drafter = Scripted(lambda context: [[[*text[0, len(row) :].tolist(), *range(40)] for row in context.texts]])

    output = generate(
        model,
        **texts.inputs(PROMPT),
        max_new_tokens=15,
        do_sample=False,
        strategy=drafter,
        return_dict_in_generate=True,
    )

    assert output.sequences.tolist() == text.tolist()
    assert output.speculation.rounds == 2
    assert output.speculation.drafted == 13


@pytest.mark.parametrize("shape", ["bushy", "comb", "chain"])
def test_any_tree_gives_the_same_text(target: PreTrainedModel, shape: str) -> None:
    text = texts.sampled(target, **texts.inputs(PROMPT), max_new_tokens=NEW_TOKENS, temperature=1.2)

    def script(context: DraftContext) -> list[list[list[int]]]:
        start = len(context.texts[0])
        right = text[0, start : start + 6].tolist()
        if shape == "chain":
            return [[right]]
        if shape == "comb":
            return [[[*right[:i], 90 + i] for i in range(6)] + [right]]
        return [[[a, b, *right[2:]] for a in (*right[:1], 5, 6) for b in (*right[1:2], 5, 6)]]

    ours = generate(
        target,
        **texts.inputs(PROMPT),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=1.2,
        top_k=0,
        seed=texts.SEED,
        strategy=Scripted(script),
    )

    assert ours.tolist() == text.tolist()


@pytest.fixture
def _registered() -> Iterator[None]:
    before = dict(registry._factories)
    yield
    registry._factories.clear()
    registry._factories.update(before)


@pytest.mark.usefixtures("_registered")
def test_a_registered_name(target: PreTrainedModel) -> None:
    register_drafter("my_strategy", lambda: Scripted(lambda context: [[] for _ in context.texts]))

    output = generate(
        target,
        **texts.inputs(PROMPT),
        max_new_tokens=3,
        strategy="my_strategy",
        return_dict_in_generate=True,
    )

    assert "my_strategy" in drafter_names()
    assert output.speculation.strategy == "scripted"


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["tree", "not a name", "", "3d"])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(ArgumentError, match="already registered|plain identifier"):
        register_drafter(name, NoDraft)


class Point:
    """An entry point of an installed package."""

    name = "third_party"

    def load(self) -> Any:
        return NoDraft


def test_entry_points(monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel) -> None:
    """Found when asked for, loaded when used; their groups carry the package's name."""

    def entry_points(group: str, name: str | None = None) -> list[Point]:
        assert group == "hf_specdec.drafters"
        return [Point()] if name in (None, Point.name) else []

    monkeypatch.setattr(registry, "entry_points", entry_points)

    assert "third_party" in drafter_names()
    assert generate(target, **texts.inputs(PROMPT), max_new_tokens=3, strategy="third_party").shape == (1, 12)
    with pytest.raises(ArgumentError, match="did you mean 'third_party'"):
        generate(target, **texts.inputs(PROMPT), max_new_tokens=3, strategy="third_partie")


def test_built_in_names() -> None:
    assert {"none", "assisted", "tree", "prompt_lookup"} <= set(drafter_names())


def test_a_promise_that_is_broken(target: PreTrainedModel) -> None:
    """Chains may run without a mask, so a tree under that flag must never reach the model."""
    drafter = Scripted(lambda context: [[[5], [6]] for _ in context.texts], chains_only=True)

    with pytest.raises(DrafterError, match="Scripted promises chains_only but proposed a node with two children"):
        generate(target, **texts.inputs(PROMPT), max_new_tokens=6, strategy=drafter)


def test_a_strategy_without_a_name_is_called_by_its_class(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    class Nameless(Drafter):
        def propose(self, context: DraftContext) -> DraftTree:
            return DraftTree.roots(context.pending_tokens)

    with pytest.raises(ArgumentError, match="strategy 'Nameless' does not use assistant_model"):
        generate(target, **texts.inputs(PROMPT), strategy=Nameless(), assistant_model=draft)


def test_a_factory_that_makes_something_else(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hf_specdec.registry._factories, "wrong", dict)

    with pytest.raises(ArgumentError, match="strategy must be a name, a Drafter object"):
        generate(target, **texts.inputs(PROMPT), strategy="wrong")


@pytest.mark.parametrize("paths", [None, [], [[5]], 7], ids=repr)
def test_a_script_that_returns_something_else(target: PreTrainedModel, paths: Any) -> None:
    with pytest.raises(DrafterError, match="the script must return a list of token paths for each of 1 rows"):
        generate(target, **texts.inputs(PROMPT), max_new_tokens=6, strategy=Scripted(lambda context: paths))
