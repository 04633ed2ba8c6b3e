"""Every strategy x every rule that ends a text gives the tokens of stock `generate`, however long its blocks are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import texts
import zoo
from hf_specdec import SpeculativeOutput, enabled, generate
from strategies import STRATEGIES, oracle

PROMPT = texts.prompt(9)
NEW_TOKENS = 16


@cache
def endless(sampling: bool) -> list[int]:
    """What stock generate says after `PROMPT` if nothing stops it."""
    run = texts.sampled if sampling else texts.greedy
    return run(zoo.make("llama"), max_new_tokens=NEW_TOKENS, **texts.inputs(PROMPT))[0].tolist()


def both(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, sampling: bool = False, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Our text and stock's, for the same settings; values that are functions are made new for each."""

    def fresh() -> dict[str, Any]:
        made = {name: value() if callable(value) else value for name, value in settings.items()}
        return {**texts.inputs(PROMPT), "max_new_tokens": NEW_TOKENS} | made

    expected = texts.sampled(target, **fresh()) if sampling else texts.greedy(target, **fresh())
    batch = {name: fresh()[name] for name in ("input_ids", "attention_mask")}
    long_enough = [row + [3] * 8 for row in texts.rows_without_padding(batch, expected)]
    mode = {"do_sample": True, "seed": texts.SEED, "top_k": 0} if sampling else {"do_sample": False}
    ours = generate(target, **fresh(), **mode, pad_token_id=texts.PAD, **STRATEGIES[strategy](draft, long_enough))
    return ours, expected


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eos_at_every_position(target: PreTrainedModel, draft: PreTrainedModel, strategy: str, sampling: bool) -> None:
    for eos in dict.fromkeys(endless(sampling)[PROMPT.shape[1] :]):
        ours, expected = both(target, draft, strategy, sampling, eos_token_id=eos)

        assert expected[0, -1] == eos
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("positions", [(9, 6), (3,), ()], ids=["several", "one", "none"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_number_of_eos_ids(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, positions: tuple[int, ...]
) -> None:
    text = endless(False)[PROMPT.shape[1] :]

    ours, expected = both(
        target, draft, strategy, eos_token_id=[*(text[position] for position in positions), 2] if positions else None
    )

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("new_tokens", range(1, 7))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_max_new_tokens(target: PreTrainedModel, draft: PreTrainedModel, strategy: str, new_tokens: int) -> None:
    ours, expected = both(target, draft, strategy, max_new_tokens=new_tokens)

    assert ours.shape == (1, PROMPT.shape[1] + new_tokens)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_max_length(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    ours, expected = both(target, draft, strategy, max_new_tokens=None, max_length=14)

    assert ours.shape == (1, 14)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [10, 13, 30])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_max_length_criteria_of_the_caller(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, length: int
) -> None:
    """It replaces the one that generate makes, shorter or longer."""
    ours, expected = both(
        target, draft, strategy, stopping_criteria=lambda: StoppingCriteriaList([MaxLengthCriteria(length)])
    )

    assert ours.shape == (1, length)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_up_to_the_last_learned_position(family: str, strategy: str) -> None:
    """No draft may reach for a position that the model does not have."""
    positions = 32
    setting = "n_positions" if family == "gpt2" else "max_position_embeddings"
    target = zoo.make(family, **{setting: positions})
    ids = texts.prompt(positions - 8)
    settings = {**texts.inputs(ids), "max_new_tokens": 8}
    expected = texts.greedy(target, **settings)

    arguments = STRATEGIES[strategy](zoo.make_draft(target), [row + [3] * 8 for row in expected.tolist()])
    ours = generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_max_time_that_is_over(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    """Looked at after each token: over from the start, it lets exactly one through, as in stock generate."""
    ours, expected = both(target, draft, strategy, max_time=1e-9)

    assert ours.shape == (1, PROMPT.shape[1] + 1)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_max_time_that_is_not_over(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    ours, expected = both(target, draft, strategy, max_time=3600.0)

    assert ours.tolist() == expected.tolist()


class SumAtLeast(StoppingCriteria):
    """Ends a row by its last two tokens, so a block that is only looked at in the end goes too far."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -2:].sum(-1) >= self.limit


class LooksBack(StoppingCriteria):
    """Remembers which rows are done and decodes a short window, as the criteria of evaluation harnesses do."""

    def __init__(self, sequence: list[int], prompt_length: int, rows: int) -> None:
        self.sequence = sequence
        self.prompt_length = prompt_length
        self.done = [False] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        width = len(self.sequence)
        window = input_ids[:, self.prompt_length :][:, -width - 2 :].tolist()
        for row, tokens in enumerate(window):
            if not self.done[row]:
                self.done[row] = any(tokens[i : i + width] == self.sequence for i in range(len(tokens)))
        return torch.tensor(self.done)


class CountsCalls(StoppingCriteria):
    """Ends everything at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls -= 1
        return torch.full((input_ids.shape[0],), self.calls <= 0)


class SureToken(StoppingCriteria):
    """Ends a row whose last token had a high score; needs `output_scores`, one entry a token."""

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        assert len(scores) == input_ids.shape[1] - PROMPT.shape[1]
        return scores[-1].softmax(-1).amax(-1) > 0.3


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("calls", [1, 2, 5, 7])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_that_count(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, calls: int, sampling: bool
) -> None:
    ours, expected = both(
        target, draft, strategy, sampling, stopping_criteria=lambda: StoppingCriteriaList([CountsCalls(calls)])
    )

    assert ours.shape == (1, PROMPT.shape[1] + calls)
    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("limit", [110, 140, 170])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_of_the_last_tokens(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, limit: int
) -> None:
    ours, expected = both(
        target, draft, strategy, True, stopping_criteria=lambda: StoppingCriteriaList([SumAtLeast(limit)])
    )

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("start", range(0, 12, 2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_with_memory(target: PreTrainedModel, draft: PreTrainedModel, strategy: str, start: int) -> None:
    """A batch, whose rows end where a two-token sequence of row 0 comes up."""
    batch = texts.padded([9, 6])
    stop = texts.greedy(target, max_new_tokens=NEW_TOKENS, **batch)[0, 9:].tolist()[start : start + 2]

    def criteria() -> StoppingCriteriaList:
        return StoppingCriteriaList([LooksBack(stop, 9, 2)])

    ours, expected = both(
        target,
        draft,
        strategy,
        stopping_criteria=criteria,
        eos_token_id=1,
        **{k: lambda v=v: v for k, v in batch.items()},
    )

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_that_read_scores(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    settings = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 40, **texts.inputs(PROMPT)}
    expected = texts.greedy(target, stopping_criteria=StoppingCriteriaList([SureToken()]), **settings)
    assert expected.sequences.shape[1] < PROMPT.shape[1] + 40

    ours = generate(
        target,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([SureToken()]),
        **settings,
        **STRATEGIES[strategy](draft, [expected.sequences[0].tolist() + [3] * 8]),
    )

    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert len(ours.scores) == len(expected.scores)


class Spy(StoppingCriteria):
    """Writes down the texts it is asked about."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen.append(input_ids.tolist())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_see_the_calls_of_stock_generate(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, rows: int
) -> None:
    """Once a token, in order, with the whole batch at one length, though rows run ahead of each other inside."""
    batch = texts.padded([9, 5, 12][:rows])
    eos = int(texts.greedy(target, max_new_tokens=6, **batch)[-1, -1])
    spies = iter([Spy(), Spy()])
    used: list[Spy] = []

    def criteria() -> StoppingCriteriaList:
        used.append(next(spies))
        return StoppingCriteriaList([used[-1]])

    settings = {"eos_token_id": eos, "max_new_tokens": NEW_TOKENS, **batch}
    expected = texts.greedy(target, stopping_criteria=criteria(), **settings)
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    ours = generate(
        target, stopping_criteria=criteria(), do_sample=False, pad_token_id=texts.PAD, **settings, **arguments
    )

    assert ours.tolist() == expected.tolist()
    assert used[1].seen == used[0].seen


# Words of `letters` are run together: "ab" may be one token, or end in one and begin in the next.
STOPS = ["aa", "cab", ["dd", "bac", "cc"], "d"]


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stop_strings(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    letters: PreTrainedTokenizerFast,
    strategy: str,
    stop: str | list[str],
    sampling: bool,
) -> None:
    """Only words, so that a stop string comes up soon; stock generate knows how without a draft."""
    settings = {"stop_strings": stop, "suppress_tokens": list(range(78, zoo.VOCAB_SIZE)), "tokenizer": letters}
    settings = {name: (lambda value=value: value) for name, value in settings.items()}

    ours, expected = both(target, draft, strategy, sampling, max_new_tokens=40, **settings)

    assert ours.tolist() == expected.tolist()


def test_some_stop_strings_stop(target: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    lengths = set()
    for stop in STOPS:
        text = texts.greedy(
            target,
            **texts.inputs(PROMPT),
            max_new_tokens=40,
            stop_strings=stop,
            suppress_tokens=list(range(78, zoo.VOCAB_SIZE)),
            tokenizer=letters,
        )
        lengths.add(text.shape[1])

    assert len(lengths) >= 2


@pytest.mark.parametrize("place", ["call", "generation_config", "model.generation_config"])
def test_stop_strings_from_any_place(letters: PreTrainedTokenizerFast, place: str) -> None:
    target = zoo.make("llama")
    only_words = {"suppress_tokens": list(range(78, zoo.VOCAB_SIZE)), "max_new_tokens": 40, "do_sample": False}
    settings = {**texts.inputs(PROMPT), "tokenizer": letters, **only_words}
    expected = texts.greedy(target, stop_strings="aa", **settings)
    assert expected.shape[1] < PROMPT.shape[1] + 40
    if place == "model.generation_config":
        target.generation_config.stop_strings = "aa"
    elif place == "generation_config":
        settings["generation_config"] = GenerationConfig(stop_strings="aa", pad_token_id=texts.PAD)
    else:
        settings["stop_strings"] = "aa"

    with enabled(target):
        ours = target.generate(**settings, strategy=oracle([expected[0].tolist() + [3] * 8]))

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_emitted_past_the_stop(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    """Text and cache end together: the cache lacks the last token alone."""
    eos = endless(False)[PROMPT.shape[1] + 6]
    settings = {**texts.inputs(PROMPT), "max_new_tokens": NEW_TOKENS, "eos_token_id": eos}

    ours: SpeculativeOutput = generate(
        target,
        **settings,
        do_sample=False,
        pad_token_id=texts.PAD,
        return_dict_in_generate=True,
        **STRATEGIES[strategy](draft, [endless(False)]),
    )

    assert ours.sequences[0, -1] == eos
    assert ours.cache.get_seq_length() == ours.sequences.shape[1] - 1
    assert ours.speculation.emitted == ours.sequences.shape[1] - PROMPT.shape[1]


@pytest.mark.parametrize("kind", ["bool", "one number"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_criteria_that_speak_for_all_rows(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, kind: str
) -> None:
    """Written by hand as a function, as many are."""

    def criterion(input_ids: Tensor, scores: object, **kwargs: object) -> Any:
        return input_ids.shape[1] >= 14 if kind == "bool" else torch.tensor(input_ids.shape[1] >= 14)

    settings = {**texts.padded([9, 6]), "do_sample": False, "max_new_tokens": 16, "pad_token_id": texts.PAD}
    expected = target.generate(**settings, stopping_criteria=[criterion])

    long_enough = [row.tolist() + [3] * 8 for row in expected]
    ours = generate(target, **settings, stopping_criteria=[criterion], **STRATEGIES[strategy](draft, long_enough))

    assert ours.tolist() == expected.tolist()
    assert ours.shape[1] == 14
