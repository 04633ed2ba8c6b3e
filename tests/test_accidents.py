"""Whatever goes wrong in the middle: nobody's model, settings or cache is left in a state of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import texts
import zoo
from hf_specdec import (
    DraftContext,
    Drafter,
    DrafterError,
    DraftTree,
    NonFiniteLogitsError,
    Scripted,
    TreeCache,
    enabled,
    generate,
)
from strategies import STRATEGIES, oracle

PROMPT = texts.prompt(9)
NEW_TOKENS = 16
SETTINGS = {**texts.inputs(PROMPT), "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": texts.PAD}
DRAFTING = [name for name in STRATEGIES if name != "none"]


class Recorder(BaseStreamer):
    """Counts what it gets, and raises when it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.ended = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        if len(self.tokens) == self.fail_at:
            raise OSError("the connection is gone")
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


class FailsAtCall:
    """Raises at its n-th call; serves as processor and as hook."""

    def __init__(self, call: int, error: BaseException) -> None:
        self.left = call
        self.error = error

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return args[-1] if len(args) == 2 else None


class FailingCriteria(StoppingCriteria):
    """Raises at its n-th call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("criteria")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def interrupts(model: PreTrainedModel, layer: int, call: int) -> Callable[[], None]:
    """A KeyboardInterrupt inside the n-th forward, after some layers have stored their keys; returns the undo."""
    handle = model.model.layers[layer].mlp.register_forward_pre_hook(FailsAtCall(call, KeyboardInterrupt()))
    return handle.remove


# Name, and what is added to the call so that it fails at a given point.
ACCIDENTS: dict[str, tuple[type[BaseException], Callable[[int], dict[str, Any]]]] = {
    "processor": (LookupError, lambda call: {"logits_processor": [FailsAtCall(call, LookupError("processor"))]}),
    "streamer": (OSError, lambda call: {"streamer": Recorder(fail_at=9 + call)}),
    "criteria": (ArithmeticError, lambda call: {"stopping_criteria": StoppingCriteriaList([FailingCriteria(call)])}),
    "interrupt": (KeyboardInterrupt, lambda call: {}),
}
CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=48),
    "tree": lambda model: TreeCache(),
}


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "weights": {name: weight.clone() for name, weight in model.state_dict().items()},
        "attributes": sorted(vars(model)),
    }


def assert_unchanged(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = snapshot(model)
    weights = after.pop("weights")
    assert after == {name: value for name, value in before.items() if name != "weights"}
    assert all(torch.equal(weights[name], weight) for name, weight in before["weights"].items())


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("accident", ACCIDENTS)
@pytest.mark.parametrize("strategy", ["none", "assisted", "tree", "scripted"])
def test_an_accident(strategy: str, accident: str, kind: str, call: int) -> None:
    """The error comes out as it is, models are as before, and the cache holds a prefix of the text."""
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    text = texts.greedy(target, **{**SETTINGS, "max_new_tokens": NEW_TOKENS})
    arguments = STRATEGIES[strategy](draft, text.tolist())
    generate(target, **SETTINGS, **arguments)
    states = snapshot(target), snapshot(draft)
    cache = CACHES[kind](target)
    error, fault = ACCIDENTS[accident]
    undo = interrupts(target, layer=1, call=call) if accident == "interrupt" else lambda: None

    with pytest.raises(error):
        generate(target, **SETTINGS, **arguments, **fault(call), cache=cache)
    undo()

    assert_unchanged(target, states[0])
    assert_unchanged(draft, states[1])
    assert generate(target, **SETTINGS, **arguments).tolist() == text.tolist()
    held = int(cache.get_seq_length())
    assert held < text.shape[1]
    assert {int(layer.get_seq_length()) for layer in cache.layers if layer.is_initialized} <= {held}
    start = max(held + 1, PROMPT.shape[1])
    rest = {**SETTINGS, **texts.inputs(text[:, :start]), "max_new_tokens": text.shape[1] - start}
    if rest["max_new_tokens"]:
        ours = generate(target, **rest, cache=copy.deepcopy(cache), **STRATEGIES[strategy](draft, text.tolist()))
        assert ours.tolist() == text.tolist()
        assert texts.greedy(target, **rest, cache=cache).tolist() == text.tolist()


@pytest.mark.parametrize("strategy", ["assisted", "tree"])
@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_an_interrupt_in_the_draft(strategy: str, call: int) -> None:
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    text = texts.greedy(target, **SETTINGS)
    arguments = STRATEGIES[strategy](draft, text.tolist())
    generate(target, **SETTINGS, **arguments)
    cache = DynamicCache()
    undo = interrupts(draft, layer=0, call=call)

    with pytest.raises(KeyboardInterrupt):
        generate(target, **SETTINGS, **arguments, cache=cache)
    undo()

    held = int(cache.get_seq_length())
    assert 8 <= held < text.shape[1]
    rest = {**SETTINGS, **texts.inputs(text[:, : held + 1]), "max_new_tokens": text.shape[1] - held - 1}
    assert generate(target, **rest, cache=cache, **arguments).tolist() == text.tolist()


def test_an_accident_in_a_ragged_batch() -> None:
    """The rows' common part goes back to the owner of the cache."""
    target = zoo.make("llama")
    batch = texts.padded([9, 5])
    text = texts.greedy(target, **batch, max_new_tokens=NEW_TOKENS)
    right = texts.rows_without_padding(batch, text)
    drafter = oracle([right[0], [96] * 40])
    cache = DynamicCache()
    streamer = Recorder(fail_at=18 + 2 * 5)

    with pytest.raises(OSError, match="connection"):
        generate(
            target,
            **batch,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            strategy=drafter,
            cache=cache,
            streamer=streamer,
        )

    held = int(cache.get_seq_length())
    assert 9 <= held < 9 + 6
    rest = {
        "input_ids": text[:, : held + 1],
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, held - 8), value=1),
        "max_new_tokens": text.shape[1] - held - 1,
    }
    assert texts.greedy(target, **rest, cache=cache).tolist() == text.tolist()


