"""Caches that the caller owns: continued where they end, left equal to the text, usable by anybody afterwards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache, DynamicLayer

import texts
import zoo
from hf_specdec import ArgumentError, TreeCache, UnsupportedError, generate
from strategies import STRATEGIES, oracle

KINDS = {
    "dynamic": lambda model: DynamicCache(),
    "dynamic with config": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "tree": lambda model: TreeCache(),
}
# Full, sliding, mixed, and learned positions.
FAMILIES = ["llama", "mistral", "gemma3", "opt"]
FIRST = {"max_new_tokens": 12, "pad_token_id": texts.PAD, "do_sample": False}
ADDED = texts.prompt(4, seed=9)


def stored(cache: Cache, layer: int) -> Tensor:
    """The keys of the text that a layer holds, `[B, heads, length, size]`."""
    keys = cache.layers[layer].keys
    if isinstance(cache, StaticCache):
        return keys[:, :, : min(cache.get_seq_length(), keys.shape[2])]
    return keys


def assert_same_content(cache: Cache, model: PreTrainedModel, text: Tensor) -> None:
    """As far as both reach back (a sliding layer forgets), keys equal those of the text run at once."""
    fresh = TreeCache()
    with torch.no_grad():
        model(input_ids=text, cache=fresh)
    assert cache.get_seq_length() == text.shape[1]
    for index, layer in enumerate(fresh.layers):
        keys = stored(cache, index)
        assert keys.shape[2] > 0
        torch.testing.assert_close(keys, layer.keys[:, :, -keys.shape[2] :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_conversation(family: str, kind: str, strategy: str) -> None:
    """Turn one fills the cache, turn two continues it: with ours, with stock, with the new tokens alone."""
    model = zoo.make(family)
    draft = zoo.make_draft(model)
    cache = KINDS[kind](model)
    one = texts.inputs(texts.prompt(9))
    text = texts.greedy(model, **one, **FIRST)

    ours = generate(model, **one, **FIRST, cache=cache, **STRATEGIES[strategy](draft, text.tolist()))

    assert ours.tolist() == text.tolist()
    assert_same_content(cache, model, text[:, :-1])

    two = texts.inputs(torch.cat([text, ADDED], dim=1))
    expected = texts.greedy(model, **two, **FIRST)
    assert texts.greedy(model, **two, **FIRST, cache=copy.deepcopy(cache)).tolist() == expected.tolist()

    spare = copy.deepcopy(cache)
    arguments = STRATEGIES[strategy](draft, expected.tolist())
    assert generate(model, **two, **FIRST, cache=cache, **arguments).tolist() == expected.tolist()
    assert_same_content(cache, model, expected[:, :-1])

    only_new = {"input_ids": two["input_ids"][:, -5:], "attention_mask": two["attention_mask"]}
    stock = texts.greedy(model, **only_new, **FIRST, cache=copy.deepcopy(spare))
    own = STRATEGIES[strategy](draft, stock.tolist())
    assert generate(model, **only_new, **FIRST, cache=spare, **own).tolist() == stock.tolist()
    assert stock[0, 5:].tolist() == expected[0, two["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("strategy", ["assisted", "tree", "scripted"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_conversation_of_a_padded_batch(family: str, kind: str, strategy: str) -> None:
    """Rows end at different times; the next turn continues padding and all, as stock generate does."""
    model = zoo.make(family)
    draft = zoo.make_draft(model)
    batch = texts.padded([9, 4])
    eos = int(texts.greedy(model, **batch, max_new_tokens=5)[0, -1])
    settings = {**FIRST, "eos_token_id": eos}
    stock_cache, cache = DynamicCache(config=model.config), KINDS[kind](model)
    text = texts.greedy(model, **batch, **settings, cache=stock_cache)

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, text))
    assert generate(model, **batch, **settings, cache=cache, **arguments).tolist() == text.tolist()
    assert cache.get_seq_length() == stock_cache.get_seq_length() == text.shape[1] - 1

    new = text.shape[1] - batch["input_ids"].shape[1] + ADDED.shape[1]
    two = {
        "input_ids": torch.cat([text, ADDED.expand(2, -1)], dim=1),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, new), value=1),
    }
    expected = texts.greedy(model, **two, **FIRST, cache=stock_cache)
    assert texts.greedy(model, **two, **FIRST, cache=copy.deepcopy(cache)).tolist() == expected.tolist()
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(two, expected))
    assert generate(model, **two, **FIRST, cache=cache, **arguments).tolist() == expected.tolist()


class StopsRowZero(StoppingCriteria):
    """Ends row 0, or all rows, after so many new tokens."""

    def __init__(self, columns: int, everybody: bool) -> None:
        self.columns = columns
        self.everybody = everybody

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        over = input_ids.shape[1] >= self.columns
        return torch.tensor([over] + [over and self.everybody] * (input_ids.shape[0] - 1))


@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_had_run_ahead_of_its_end(kind: str, new_tokens: int, everybody: bool) -> None:
    """Row 0's drafts are right, so it is tokens ahead when the slower row lets its end be seen: all of them go."""
    model = zoo.make("llama")
    batch = texts.padded([9, 6])
    settings = {**FIRST, "eos_token_id": 96, **batch}

    def criteria() -> StoppingCriteriaList:
        return StoppingCriteriaList([StopsRowZero(9 + new_tokens, everybody)])

    endless = texts.rows_without_padding(batch, texts.greedy(model, **batch, max_new_tokens=12))
    stock_cache, cache = DynamicCache(config=model.config), KINDS[kind](model)
    expected = texts.greedy(model, **settings, stopping_criteria=criteria(), cache=stock_cache)

    ours = generate(
        model,
        **settings,
        stopping_criteria=criteria(),
        cache=cache,
        strategy=oracle([endless[0], [95] * 40]),
    )

    assert ours.tolist() == expected.tolist()
    length = expected.shape[1] - 1
    assert cache.get_seq_length() == stock_cache.get_seq_length() == length
    visible = torch.nn.functional.pad(batch["attention_mask"], (0, length - 9), value=1).bool()
    for index, layer in enumerate(stock_cache.layers):
        mine, stocks = (keys.transpose(1, 2)[visible] for keys in (stored(cache, index), layer.keys))
        torch.testing.assert_close(mine, stocks, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_implementation_static(family: str, strategy: str) -> None:
    model = zoo.make(family)
    one = texts.inputs(texts.prompt(9))
    expected = texts.greedy(model, **one, **FIRST)

    arguments = STRATEGIES[strategy](zoo.make_draft(model), expected.tolist())
    output = generate(model, **one, **FIRST, cache_implementation="static", return_dict_in_generate=True, **arguments)

    assert output.sequences.tolist() == expected.tolist()
    assert isinstance(output.cache, StaticCache)
    assert_same_content(output.cache, model, expected[:, :-1])


@pytest.mark.parametrize("strategy", ["none", "tree", "scripted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_returned_cache_is_a_cache(family: str, strategy: str) -> None:
    """What the loop makes for itself can be passed on to the next call, ours or stock's."""
    model = zoo.make(family)
    draft = zoo.make_draft(model)
    one = texts.inputs(texts.prompt(9))
    text = texts.greedy(model, **one, **FIRST)
    arguments = STRATEGIES[strategy](draft, text.tolist())
    cache = generate(model, **one, **FIRST, return_dict_in_generate=True, **arguments).cache
    assert_same_content(cache, model, text[:, :-1])
    two = texts.inputs(torch.cat([text, ADDED], dim=1))
    expected = texts.greedy(model, **two, **FIRST).tolist()

    assert texts.greedy(model, **two, **FIRST, cache=copy.deepcopy(cache)).tolist() == expected
    assert generate(model, **two, **FIRST, cache=cache, **STRATEGIES[strategy](draft, expected)).tolist() == expected


def test_static_buffers_stay_in_place(target: PreTrainedModel) -> None:
    """A compiled forward holds their addresses."""
    cache = StaticCache(config=target.config, max_cache_len=40)
    one = texts.inputs(texts.prompt(9))
    texts.greedy(target, **one, max_new_tokens=2, cache=cache)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    text = texts.greedy(target, **one, max_new_tokens=3)

    generate(target, **texts.inputs(text), **FIRST, cache=cache, strategy="prompt_lookup")

    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


def test_static_cache_needs_no_headroom(target: PreTrainedModel) -> None:
    """A tree's rows never touch it, so the size that stock generate needs is enough, and one less is not."""
    one = texts.inputs(texts.prompt(9))
    expected = texts.greedy(target, **one, **FIRST)
    settings = {**one, **FIRST, "strategy": STRATEGIES["scripted"](target, expected.tolist())["strategy"]}

    exact = StaticCache(config=target.config, max_cache_len=20)
    assert generate(target, **settings, cache=exact).tolist() == expected.tolist()
    with pytest.raises(ArgumentError, match="static cache of 19 slots cannot hold 20 tokens.*max_cache_len=20"):
        generate(target, **settings, cache=StaticCache(config=target.config, max_cache_len=19))


@pytest.mark.parametrize("cached", [9, 12, 30])
def test_cache_that_is_not_shorter_than_the_text(target: PreTrainedModel, cached: int) -> None:
    """Nothing would be left to run; stock generate's guess would be silent nonsense."""
    cache = DynamicCache()
    with torch.no_grad():
        target(texts.prompt(cached), cache=cache)

    with pytest.raises((ArgumentError, ValueError), match=f"holds {cached} tokens"):
        generate(target, **texts.inputs(texts.prompt(9)), **FIRST, cache=cache, strategy="none")

    assert cache.get_seq_length() == cached


def test_mask_that_forgets_the_cache(target: PreTrainedModel) -> None:
    """New tokens alone with a mask for them alone: the text would be shorter than the cache."""
    cache = DynamicCache()
    with torch.no_grad():
        target(texts.prompt(9), cache=cache)

    with pytest.raises(ArgumentError, match="cache holds 9 tokens but .* a text of 5"):
        generate(target, **texts.inputs(texts.prompt(5)), **FIRST, cache=cache, strategy="none")


class OtherLayer(DynamicLayer):
    """A subclass may do anything with its rows."""


def test_unknown_layers_are_refused(target: PreTrainedModel) -> None:
    cache = Cache(layers=[OtherLayer(), OtherLayer()])

    with pytest.raises(UnsupportedError, match="a cache with OtherLayer layers"):
        generate(target, **texts.inputs(texts.prompt(9)), **FIRST, cache=cache, strategy="none")


@pytest.mark.parametrize("name", ["offloaded", "quantized", "offloaded_static", "paged"])
def test_cache_implementations_that_are_refused(target: PreTrainedModel, name: str) -> None:
    forwards: list[int] = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))

    with pytest.raises((NotImplementedError, ValueError), match=name):
        generate(
            target,
            **texts.inputs(texts.prompt(9)),
            generation_config=GenerationConfig(cache_implementation=name, **FIRST),
            strategy="none",
        )

    handle.remove()
    assert forwards == []


def test_prefill_in_chunks(target: PreTrainedModel, enabled: PreTrainedModel) -> None:
    one = texts.inputs(texts.prompt(23))
    expected = texts.greedy(target, **one, **FIRST)
    enabled.generate(**one, max_new_tokens=1, strategy="none")  # the self-test is behind us
    sizes: list[int] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )

    ours = enabled.generate(**one, **FIRST, prefill_chunk_size=7, strategy="none")

    handle.remove()
    assert ours.tolist() == expected.tolist()
    assert sizes == [7, 7, 7, 2] + [1] * 11  # the last chunk gives the first of 12 tokens


