"""Chain drafters inside transformers' own assisted decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import texts
import zoo
from hf_specdec import (
    ArgumentError,
    Assisted,
    DraftContext,
    DrafterCandidateGenerator,
    DrafterError,
    DraftModelError,
    EarlyExit,
    NoDraft,
    PromptLookup,
    Scripted,
    Tree,
    stock_assisted,
)
from strategies import oracle

SETTINGS = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 20, "do_sample": False, "pad_token_id": texts.PAD}


def run(model: PreTrainedModel, generator: DrafterCandidateGenerator, **settings: Any) -> torch.Tensor:
    with stock_assisted(model, generator) as same:
        return same.generate(**(SETTINGS | settings), prompt_lookup_num_tokens=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("name", ["prompt_lookup", "assisted", "oracle", "none"])
def test_greedy_text(family: str, name: str) -> None:
    target = zoo.make(family)
    draft = zoo.make_draft(target) if name == "assisted" else None
    expected = texts.greedy(target, **SETTINGS)
    drafter = {
        "prompt_lookup": PromptLookup(branches=1),
        "assisted": Assisted(),
        "oracle": oracle(expected.tolist()),
        "none": NoDraft(),
    }[name]

    ours = run(target, DrafterCandidateGenerator(drafter, target, draft))

    assert ours.tolist() == expected.tolist()


def test_the_oracle_saves_forwards(target: PreTrainedModel) -> None:
    expected = texts.greedy(target, **SETTINGS)
    forwards: list[int] = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))

    run(target, DrafterCandidateGenerator(oracle(expected.tolist()), target))

    handle.remove()
    assert len(forwards) <= 5


def test_eos_and_limits(target: PreTrainedModel) -> None:
    """Settings of the call are given to the generator too."""
    expected = texts.greedy(target, **SETTINGS)
    eos = int(expected[0, 9 + 7])
    for settings in ({"max_new_tokens": 1}, {"max_new_tokens": 7}, {"eos_token_id": eos}):
        config = GenerationConfig(max_new_tokens=settings.get("max_new_tokens", 20))
        generator = DrafterCandidateGenerator(oracle(expected.tolist()), target, generation_config=config)

        ours = run(target, generator, **settings)

        assert ours.tolist() == texts.greedy(target, **(SETTINGS | settings)).tolist()


def test_the_model_is_as_before(target: PreTrainedModel) -> None:
    before = set(vars(target)), copy.deepcopy(target.generation_config.to_dict())

    with pytest.raises(KeyError), stock_assisted(target, DrafterCandidateGenerator(NoDraft(), target)):
        raise KeyError

    assert (set(vars(target)), target.generation_config.to_dict()) == before


def test_settings_reach_the_drafter(target: PreTrainedModel) -> None:
    twin = copy.deepcopy(target)
    sizes: list[int] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for tokens in (1, 4):
        config = GenerationConfig(num_assistant_tokens=tokens, assistant_confidence_threshold=0.0, max_new_tokens=20)
        sizes.clear()
        run(target, DrafterCandidateGenerator(Assisted(), target, twin, config))
        assert max(sizes[1:]) == tokens + 1

    handle.remove()
    assert target.generation_config.num_assistant_tokens is None


def test_sampling_through_the_stock_loop(target: PreTrainedModel) -> None:
    """Guesses without probabilities: stock samples from the target and compares."""
    torch.manual_seed(1)
    text = run(target, DrafterCandidateGenerator(PromptLookup(branches=1), target), do_sample=True)

    assert text.shape == (1, 29)


@pytest.mark.parametrize("drafter", [Tree(), PromptLookup(), Scripted(lambda context: [[]]), "assisted", None])
def test_trees_are_refused(target: PreTrainedModel, drafter: Any) -> None:
    with pytest.raises(ArgumentError, match="verifies chains only"):
        DrafterCandidateGenerator(drafter, target)


def test_drafts_are_checked(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="assistant_model must be a loaded transformers model"):
        DrafterCandidateGenerator(Assisted(), target)
    with pytest.raises(DraftModelError, match="5000"):
        DrafterCandidateGenerator(Assisted(), target, zoo.make("llama", vocab_size=5000))


def test_settings_are_checked() -> None:
    """Before any forward."""
    target = zoo.make("llama")
    target.register_forward_pre_hook(lambda *args: pytest.fail("a forward was run"))
    for drafter in (EarlyExit(layers=(0, 99)), EarlyExit(exit_layer=99)):
        with pytest.raises(ArgumentError, match="99"):
            DrafterCandidateGenerator(drafter, target)


def test_the_drafter_tests_the_target() -> None:
    """Once, before the first draft."""
    heard: list[str] = []

    class Listens(NoDraft):
        def check(self, target: PreTrainedModel) -> None:
            heard.append("check")

        def self_test(self, target: PreTrainedModel) -> None:
            heard.append("self_test")

        def begin(self, context: DraftContext) -> Listens:
            heard.append("begin")
            return self

    model = zoo.make("llama")
    run(model, DrafterCandidateGenerator(Listens(), model))

    assert heard == ["check", "self_test", "begin"]


def test_garbage_is_named(target: PreTrainedModel) -> None:
    drafter = Scripted(lambda context: [[[1000]]], chains_only=True)

    with pytest.raises(DrafterError, match="token 1000"):
        run(target, DrafterCandidateGenerator(drafter, target))


def test_an_earlier_override_comes_back() -> None:
    model = zoo.make("llama")
    outer, inner = (DrafterCandidateGenerator(PromptLookup(branches=1), model) for _ in range(2))

    with stock_assisted(model, outer):
        before = vars(model)["_get_candidate_generator"]
        with stock_assisted(model, inner):
            assert model._get_candidate_generator() is inner
        assert vars(model)["_get_candidate_generator"] is before

    assert "_get_candidate_generator" not in vars(model)
