"""`return_dict_in_generate` gives what stock `generate` gives, one entry a token, and the counts of the call."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

import texts
import zoo
from hf_specdec import DraftContext, PromptLookup, SpeculativeOutput, Tree, UnsupportedError, generate
from strategies import STRATEGIES, oracle

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}
NEW_TOKENS = 14


def run_both(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, batch: dict[str, Any], **settings: Any
) -> tuple[SpeculativeOutput, Any]:
    settings = {"max_new_tokens": NEW_TOKENS, **EVERYTHING, **settings}
    expected = texts.greedy(target, **batch, **settings)
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected.sequences))
    ours = generate(target, **batch, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)
    assert ours.sequences.tolist() == expected.sequences.tolist()
    return ours, expected


def eos_of_row_zero(target: PreTrainedModel, batch: dict[str, Any], position: int) -> int:
    width = batch["input_ids"].shape[1]
    return int(texts.greedy(target, **batch, max_new_tokens=NEW_TOKENS)[0, width + position])


@pytest.mark.parametrize("eos", [False, True], ids=["endless", "eos"])
@pytest.mark.parametrize("lengths", [(9,), (1,), (7, 12, 4)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_everything_that_stock_generate_returns(
    family: str, strategy: str, lengths: tuple[int, ...], eos: bool
) -> None:
    target = zoo.make(family)
    batch = texts.padded(lengths)
    settings: dict[str, Any] = {"repetition_penalty": 1.2}
    if eos:
        settings["eos_token_id"] = eos_of_row_zero(target, batch, 4)

    ours, expected = run_both(target, zoo.make_draft(target), strategy, batch, **settings)

    for name in ("scores", "logits"):
        mine, stocks = getattr(ours, name), getattr(expected, name)
        assert len(mine) == len(stocks) == ours.sequences.shape[1] - batch["input_ids"].shape[1]
        for one, other in zip(mine, stocks, strict=True):
            assert one.dtype == other.dtype == torch.float32
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert len(ours.hidden_states) == len(expected.hidden_states)
    for step, (mine, stocks) in enumerate(zip(ours.hidden_states, expected.hidden_states, strict=True)):
        assert len(mine) == len(stocks)
        real = batch["attention_mask"].bool() if step == 0 else torch.ones(len(lengths), 1, dtype=torch.bool)
        for one, other in zip(mine, stocks, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one[real], other[real], atol=1e-4, rtol=1e-4)
    assert ours.attentions is None
    assert ours.cache.get_seq_length() == expected.cache.get_seq_length()


@pytest.mark.parametrize("name", ["scores", "logits", "hidden_states"])
def test_only_what_is_asked_for(target: PreTrainedModel, name: str) -> None:
    output = generate(
        target,
        **texts.inputs(texts.prompt(5)),
        max_new_tokens=4,
        strategy="none",
        return_dict_in_generate=True,
        **{f"output_{name}": True},
    )

    assert [field for field in ("scores", "logits", "hidden_states") if getattr(output, field) is not None] == [name]


def test_raw_logits_stay_raw(target: PreTrainedModel) -> None:
    """A processor that writes into its argument does not reach the logits."""

    def overwrite(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(0.0)

    output = generate(
        target,
        **texts.inputs(texts.prompt(5)),
        max_new_tokens=4,
        strategy="none",
        logits_processor=[overwrite],
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )

    assert all(scores.abs().max() == 0 for scores in output.scores)
    assert all(logits.abs().max() > 0 for logits in output.logits)


def test_attentions_are_refused(target: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedError, match="output_attentions=True"):
        generate(target, texts.prompt(5), max_new_tokens=4, strategy="none", output_attentions=True)


def test_without_return_dict_it_is_a_tensor(target: PreTrainedModel) -> None:
    output = generate(target, **texts.inputs(texts.prompt(5)), max_new_tokens=4, strategy="none", output_scores=True)

    assert isinstance(output, torch.Tensor)


@pytest.mark.parametrize("lengths", [(9,), (7, 12, 4)], ids=str)
@pytest.mark.parametrize("in_step", [False, True], ids=["ragged", "in step"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_counts_are_consistent(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, lengths: tuple[int, ...], in_step: bool
) -> None:
    """Also where rows must keep in step, as recorded scores want it: padding is not counted."""
    batch = texts.padded(lengths)
    eos = eos_of_row_zero(target, batch, 9)
    forwards: list[int] = []
    handle = target.register_forward_pre_hook(lambda *args: forwards.append(1))

    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "do_sample": False, "pad_token_id": texts.PAD}
    expected = texts.greedy(target, **batch, **settings)
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
    generate(target, **batch, **settings, **arguments)  # the model's self-test is behind us
    forwards.clear()
    output = generate(target, **batch, **settings, return_dict_in_generate=True, output_scores=in_step, **arguments)
    handle.remove()

    stats = output.speculation
    new = output.sequences[:, max(lengths) :].tolist()
    assert stats.emitted == sum(row.index(eos) + 1 if eos in row else len(row) for row in new)
    assert stats.rounds <= NEW_TOKENS
    # Row 0 ends early; unless its padding ran in step with the others, the cache gets it afterwards.
    assert len(forwards) == stats.rounds + (len(lengths) > 1 and not in_step)
    assert stats.row_rounds == sum(stats.accepted_lengths.values())
    assert stats.accepted == sum(length * times for length, times in stats.accepted_lengths.items())
    assert stats.accepted <= stats.drafted
    assert stats.accepted + stats.row_rounds == stats.emitted
    assert stats.tokens_per_forward == stats.emitted / stats.row_rounds
    assert stats.acceptance_rate == (stats.accepted / stats.drafted if stats.drafted else 0.0)
    assert min(stats.seconds_draft, stats.seconds_verify, stats.seconds_rest) >= 0
    assert stats.seconds_verify > 0
    assert stats.verification == "greedy"
    assert stats.to_dict()["tokens_per_forward"] == stats.tokens_per_forward


class FinalTexts(PromptLookup):
    """Keeps what a strategy that learns from finished texts is told."""

    texts: ClassVar[list[list[int]]] = []
    num_generated: ClassVar[list[int]] = []

    def finish(self, context: DraftContext) -> None:
        self.texts[:] = [list(text) for text in context.texts]
        self.num_generated[:] = context.num_generated


@pytest.mark.parametrize("in_step", [False, True], ids=["ragged", "in step"])
def test_strategies_learn_nothing_from_padding(target: PreTrainedModel, in_step: bool) -> None:
    """Rows that ended early waited for the last one; its text is as long as they come."""
    batch = texts.padded((7, 12, 4))
    eos = eos_of_row_zero(target, batch, 5)
    settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "do_sample": False, "pad_token_id": texts.PAD}
    settings |= {"return_dict_in_generate": True, "output_scores": in_step}
    output = generate(target, **batch, **settings, strategy=FinalTexts())
    new = output.sequences[:, 12:].tolist()
    own = [row[: row.index(eos) + 1] if eos in row else row for row in new]
    assert len(set(map(len, own))) > 1
    assert FinalTexts.num_generated == [len(row) for row in own]
    assert [text[-len(row) :] for text, row in zip(FinalTexts.texts, own, strict=True)] == own


@pytest.mark.parametrize(
    ("mode", "rule"),
    [({"do_sample": True}, "keyed"), ({"do_sample": True, "verification": "rejection"}, "rejection"), ({}, "greedy")],
)
def test_counts_name_strategy_and_rule(target: PreTrainedModel, mode: dict[str, Any], rule: str) -> None:
    output = generate(
        target,
        **texts.inputs(texts.prompt(5)),
        max_new_tokens=4,
        strategy="prompt_lookup",
        return_dict_in_generate=True,
        **mode,
    )

    assert (output.speculation.strategy, output.speculation.verification) == ("prompt_lookup", rule)


def test_an_oracle_saves_forwards(target: PreTrainedModel) -> None:
    """Six tokens a forward for a drafter that is always right about the next five, after the prompt's one."""
    ids = texts.prompt(9)
    text = texts.greedy(target, **texts.inputs(ids), max_new_tokens=24)

    stats = generate(
        target,
        **texts.inputs(ids),
        max_new_tokens=24,
        do_sample=False,
        strategy=oracle(text.tolist()),
        return_dict_in_generate=True,
    ).speculation

    assert (stats.rounds, stats.emitted, stats.accepted_lengths) == (5, 24, {0: 1, 5: 3, 4: 1})