def test_the_streamer_is_not_ended_after_an_accident(target: PreTrainedModel) -> None:
    """As in stock generate: what was heard of is not said to be complete."""
    streamer = Recorder()

    with pytest.raises(LookupError):
        generate(
            target,
            **SETTINGS,
            strategy="none",
            streamer=streamer,
            logits_processor=[FailsAtCall(4, LookupError("late"))],
        )

    assert len(streamer.tokens) == 9 + 3
    assert streamer.ended == 0


def spoil(model: PreTrainedModel, value: float, first_call: int = 1, token: int | None = None) -> Callable[[], None]:
    """Make the logits of the n-th forward and later ones `value`, all or one; returns the undo."""
    calls = [0]

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] < first_call:
            return output
        output = output.clone()
        output[..., slice(None) if token is None else token] = value
        return output

    return model.lm_head.register_forward_hook(hook).remove


@pytest.mark.parametrize("mode", ["greedy", "with a processor", "keyed", "rejection"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_target_that_overflows(strategy: str, value: float, mode: str) -> None:
    """An error that names it, and not one token chosen from such logits."""
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    settings = (
        SETTINGS
        | {
            "greedy": {},
            "with a processor": {"repetition_penalty": 1.1},
            "keyed": {"do_sample": True, "seed": 1},
            "rejection": {"do_sample": True, "seed": 1, "verification": "rejection"},
        }[mode]
    )
    text = texts.greedy(target, **SETTINGS)
    arguments = STRATEGIES[strategy](draft, text.tolist())
    clean = generate(target, **settings, **arguments)
    streamer = Recorder()
    undo = spoil(target, value, first_call=3)

    with pytest.raises(NonFiniteLogitsError, match="not finite.*remove_invalid_values"):
        generate(target, **settings, **arguments, streamer=streamer)
    undo()

    emitted = streamer.tokens[9:]
    assert 1 <= len(emitted) < NEW_TOKENS
    assert emitted == clean[0, 9 : 9 + len(emitted)].tolist()


@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "seed": 1}])
def test_one_nan_is_enough(mode: dict[str, Any]) -> None:
    target = zoo.make("llama")
    generate(target, **SETTINGS, strategy="none")
    spoil(target, float("nan"), token=50)

    with pytest.raises(NonFiniteLogitsError, match="new token 0"):
        generate(target, **(SETTINGS | mode), strategy="none")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_remove_invalid_values_is_the_cure(strategy: str) -> None:
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    generate(target, **SETTINGS, **STRATEGIES[strategy](draft, [[3] * 40]))
    spoil(target, float("nan"), token=50)
    expected = texts.greedy(target, **SETTINGS, remove_invalid_values=True)

    arguments = STRATEGIES[strategy](draft, expected.tolist())
    assert generate(target, **SETTINGS, remove_invalid_values=True, **arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("mode", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "keyed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("strategy", ["assisted", "tree"])
def test_a_draft_that_overflows(strategy: str, value: float, mode: dict[str, Any]) -> None:
    """It costs speed: the text is the target's."""
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    settings = SETTINGS | mode
    arguments = STRATEGIES[strategy](draft, [])
    expected = generate(target, **settings, **arguments)
    undo = spoil(draft, value, first_call=3)

    output = generate(target, **settings, **arguments, return_dict_in_generate=True)
    undo()

    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", ["assisted", "tree"])
def test_a_draft_that_overflows_under_rejection_sampling(strategy: str) -> None:
    target = zoo.make("llama")
    draft = zoo.make_draft(target)
    settings = SETTINGS | {"do_sample": True, "seed": 1, "verification": "rejection"}
    generate(target, **settings, **STRATEGIES[strategy](draft, []))
    spoil(draft, float("nan"), first_call=3)

    output = generate(target, **settings, **STRATEGIES[strategy](draft, []), return_dict_in_generate=True)

    assert output.sequences.shape == (1, 9 + NEW_TOKENS)


class Bad(Drafter):
    """Returns what it is told to."""

    def __init__(self, make: Callable[[DraftContext], Any]) -> None:
        self.make = make

    def propose(self, context: DraftContext) -> DraftTree:
        return self.make(context)


GARBAGE: dict[str, Callable[[DraftContext], Any]] = {
    "nothing": lambda context: None,
    "a list": lambda context: [[1, 2]],
    "no rows": lambda context: DraftTree([], []),
    "another root": lambda context: DraftTree([[(context.pending_tokens[0] + 1) % 97]], [[-1]]),
    "a later parent": lambda context: DraftTree([[context.pending_tokens[0], 1, 2]], [[-1, 2, 0]]),
    "an unknown token": lambda context: DraftTree([[context.pending_tokens[0], 97]], [[-1, 0]]),
    "a float": lambda context: DraftTree([[context.pending_tokens[0], 1.5]], [[-1, 0]]),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_a_drafter_that_returns_garbage(target: PreTrainedModel, case: str) -> None:
    """It is asked after the prompt's round, whose token is the target's own and stays."""
    text = texts.greedy(target, **SETTINGS)
    streamer = Recorder()

    with pytest.raises(DrafterError):
        generate(target, **SETTINGS, strategy=Bad(GARBAGE[case]), streamer=streamer)

    assert streamer.tokens == text[0, : 9 + 1].tolist()


@pytest.mark.parametrize("fault", ["missing", "too small"])
def test_a_drafter_whose_distributions_do_not_fit_its_tree(target: PreTrainedModel, fault: str) -> None:
    """Under rejection sampling they decide the law, so a gap must not pass for a point mass."""
    size = 97 if fault == "missing" else 40
    probs = {} if fault == "missing" else {0: torch.full((size,), 1 / size).double()}

    def make(context: DraftContext) -> DraftTree:
        return DraftTree([[context.pending_tokens[0], 50]], [[-1, 0]], [probs])

    with pytest.raises(DrafterError, match="draft_probs"):
        generate(target, **(SETTINGS | {"do_sample": True}), strategy=Bad(make), verification="rejection")


def test_a_drafter_that_raises(target: PreTrainedModel) -> None:
    """Its own error comes out, and the cache is a prefix of the text."""
    text = texts.greedy(target, **SETTINGS)
    right = oracle(text.tolist())
    cache = DynamicCache()

    def script(context: DraftContext) -> Any:
        if context.num_generated[0] > 6:
            raise ZeroDivisionError("drafting")
        return right._script(context)

    with pytest.raises(ZeroDivisionError, match="drafting"):
        generate(target, **SETTINGS, strategy=Scripted(script), cache=cache)

    rest = {**SETTINGS, **texts.inputs(text[:, : cache.get_seq_length() + 1])}
    rest["max_new_tokens"] = text.shape[1] - cache.get_seq_length() - 1
    assert 0 < rest["max_new_tokens"] < NEW_TOKENS
    assert texts.greedy(target, **rest, cache=cache).tolist() == text.tolist()


def test_an_enabled_model_stays_enabled_after_an_accident() -> None:
    target = zoo.make("llama")

    with enabled(target):
        with pytest.raises(LookupError):
            target.generate(**SETTINGS, strategy="none", logits_processor=[FailsAtCall(2, LookupError("x"))])
        assert target.generate(**SETTINGS, strategy="none").shape == (1, 9 + NEW_TOKENS)
    assert "generate" not in vars(target)


def test_broken_weights_are_named() -> None:
    model = zoo.make("llama")
    model.lm_head.weight.data[5] = torch.nan

    with pytest.raises(NonFiniteLogitsError, match="computes NaN for ordinary tokens"):
        generate(model, **SETTINGS, strategy="prompt_lookup")
