"""Every strategy x every model family gives the tokens of stock `generate`, or refuses before the first token."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import PromptLookup, Scripted, Tree, UnsupportedModelError, generate
from strategies import STRATEGIES


@cache
def models(family: str, attention: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = zoo.make(family, attention=attention)
    return target, zoo.make_draft(target)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
@pytest.mark.parametrize(("family", "attention"), zoo.VARIANTS)
def test_family(family: str, attention: str, strategy: str) -> None:
    """Prompts shorter than a sliding window, as long as it, and longer; texts always longer."""
    target, draft = models(family, attention)
    for length in (3, zoo.WINDOW, 3 * zoo.WINDOW):
        settings = {**texts.inputs(texts.prompt(length)), "max_new_tokens": 14}
        expected = texts.greedy(target, **settings)

        arguments = STRATEGIES[strategy](draft, expected.tolist())
        ours = generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)

        assert ours.tolist() == expected.tolist(), length


@pytest.mark.parametrize("strategy", ["tree", "scripted", "lookahead", "early_exit", "auto"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "opt", "falcon", "mistral", "gemma3", "qwen2-mixed", "deepseek-v3"]
)
def test_family_in_a_ragged_batch(family: str, strategy: str) -> None:
    target, draft = models(family, "sdpa")
    batch = texts.padded([4, 13, zoo.WINDOW])
    expected = texts.sampled(target, max_new_tokens=14, **texts.SAMPLING, **batch)

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    ours = generate(
        target,
        max_new_tokens=14,
        do_sample=True,
        seed=texts.SEED,
        pad_token_id=texts.PAD,
        **texts.SAMPLING,
        **batch,
        **arguments,
    )

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("window", [2, 5, 8, 30])
def test_windows_of_any_size(window: int) -> None:
    target = zoo.make("mistral", sliding_window=window)
    draft = zoo.make_draft(target)
    settings = {**texts.inputs(texts.prompt(8)), "max_new_tokens": 20}
    expected = texts.greedy(target, **settings)

    for strategy in ("tree", "scripted"):
        arguments = STRATEGIES[strategy](draft, expected.tolist())
        ours = generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)

        assert ours.tolist() == expected.tolist(), strategy


def test_models_are_worth_testing() -> None:
    """A model that repeats one token would hide almost every mistake."""
    settings = {**texts.inputs(texts.prompt(18)), "max_new_tokens": 24}
    for family, attention in zoo.VARIANTS:
        text = texts.greedy(models(family, attention)[0], **settings)[0, 18:]
        assert len(set(text.tolist())) >= 4, family


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_mode_with_dropout_is_refused(attention: str) -> None:
    """Dropout makes every forward different; the self-test sees it."""
    target = zoo.make("llama", attention=attention, attention_dropout=0.5).train()

    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        generate(target, **texts.inputs(texts.prompt(6)), max_new_tokens=4, strategy="prompt_lookup")


def count_forwards(model: torch.nn.Module) -> list[int]:
    """A list that grows by one with every forward from now on."""
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *args: forwards.append(1))
    return forwards


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", zoo.UNSUPPORTED)
def test_unsupported_family_is_refused(family: str) -> None:
    """By name, before any forward; a family that only a forward gives away is refused by the self-test's forwards."""
    target = zoo.make(family, attention="eager")
    forwards = count_forwards(target)
    name = type(target).__name__.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")

    with pytest.raises(UnsupportedModelError, match=f"{name}.*use stock generate|{name}.*encoder-decoder"):
        generate(target, **texts.inputs(texts.prompt(9)), max_new_tokens=4, strategy="prompt_lookup")

    assert len(forwards) <= (2 if family == "falcon-alibi" else 0)
    assert texts.greedy(target, **texts.inputs(texts.prompt(9)), max_new_tokens=4).shape[0] == 1


@pytest.mark.parametrize("window", [zoo.WINDOW, 30])
def test_gpt_neo_is_refused(window: int) -> None:
    """Its local layers hide by slot, not by position: right below the window, wrong above."""
    target = zoo.make("gpt-neo", attention="eager", window_size=window)

    with pytest.raises(UnsupportedModelError, match="GPTNeo"):
        generate(target, **texts.inputs(texts.prompt(9)), max_new_tokens=4, strategy="prompt_lookup")


def test_unsupported_draft_is_refused(target: PreTrainedModel) -> None:
    draft = zoo.make("bloom", attention="eager")

    with pytest.raises(ValueError, match="assistant_model cannot draft: Bloom"):
        generate(target, **texts.inputs(texts.prompt(9)), max_new_tokens=4, strategy="tree", assistant_model=draft)


def test_attention_without_tree_masks(target: PreTrainedModel) -> None:
    """Flash-like kernels take chains of one row and refuse the rest, with the cure."""
    target = zoo.make("llama")
    forwards = count_forwards(target)
    target.config._attn_implementation = "flash_attention_2"
    settings = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 4}

    for strategy in (PromptLookup(), Scripted(lambda context: [[]])):
        with pytest.raises(NotImplementedError, match=r'set_attn_implementation\("sdpa"\)'):
            generate(target, **settings, strategy=strategy)
    with pytest.raises(NotImplementedError, match="a batch or a padded prompt"):
        generate(target, **texts.padded([4, 6]), max_new_tokens=4, strategy=PromptLookup(branches=1))
    assert forwards == []


def test_attention_is_looked_at_in_every_call() -> None:
    """Changing a live model's attention is seen, not remembered."""
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    settings = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 12, "do_sample": False}
    expected = texts.greedy(target, **settings).tolist()
    tree = {"strategy": Tree(min_gain=0.0, min_score=0.0), "assistant_model": draft}

    for attention in ("sdpa", "eager", "sdpa"):
        target.set_attn_implementation(attention)
        assert generate(target, **settings, **tree).tolist() == expected
