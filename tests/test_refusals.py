"""What is not honoured is refused by name, before any forward, with the cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

import hf_specdec
import texts
import zoo
from hf_specdec import (
    ArgumentError,
    Assisted,
    DraftModelError,
    PromptLookup,
    Scripted,
    SpecDecError,
    Speculation,
    Tree,
    UnsupportedError,
    UnsupportedModelError,
    generate,
)
from strategies import oracle

SETTINGS = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 4, "pad_token_id": texts.PAD}


@pytest.fixture
def no_forward(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[None]:
    """Fails if a forward of either model runs inside the test."""
    forwards: list[int] = []
    handles = [model.register_forward_pre_hook(lambda *args: forwards.append(1)) for model in (target, draft)]
    yield
    for handle in handles:
        handle.remove()
    assert forwards == []


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "force_words_ids": {"force_words_ids": [[5]], "num_beams": 2},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "output_attentions": {"output_attentions": True},
    "use_cache": {"use_cache": False},
    "token_healing": {"token_healing": True},
    "cache_implementation": {"cache_implementation": "offloaded"},
}


@pytest.mark.usefixtures("no_forward")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["call", "config"])
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_features_of_generate(target: PreTrainedModel, name: str, place: str) -> None:
    arguments = UNSUPPORTED[name]
    if place == "config":
        arguments = {"generation_config": GenerationConfig(**UNSUPPORTED[name], pad_token_id=texts.PAD)}

    with pytest.raises(UnsupportedError, match="|".join(UNSUPPORTED[name])) as raised:
        generate(target, **SETTINGS, **arguments, strategy="none")

    assert "strategy=" in str(raised.value) or ";" in str(raised.value)


@pytest.mark.usefixtures("no_forward")
def test_input_embeddings(target: PreTrainedModel) -> None:
    embeddings = torch.randn(1, 5, 32)

    with pytest.raises(SpecDecError, match="inputs_embeds|input_ids is empty"):
        generate(target, inputs_embeds=embeddings, max_new_tokens=4, strategy="none")
    with pytest.raises(UnsupportedError, match="inputs_embeds"):
        generate(target, **SETTINGS, inputs_embeds=torch.randn(1, 9, 32), strategy="none")


def test_inputs_that_tree_forwards_would_lose() -> None:
    """GPT-2 adds an embedding for them in every forward."""
    target = zoo.make("gpt2")

    with pytest.raises(UnsupportedError, match="token_type_ids cannot be passed on"):
        generate(target, **SETTINGS, token_type_ids=torch.zeros(1, 9, dtype=torch.int64), strategy="none")


@pytest.mark.usefixtures("no_forward")
def test_an_unknown_argument(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="no_such_argument"):
        generate(target, **SETTINGS, no_such_argument=3, strategy="none")


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(
    ("name", "nearest"), [("tre", "'tree'"), ("prompt-lookup", "'prompt_lookup'"), ("asisted", "'assisted'")]
)
def test_an_unknown_strategy(target: PreTrainedModel, name: str, nearest: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}.*did you mean {nearest}.*known strategies: assisted, "):
        generate(target, **SETTINGS, strategy=name)


@pytest.mark.usefixtures("no_forward")
def test_a_strategy_like_nothing_known(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="'xyzzy' is unknown; known") as raised:
        generate(target, **SETTINGS, strategy="xyzzy")

    assert "did you mean" not in str(raised.value)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize("strategy", [3, {"name": "tree"}, object()], ids=["int", "dict", "object"])
def test_a_strategy_of_a_wrong_type(target: PreTrainedModel, strategy: object) -> None:
    with pytest.raises(ArgumentError, match="strategy must be a name, a Drafter object or MedusaHeads, not"):
        generate(target, **SETTINGS, strategy=strategy)


@pytest.mark.usefixtures("no_forward")
def test_a_strategy_class(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="not the class Tree; call it to make an object"):
        generate(target, **SETTINGS, strategy=Tree)


@pytest.mark.usefixtures("no_forward")
def test_a_model_as_strategy_is_named_by_its_type(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    with pytest.raises(
        ArgumentError, match="strategy must be .*; a draft model is passed as assistant_model="
    ) as raised:
        generate(target, **SETTINGS, strategy=draft)

    assert f"not a {type(draft).__name__};" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(
    "strategy", ["tree", "assisted", Tree(), Assisted()], ids=["name", "other name", "tree object", "chain object"]
)
def test_a_missing_draft(target: PreTrainedModel, strategy: object) -> None:
    with pytest.raises(ArgumentError, match="drafts with a second model: pass assistant_model="):
        generate(target, **SETTINGS, strategy=strategy)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize("strategy", ["none", "prompt_lookup"])
def test_a_draft_that_nobody_uses(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    with pytest.raises(ArgumentError, match="does not use assistant_model"):
        generate(target, **SETTINGS, strategy=strategy, assistant_model=draft)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize("bad", ["a/path", 3, torch.nn.Linear(2, 2)], ids=["path", "int", "module"])
def test_a_draft_that_is_no_model(target: PreTrainedModel, bad: object) -> None:
    with pytest.raises(ArgumentError, match="assistant_model must be a loaded transformers model, not"):
        generate(target, **SETTINGS, strategy="tree", assistant_model=bad)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verification": "hope"}, "verification='hope' is unknown; choose one of 'keyed', 'rejection', 'typical'"),
        ({"seed": 1.5}, "seed must be an int"),
        ({"seed": [1, 2], "verification": "rejection", "do_sample": True}, "pass one int as seed|seed has 2"),
        ({"stop_strings": ["a"]}, "stop_strings needs the model's tokenizer: pass tokenizer="),
        ({"streamer": print}, "streamer must be a transformers streamer"),
        ({"custom_generate": Speculation("none")}, "pass strategy= or custom_generate=, not both"),
    ],
)
def test_arguments(target: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        generate(target, **SETTINGS, **arguments, strategy="none")


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize("arguments", [{"seed": 3}, {"verification": "keyed"}, {"lossless": True}])
def test_arguments_without_a_strategy(target: PreTrainedModel, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="belong to strategy="):
        generate(target, **SETTINGS, **arguments)


@pytest.mark.usefixtures("no_forward")
def test_seeds_of_rejection_sampling(target: PreTrainedModel) -> None:
    """Its randomness is one stream for the whole batch."""
    with pytest.raises(ArgumentError, match="pass one int as seed"):
        generate(
            target,
            **texts.padded([3, 4]),
            max_new_tokens=3,
            do_sample=True,
            seed=[1, 2],
            verification="rejection",
            strategy="none",
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tree(nodes=0), r"Tree\(nodes=0\)"),
        (lambda: Tree(depth=-1), r"Tree\(depth=-1\)"),
        (lambda: Tree(branching=1.5), r"Tree\(branching=1.5\)"),
        (lambda: Tree(width="2"), r"Tree\(width='2'\)"),
        (lambda: Tree(min_gain=-0.1), "min_gain"),
        (lambda: Tree(min_score=-0.1), "min_score"),
        (lambda: PromptLookup(nodes=0), "nodes=0"),
        (lambda: PromptLookup(num_tokens=0), "num_tokens=0"),
        (lambda: PromptLookup(max_ngram=2.5), "max_ngram=2.5"),
        (lambda: PromptLookup(branches=0), "branches=0"),
    ],
)
def test_settings_of_strategies(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("name", ["speed", "no_such"])
def test_settings_that_do_not_exist(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Tree(**{name: 3})


def vocabulary(changes: dict[str, str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {changes.get(word, word): i for i, word in enumerate(f"w{i}" for i in range(zoo.VOCAB_SIZE))}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


@pytest.mark.usefixtures("no_forward")
def test_another_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """The first ids that differ are shown."""
    tokenizers = {"tokenizer": vocabulary({}), "assistant_tokenizer": vocabulary({"w7": "x", "w31": "y"})}

    with pytest.raises(DraftModelError, match="different tokenizers; first differing ids: 7: 'w7' / 'x', 31: "):
        generate(target, **SETTINGS, strategy="tree", assistant_model=draft, **tokenizers)


def test_the_same_tokenizer(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    tokenizers = {"tokenizer": vocabulary({}), "assistant_tokenizer": vocabulary({})}

    assert generate(target, **SETTINGS, strategy="tree", assistant_model=draft, **tokenizers).shape == (1, 13)


@pytest.mark.usefixtures("no_forward")
def test_a_vocabulary_of_another_family(target: PreTrainedModel) -> None:
    other = zoo.make("llama", vocab_size=5000)

    with pytest.raises(DraftModelError, match="the target knows 97 tokens and assistant_model 5000"):
        generate(target, **SETTINGS, strategy="tree", assistant_model=other)


@pytest.mark.usefixtures("no_forward")
def test_an_empty_prompt(target: PreTrainedModel) -> None:
    with pytest.raises((ArgumentError, ValueError), match="empty|bos_token_id|at least"):
        generate(target, torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=3, strategy="none")


def test_every_error_is_a_spec_dec_error() -> None:
    """And what Python users catch by habit: ValueError, NotImplementedError, RuntimeError."""
    errors = [getattr(hf_specdec, name) for name in hf_specdec.__all__ if name.endswith("Error")]

    assert len(errors) == 7
    assert all(issubclass(error, SpecDecError) for error in errors)
    for error in errors:
        if error is not SpecDecError:
            assert issubclass(error, (ValueError, NotImplementedError, RuntimeError))


@pytest.mark.usefixtures("no_forward")
def test_speculation_without_enable_is_checked_at_once(draft: PreTrainedModel) -> None:
    """The object refuses when it is made, not when it is used."""
    with pytest.raises(ArgumentError, match="assistant_model"):
        Speculation("tree")
    with pytest.raises(ArgumentError, match="tokenizer"):
        Speculation("none", stop_strings="a")
    with pytest.raises(ArgumentError, match="verification"):
        Speculation("none", verification="fast")
    with pytest.raises(ArgumentError, match="does not use"):
        Speculation("none", assistant_model=draft)


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("none", {"prompt_lookup_num_tokens": 5}),
        ("tree", {"prompt_lookup_num_tokens": 5}),
        ("tree", {"num_assistant_tokens_schedule": "heuristic"}),
        ("prompt_lookup", {"num_assistant_tokens": 5}),
        ("prompt_lookup", {"assistant_confidence_threshold": 0.1}),
        ("assisted", {"assistant_lookbehind": 3}),
    ],
)
def test_draft_settings_of_another_strategy(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, settings: dict[str, Any]
) -> None:
    if strategy in ("tree", "assisted"):
        settings = {**settings, "assistant_model": draft}

    with pytest.raises(UnsupportedError, match=f"{next(iter(settings))}=.* means nothing to strategy '{strategy}'"):
        generate(target, **SETTINGS, **settings, strategy=strategy)


@pytest.mark.usefixtures("no_forward")
def test_positions_on_several_axes(target: PreTrainedModel) -> None:
    positions = torch.arange(9).expand(4, 1, 9)
    settings = {**SETTINGS, **texts.inputs(texts.prompt(9))}

    with pytest.raises(UnsupportedModelError, match="positions on several axes"):
        generate(target, **settings, position_ids=positions, strategy="none")


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize("arguments", [{"synced_gpus": True}, {"cache_implementation": "paged"}])
def test_what_transformers_would_act_on_first(target: PreTrainedModel, arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="is not supported with strategy=: drop one of the two"):
        generate(target, **SETTINGS, **arguments, strategy="none")


@pytest.mark.usefixtures("no_forward")
@pytest.mark.parametrize(
    ("strategy", "setting", "wanted"),
    [
        ("prompt_lookup", {"prompt_lookup_num_tokens": -1}, "a whole number of at least 1"),
        ("prompt_lookup", {"prompt_lookup_num_tokens": 0}, "a whole number of at least 1"),
        ("prompt_lookup", {"max_matching_ngram_size": 0}, "a whole number of at least 1"),
        ("assisted", {"num_assistant_tokens": 0}, "a whole number of at least 1"),
        ("assisted", {"num_assistant_tokens": "3"}, "a whole number of at least 1"),
        ("tree", {"num_assistant_tokens": 2.5}, "a whole number of at least 1"),
        ("assisted", {"assistant_confidence_threshold": 5.0}, "a number from 0 to 1"),
    ],
)
def test_draft_settings_out_of_range(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, setting: dict[str, Any], wanted: str
) -> None:
    given = {**setting, "assistant_model": draft} if strategy != "prompt_lookup" else setting

    with pytest.raises(ArgumentError, match=f"{next(iter(setting))}=.* must be {wanted}"):
        generate(target, **SETTINGS, **given, strategy=strategy)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tree(min_score=2),
        lambda: Tree(min_gain="x"),
        lambda: Tree(nodes=True),
        lambda: PromptLookup(num_tokens=True),
        lambda: Scripted(3),
        lambda: hf_specdec.register_drafter(3, Tree),
        lambda: hf_specdec.register_drafter("no_factory", 3),
        lambda: Speculation("none", tokenizer="x"),
    ],
)
def test_objects_of_wrong_types(make: Any) -> None:
    with pytest.raises(ArgumentError):
        make()


@pytest.mark.usefixtures("no_forward")
def test_a_config_of_a_wrong_type(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="generation_config must be a GenerationConfig, not dict"):
        generate(target, **SETTINGS, generation_config={"do_sample": True}, strategy="none")


@pytest.mark.usefixtures("no_forward")
def test_a_row_without_tokens(target: PreTrainedModel) -> None:
    batch = texts.padded([9, 6])
    batch["attention_mask"][1] = 0

    with pytest.raises(ArgumentError, match="attention_mask hides every token of row 1"):
        generate(target, **batch, max_new_tokens=4, pad_token_id=texts.PAD, strategy="none")


def test_a_cache_of_another_batch(target: PreTrainedModel) -> None:
    cache = DynamicCache()
    first = generate(target, **texts.padded([9, 6]), max_new_tokens=4, strategy="none", cache=cache)

    with pytest.raises(ArgumentError, match="cache holds 2 rows and the prompt has 1"):
        generate(target, **texts.inputs(first[:1]), max_new_tokens=4, strategy="none", cache=cache)


LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 32),
        (LONGROPE, 16),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotations_that_change_with_length(rope: dict[str, Any], limit: int) -> None:
    """Exact on one side of the limit, refused where a call may cross it."""
    model = zoo.make("llama", rope_parameters=rope, max_position_embeddings=32)
    prompt = texts.inputs(texts.prompt(9))
    below = {**prompt, "max_new_tokens": limit - 9 + 1, "do_sample": False}
    expected = texts.greedy(model, **below)

    assert generate(model, **below, strategy=oracle(expected.tolist())).tolist() == expected.tolist()
    with pytest.raises(UnsupportedModelError, match=f"frequencies change at position {limit}"):
        generate(model, **{**below, "max_new_tokens": limit - 9 + 2}, strategy="none")


def test_rotations_of_a_long_prompt() -> None:
    """All of a "longrope" call beyond the limit is rotated alike."""
    model = zoo.make("llama", rope_parameters=LONGROPE)
    settings = {**texts.inputs(texts.prompt(20)), "max_new_tokens": 20, "do_sample": False}
    expected = texts.greedy(model, **settings)

    assert generate(model, **settings, strategy=oracle(expected.tolist())).tolist() == expected.tolist()