def test_a_useless_draft_costs_no_more_than_one_forward_a_token(target: PreTrainedModel) -> None:
    draft = zoo.make("llama", seed=5)

    stats = generate(
        target,
        **texts.inputs(texts.prompt(9)),
        max_new_tokens=24,
        do_sample=False,
        strategy=Tree(),
        assistant_model=draft,
        return_dict_in_generate=True,
    ).speculation

    assert stats.rounds <= stats.emitted == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("gpt2", {}), ("mistral", {"sliding_window": 64})],
    ids=["llama", "gpt2", "mistral inside its window"],
)
def test_one_token_a_step_is_plain_decoding_to_the_bit(
    family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """One unpadded row without guesses runs the forwards of stock generate, so not even a rounding differs.

    A text that has outgrown a window is another matter: stock drops old keys where ours are hidden, and sums differ.
    """
    target = zoo.make(family, **changes).to(dtype)
    batch = texts.inputs(texts.prompt(9))

    ours, expected = run_both(target, target, "none", batch)

    for name in ("scores", "logits"):
        for one, other in zip(getattr(ours, name), getattr(expected, name), strict=True):
            assert torch.equal(one, other)
    for mine, stocks in zip(ours.hidden_states, expected.hidden_states, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, stocks, strict=True))
    assert ours.speculation.rounds == NEW_TOKENS