def test_a_cache_made_in_inference_mode(target: PreTrainedModel) -> None:
    """Tensors made there cannot be written in place outside."""
    text = texts.greedy(target, **texts.inputs(texts.prompt(9)), max_new_tokens=16)
    settings = {"max_new_tokens": 8, "do_sample": False, "strategy": "prompt_lookup", "return_dict_in_generate": True}
    with torch.inference_mode():
        first = generate(target, **texts.inputs(texts.prompt(9)), **settings)

    second = generate(target, **texts.inputs(first.sequences.clone()), **settings, cache=first.cache)

    assert second.sequences.tolist() == text.tolist()


def test_an_accident_while_padding_is_stored() -> None:
    """The last forward of a ragged batch serves the cache alone; the cache is whole without it too."""
    model = zoo.make("llama")
    batch = texts.padded([9, 6])
    long_row = texts.greedy(model, **batch, max_new_tokens=12)
    cache = TreeCache()
    ends_early = int(long_row[1, 9 + 2])

    def fail_on_padding(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Tensor]) -> None:
        if cache.get_seq_length() and kwargs["input_ids"].shape[1] > 1 and cache.rows.lag is not None:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(fail_on_padding, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        generate(
            model, **batch, max_new_tokens=12, do_sample=False, eos_token_id=ends_early, strategy="none", cache=cache
        )

    assert cache.rows.lag is None
    assert cache.get_seq_length() < 9 + 12
