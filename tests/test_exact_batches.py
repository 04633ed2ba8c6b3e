"""A batch of B rows gives the tokens of stock `generate`, and those of B runs of one row."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import texts
import zoo
from hf_specdec import ArgumentError, generate
from strategies import STRATEGIES, mostly_right

LENGTHS = (9, 3, 14, 6)
SEEDS = [5, 2**50, -3, 5]


@cache
def stops(sampling: bool) -> list[int]:
    """EOS ids that end the rows at different times, one of them never."""
    batch = texts.padded(LENGTHS)
    run = texts.sampled if sampling else texts.greedy
    text = run(zoo.make("llama"), max_new_tokens=16, **batch)[:, max(LENGTHS) :]
    return [int(text[0, 2]), int(text[1, 7]), int(text[2, 11])]


class Even(LogitsProcessor):
    """Unknown to the loop, so it must see the whole batch in step: bans by a count over all rows."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, int(input_ids.sum()) % 3 :: 3] = -torch.inf
        return scores


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "row processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "batch processor": {"logits_processor": LogitsProcessorList([Even()])},
    "both": {"repetition_penalty": 1.3, "logits_processor": LogitsProcessorList([Even()])},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("eos", [False, True], ids=["endless", "eos"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", SETTINGS)
def test_batch(
    target: PreTrainedModel, draft: PreTrainedModel, case: str, strategy: str, sampling: bool, eos: bool
) -> None:
    batch = texts.padded(LENGTHS)
    settings = {"max_new_tokens": 16, **batch, **SETTINGS[case]}
    if eos:
        settings["eos_token_id"] = stops(sampling)
    expected = texts.sampled(target, **texts.SAMPLING, **settings) if sampling else texts.greedy(target, **settings)
    mode = {"do_sample": True, "seed": texts.SEED, **texts.SAMPLING} if sampling else {"do_sample": False}

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    ours = generate(target, **settings, **mode, pad_token_id=texts.PAD, **arguments)

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_equal_single_runs(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, sampling: bool
) -> None:
    """With one seed a row every row is keyed as if it were alone."""
    batch = texts.padded(LENGTHS)
    mode = {"do_sample": True, **texts.SAMPLING} if sampling else {"do_sample": False}
    settings = {"max_new_tokens": 16, "eos_token_id": stops(sampling), "pad_token_id": texts.PAD, **mode}
    stock = (
        texts.sampled(target, seed=SEEDS, **(settings | {"do_sample": False}), **batch)
        if sampling
        else texts.greedy(target, **settings, **batch)
    )
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, stock))
    seeds = {"seed": SEEDS} if sampling else {}

    together = generate(target, **settings, **seeds, **batch, **arguments)

    for row, length in enumerate(LENGTHS):
        ids = texts.inputs(texts.prompt(length, seed=row))
        one_seed = {"seed": SEEDS[row]} if sampling else {}
        one = STRATEGIES[strategy](draft, [texts.rows_without_padding(batch, stock)[row]])
        alone = generate(target, **settings, **one_seed, **ids, **one)[0, length:].tolist()
        new = together[row, max(LENGTHS) :].tolist()
        assert new[: len(alone)] == alone
        assert set(new[len(alone) :]) <= {texts.PAD}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_falls_back_to_eos(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    """Without a pad token finished rows are filled with the first EOS id."""
    batch = texts.padded(LENGTHS)
    settings = {"max_new_tokens": 16, "eos_token_id": stops(False), "pad_token_id": None, **batch}
    expected = texts.greedy(target, **settings)

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    ours = generate(target, **settings, do_sample=False, **arguments)

    assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_num_return_sequences(target: PreTrainedModel, draft: PreTrainedModel, strategy: str, sampling: bool) -> None:
    """Each copy of a prompt is a row with noise of its own."""
    if not sampling:
        with pytest.raises(ValueError, match="num_return_sequences"):
            generate(
                target, **texts.padded([5]), num_return_sequences=3, do_sample=False, **STRATEGIES[strategy](draft, [])
            )
        return
    batch = texts.padded([7, 4])
    tripled = {name: value.repeat_interleave(3, dim=0) for name, value in batch.items()}
    expected = texts.sampled(target, max_new_tokens=12, **texts.SAMPLING, **tripled)
    assert len({tuple(row) for row in expected.tolist()}) == 6

    ours = generate(
        target,
        **batch,
        max_new_tokens=12,
        do_sample=True,
        seed=texts.SEED,
        num_return_sequences=3,
        **texts.SAMPLING,
        **STRATEGIES[strategy](draft, texts.rows_without_padding(tripled, expected)),
    )

    assert ours.tolist() == expected.tolist()


def test_left_padding_changes_nothing(target: PreTrainedModel) -> None:
    """Noise counts generated tokens, not columns."""
    short = texts.inputs(texts.prompt(6))
    wide = {
        "input_ids": torch.nn.functional.pad(short["input_ids"], (5, 0), value=texts.PAD),
        "attention_mask": torch.nn.functional.pad(short["attention_mask"], (5, 0), value=0),
    }
    settings = {"max_new_tokens": 16, "do_sample": True, "seed": 3, "strategy": "prompt_lookup"}

    assert (
        generate(target, **wide, **settings)[0, 11:].tolist() == generate(target, **short, **settings)[0, 6:].tolist()
    )


def test_rows_run_ahead_of_each_other(target: PreTrainedModel) -> None:
    """One row's drafts are right and the other's wrong: the slower decides the rounds, the faster leaves early."""
    batch = texts.padded([9, 5])
    expected = texts.greedy(target, max_new_tokens=16, **batch)
    right, other = texts.rows_without_padding(batch, expected)
    drafter = mostly_right([right, [96] * len(other)])

    ours = generate(
        target,
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
        strategy=drafter,
        pad_token_id=texts.PAD,
        **batch,
    )

    assert ours.sequences.tolist() == expected.tolist()
    assert ours.speculation.rounds == 16
    assert ours.speculation.row_rounds < 28
    assert ours.cache.get_seq_length() == ours.sequences.shape[1] - 1


def test_seeds_must_fit_the_batch(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="seed has 3 numbers for 2 rows"):
        generate(target, **texts.padded([3, 4]), max_new_tokens=4, do_sample=True, seed=[1, 2, 3], strategy="none")
