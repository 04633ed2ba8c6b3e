"""Every strategy x every logits processor x greedy and sampled gives the tokens of stock `generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, WatermarkingConfig

import texts
import zoo
from hf_specdec import generate
from strategies import STRATEGIES

PROMPT = texts.prompt(9)
EOS = 60


def even_after_odd(row: int, prefix: Tensor) -> list[int]:
    """A grammar: tokens of alternating parity, in each third of the vocabulary after another."""
    return list(range((int(prefix[-1]) + 1) % 2, zoo.VOCAB_SIZE, 2))


class Counter(LogitsProcessor):
    """Bans tokens by how often it was called; five calls long, so no block size of the strategies hides a mistake."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 5 :: 5] = -torch.inf
        return scores


# Settings of generate; callables make objects that must be new for every call.
CASES: dict[str, dict[str, Any]] = {
    "no processor": {},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "repetition_penalty below one": {"repetition_penalty": 0.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 10, "eos_token_id": list(range(0, 97, 4))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(0, 97, 4))},
    "max_length": {"max_length": 21, "max_new_tokens": None},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(5, 60, 3)] + [[61, 62], [62, 64, 65]]},
    "forced_bos_token_id": {"forced_bos_token_id": 50, "input_ids": PROMPT[:, :1]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "sequence_bias": {"sequence_bias": [[[i], 2.0] for i in range(10, 40)] + [[[20, 21], -8.0], [[22, 30], 9.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 70, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 97, 2))},
    "guidance_scale": {"guidance_scale": 1.6},
    "guidance_scale with a negative prompt": {"guidance_scale": 1.6, "negative_prompt_ids": texts.prompt(5, seed=7)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": even_after_odd},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (4, 1.3),
        "eos_token_id": EOS,
        "max_new_tokens": 60,
    },
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "user processor with a counter": {"logits_processor": lambda: LogitsProcessorList([Counter()])},
    "all at once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
        "eos_token_id": EOS,
        "logits_processor": lambda: LogitsProcessorList([Counter()]),
        "renormalize_logits": True,
    },
}
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "temperature above one": {"temperature": 1.7},
    "low temperature and top_p": {"temperature": 0.1, "top_p": 0.9},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.05},
    "top_h": {"top_h": 0.5},
    "several": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "none": {},
}
_OFF = {"top_k": 0}


def fresh(settings: dict[str, Any]) -> dict[str, Any]:
    made = {
        name: value() if name == "logits_processor" and isinstance(value, Callable) else value
        for name, value in settings.items()
    }
    return {"max_new_tokens": texts.NEW_TOKENS, **texts.inputs(made.pop("input_ids", PROMPT))} | made


@cache
def reference(case: str, sampling: bool) -> Tensor:
    settings = fresh(CASES[case])
    if sampling:
        return texts.sampled(zoo.make("llama"), **texts.SAMPLING, **settings)
    return texts.greedy(zoo.make("llama"), **settings)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_processor(target: PreTrainedModel, draft: PreTrainedModel, case: str, strategy: str, sampling: bool) -> None:
    expected = reference(case, sampling)
    mode = {"do_sample": True, "seed": texts.SEED, **texts.SAMPLING} if sampling else {"do_sample": False}

    text = generate(
        target, **fresh(CASES[case]), **mode, pad_token_id=texts.PAD, **STRATEGIES[strategy](draft, expected.tolist())
    )

    assert text.tolist() == expected.tolist()


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("no processor", "remove_invalid_values")])
def test_the_processor_changes_the_text(target: PreTrainedModel, case: str) -> None:
    """A case that leaves the text as it is would prove nothing."""
    kept = {name: CASES[case][name] for name in ("eos_token_id", "input_ids") if name in CASES[case]}

    assert reference(case, False).tolist() != texts.greedy(target, **fresh(kept)).tolist()


@cache
def warped_reference(case: str, seed: int) -> Tensor:
    return texts.sampled(zoo.make("llama"), seed=seed, **fresh(WARPERS[case]))


@pytest.mark.parametrize("seed", [0, 2**40 + 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", WARPERS)
def test_sampling_setting(
    target: PreTrainedModel, draft: PreTrainedModel, case: str, strategy: str, seed: int
) -> None:
    expected = warped_reference(case, seed)

    text = generate(
        target,
        **fresh(_OFF | WARPERS[case]),
        do_sample=True,
        seed=seed,
        pad_token_id=texts.PAD,
        **STRATEGIES[strategy](draft, expected.tolist()),
    )

    assert text.tolist() == expected.tolist()


def watermark() -> WatermarkingConfig:
    return WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_watermark(target: PreTrainedModel, draft: PreTrainedModel, strategy: str, sampling: bool) -> None:
    """Stock generate marks after the last custom processor, so the sampled reference gets its marks by hand."""
    settings = fresh({"max_new_tokens": 12})
    if sampling:
        marker = watermark().construct_processor(zoo.VOCAB_SIZE, "cpu")
        expected = texts.sampled(target, after_warpers=[marker], **texts.SAMPLING, **settings)
    else:
        expected = texts.greedy(target, watermarking_config=watermark(), **settings)
        assert expected.tolist() != texts.greedy(target, **settings).tolist()
    mode = {"do_sample": True, "seed": texts.SEED, **texts.SAMPLING} if sampling else {"do_sample": False}

    text = generate(
        target,
        **settings,
        **mode,
        watermarking_config=watermark(),
        pad_token_id=texts.PAD,
        **STRATEGIES[strategy](draft, expected.tolist()),
    )

    assert text.tolist() == expected.tolist()


class Spy(LogitsProcessor):
    """Writes down what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.tolist(), scores.clone()))
        return scores


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processors_see_the_calls_of_stock_generate(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, rows: int
) -> None:
    """As often, in order, with the same prefixes and scores, rows that have stopped among them."""
    batch = texts.padded([9, 5, 12][:rows])
    stop = int(texts.greedy(target, max_new_tokens=6, **batch)[0, -1])
    settings = {"max_new_tokens": texts.NEW_TOKENS, "eos_token_id": stop, **batch}
    spies = Spy(), Spy()
    expected = texts.greedy(target, logits_processor=LogitsProcessorList([spies[0]]), **settings)

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    text = generate(
        target,
        logits_processor=LogitsProcessorList([spies[1]]),
        do_sample=False,
        pad_token_id=texts.PAD,
        **settings,
        **arguments,
    )

    assert text.tolist() == expected.tolist()
    assert [prefixes for prefixes, _ in spies[1].seen] == [prefixes for prefixes, _ in spies[0].seen]
    for (_, ours), (_, stocks) in zip(spies[1].seen, spies[0].seen, strict=True):
        torch.testing.assert_close(ours, stocks, atol=1e-4, rtol=1e-4)


def test_strategies_accept_tokens_here(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """The matrix would prove nothing with drafters that are never right, or never wrong."""
    expected = reference("no processor", False)
    for strategy in STRATEGIES.keys() - {"none"}:
        stats = generate(
            target,
            **fresh({}),
            do_sample=False,
            return_dict_in_generate=True,
            **STRATEGIES[strategy](draft, expected.tolist()),
        ).speculation
        assert 0 < stats.accepted < stats.drafted, strategy