@pytest.mark.parametrize("lengths", [(9,), (1,), (7, 12, 4)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_token_costs_one_forward(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, lengths: tuple[int, ...]
) -> None:
    """The prompt's, which drafts nothing."""
    settings = {**texts.padded(lengths), "max_new_tokens": 1}
    expected = texts.greedy(target, **settings)
    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(settings, expected))
    generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)  # the self-test is behind us
    sizes: list[tuple[int, int]] = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    output = generate(
        target, **settings, do_sample=False, pad_token_id=texts.PAD, return_dict_in_generate=True, **arguments
    )

    handle.remove()
    assert output.sequences.tolist() == expected.tolist()
    assert sizes == [(len(lengths), max(lengths))]
    stats = output.speculation
    assert (stats.rounds, stats.row_rounds, stats.drafted) == (1, len(lengths), 0)
    assert (stats.emitted, stats.accepted_lengths) == (len(lengths), {0: len(lengths)})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rejection_sampling_records_every_token(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str
) -> None:
    """Whatever rule accepts a block, there is one entry a token, and asking for it changes nothing."""
    prompt = texts.prompt(9)
    settings = {**texts.inputs(prompt), "max_new_tokens": 12, "do_sample": True, "top_k": 0, "temperature": 0.7}
    settings |= {"seed": 1, "verification": "rejection", **STRATEGIES[strategy](draft, [[3] * 40])}
    plain = generate(target, **settings)

    output = generate(target, **settings, return_dict_in_generate=True, output_scores=True, output_logits=True)

    assert output.sequences.tolist() == plain.tolist()
    expected = target(output.sequences).logits[0, 8:-1].float()
    torch.testing.assert_close(torch.cat(output.logits), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(output.scores), expected / 0.7, atol=1e-4, rtol=1e-4)
