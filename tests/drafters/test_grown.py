"""Strategies that draw on sources: suffix, recycling and their union."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from contexts import context
from hf_specdec import (
    ArgumentError,
    Auto,
    DraftContext,
    GrownDrafter,
    Guess,
    Recycling,
    Source,
    SpeculativeOutput,
    SuccessorTable,
    Suffix,
    SuffixStore,
    generate,
)

PAD = 96
PROMPT = torch.tensor([[5, 9, 11, 5, 9, 30, 2, 5, 9]])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return zoo.make("llama")


def run(target: PreTrainedModel, strategy: Any, prompt: torch.Tensor = PROMPT, **settings: Any) -> SpeculativeOutput:
    output = generate(
        target,
        prompt,
        attention_mask=torch.ones_like(prompt),
        strategy=strategy,
        max_new_tokens=40,
        min_new_tokens=40,
        do_sample=False,
        return_dict_in_generate=True,
        **settings,
    )
    assert isinstance(output, SpeculativeOutput)
    return output


def test_a_store_remembers_outputs_from_call_to_call(target: PreTrainedModel) -> None:
    store = SuffixStore()
    strategy = Suffix(store=store, node_cost=0)
    first, second = run(target, strategy), run(target, strategy)
    assert torch.equal(first.sequences, second.sequences)
    assert len(store) == 2 * 41
    assert second.speculation.tokens_per_forward > 3
    assert second.speculation.tokens_per_forward > first.speculation.tokens_per_forward


def test_a_store_that_does_not_learn_stays_as_it_is(target: PreTrainedModel) -> None:
    store = SuffixStore(learn=False)
    run(target, Suffix(store=store))
    assert len(store) == 0


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("ends_by", ["eos", "criterion"])
def test_outputs_of_all_rows_are_stored_without_their_padding(
    target: PreTrainedModel, lockstep: bool, ends_by: str
) -> None:
    store, table = SuffixStore(), SuccessorTable(zoo.VOCAB_SIZE)
    text = run(target, "none").sequences[0, PROMPT.shape[1] :].tolist()
    end = max(set(text), key=text.index)  # the token that occurs for the first time as late as possible
    length = text.index(end) + 1
    assert length > 5
    prompt = torch.cat([PROMPT, PROMPT.flip(1)])

    def stop(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return ids[:, -1] == end

    output = generate(
        target,
        prompt,
        attention_mask=torch.ones_like(prompt),
        strategy=Auto(parts=[Suffix(store=store), Recycling(table=table)], node_cost=0),
        do_sample=False,
        max_new_tokens=40,
        eos_token_id=end if ends_by == "eos" else PAD - 1,
        stopping_criteria=[stop],
        pad_token_id=PAD,
        output_scores=lockstep,
        return_dict_in_generate=True,
    )
    outputs = output.sequences[:, PROMPT.shape[1] :].tolist()
    assert outputs[0][length:] == [PAD] * (len(outputs[0]) - length) != []
    assert store._new.tokens.tolist() == [*text[:length], -1, *(t for t in outputs[1] if t != PAD), -1]
    assert table.successors(PAD)[0] == 0


def test_nothing_is_stored_when_the_call_fails(target: PreTrainedModel) -> None:
    def fail(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        if ids.shape[1] > 20:
            raise KeyboardInterrupt
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    store = SuffixStore()
    with pytest.raises(KeyboardInterrupt):
        run(target, Suffix(store=store), stopping_criteria=[fail])
    assert len(store) == 0
    run(target, Suffix(store=store))
    assert len(store) == 41


def test_a_table_remembers_what_the_target_said(target: PreTrainedModel) -> None:
    table = SuccessorTable(zoo.VOCAB_SIZE)
    strategy = Recycling(table=table, node_cost=0)
    first = run(target, strategy)
    assert len(table) > 10
    second = run(target, strategy)
    assert torch.equal(first.sequences, second.sequences)
    assert second.speculation.tokens_per_forward > first.speculation.tokens_per_forward
    assert len(Recycling().sources(context([[1]], target))) == 1  # without a table each call has its own


def test_the_table_holds_the_targets_own_successors(target: PreTrainedModel) -> None:
    table = SuccessorTable(zoo.VOCAB_SIZE)
    text = run(target, Recycling(table=table, node_cost=1)).sequences[0].tolist()
    logits = target(torch.tensor([text])).logits[0]
    seen_once = [token for token in set(text[len(PROMPT[0]) - 1 : -1]) if table.successors(token)[0] == 1]
    assert seen_once
    for token in seen_once:
        position = len(text) - 2 - text[:-1][::-1].index(token)
        assert table.successors(token)[1][0][0] == int(logits[position].argmax())


def test_the_union_holds_guesses_of_all_its_parts(target: PreTrainedModel) -> None:
    table, store = SuccessorTable(zoo.VOCAB_SIZE), SuffixStore()
    table.observe([9], torch.eye(zoo.VOCAB_SIZE)[40][None] * 20)
    store.add([5, 9, 50, 51])
    state = context([PROMPT[0].tolist()], target)
    drafter = Auto(parts=[Suffix(store=store), Recycling(table=table)], node_cost=0, nodes=90).begin(state)
    tree = drafter.propose(state)
    below_root = {tree.tokens[0][node] for node in tree.children[0][0]}
    assert {11, 30, 40, 50} <= below_root
    assert tree.num_drafted[0] <= 90


def test_the_budget_bounds_the_union(target: PreTrainedModel) -> None:
    table = SuccessorTable(zoo.VOCAB_SIZE)
    table.fill(target)
    state = context([PROMPT[0].tolist()], target, budgets=[2])
    drafter = Auto(parts=[Recycling(table=table)], node_cost=0, nodes=30).begin(state)
    tree = drafter.propose(state)
    assert tree.num_drafted == [30]
    assert max(tree.row_depths[0]) == 2


class Liar(GrownDrafter):
    """Its guesses are sure and never right; from the round on that `honest_from` says they are right."""

    def __init__(self, text: Sequence[int], honest_from: int) -> None:
        super().__init__(node_cost=0.05)
        self.text, self.honest_from = text, honest_from

    def sources(self, context: DraftContext) -> list[Source]:
        return [LyingSource(self.text, self.honest_from)]


class LyingSource(Source):
    def __init__(self, text: Sequence[int], honest_from: int) -> None:
        self.text, self.honest_from = text, honest_from

    def start(self, row: int, text: Sequence[int]) -> int:
        return len(text)

    def guesses(self, state: int) -> list[Guess]:
        if state >= len(self.text):
            return []
        token = self.text[state] if state >= self.honest_from else (self.text[state] + 1) % zoo.VOCAB_SIZE
        return [Guess(token, "word of honour", 0.9, state + 1)]


def test_drafting_stops_while_it_does_not_pay_and_starts_again_when_it_does(target: PreTrainedModel) -> None:
    plain = run(target, "none", max_length=300).sequences[0].tolist()
    length = len(plain)
    never = run(target, Liar(plain, honest_from=length))
    later = run(target, Liar(plain, honest_from=length - 15))
    assert never.sequences[0].tolist() == later.sequences[0].tolist() == plain
    assert never.speculation.accepted == 0
    assert never.speculation.accepted_lengths == {0: never.speculation.rounds}
    assert never.speculation.drafted < 250  # 39 rounds of up to 20 would be 780
    assert later.speculation.accepted > 3


@pytest.mark.parametrize("strategy", [Suffix, Recycling, Auto])
@pytest.mark.parametrize(
    "settings",
    [
        {"nodes": 0},
        {"nodes": -3},
        {"depth": 0},
        {"depth": 1.5},
        {"node_cost": -0.1},
        {"node_cost": 2},
        {"nodes": True},
    ],
)
def test_bad_settings_are_refused_by_name(strategy: type[GrownDrafter], settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        strategy(**settings)


def test_what_is_no_store_no_table_and_no_part_is_refused() -> None:
    with pytest.raises(ArgumentError, match="store"):
        Suffix(store=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="table"):
        Recycling(table={})  # type: ignore[arg-type]
    for parts in ([], "suffix", [SuffixStore()]):
        with pytest.raises(ArgumentError, match="parts"):
            Auto(parts=parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"nodes": 3}, {"depth": 2}, {"node_cost": 0.5}])
def test_parts_have_no_tree_of_their_own(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(settings))):
        Auto(parts=[Suffix(**settings)])


@pytest.mark.parametrize("united", [False, True])
def test_stores_and_tables_of_another_vocabulary_are_refused_before_any_forward(united: bool) -> None:
    target = zoo.make("llama")
    target.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    store = SuffixStore()
    store.add([1, zoo.VOCAB_SIZE])
    wrong = {
        f"token {zoo.VOCAB_SIZE}.*{zoo.VOCAB_SIZE}": Suffix(store=store),
        f"{zoo.VOCAB_SIZE + 1} tokens.*{zoo.VOCAB_SIZE}": Recycling(table=SuccessorTable(zoo.VOCAB_SIZE + 1)),
    }
    for message, strategy in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            run(target, Auto(parts=[Suffix(), strategy]) if united else strategy)
