from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import strategies
import texts
import zoo
from hf_specdec import Assisted, Drafter, NoDraft, PromptLookup, Scripted, Speculation, Tree
from hf_specdec.audit.generation import read_prompt
from hf_specdec.audit.law import forced_logits
from hf_specdec.audit.recording import Notes, Recorder

BATCH = texts.inputs(texts.prompt(9).repeat(3, 1))


def generate(target: PreTrainedModel, drafter: Drafter, draft: PreTrainedModel | None, **settings: Any) -> Any:
    speculation = Speculation(
        drafter, assistant_model=draft, seed=5, verification=settings.pop("verification", "keyed")
    )
    arguments = {**BATCH, "max_new_tokens": 16, "return_dict_in_generate": True} | settings
    return target.generate(custom_generate=speculation, **arguments)


@pytest.mark.parametrize("verification", ["keyed", "rejection"])
@pytest.mark.parametrize("name", sorted(strategies.STRATEGIES.keys() - {"auto_measured"}))  # its trees follow a clock
def test_a_recorded_strategy_says_the_same(
    name: str, verification: str, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    """Same tokens, same counts, and one proposal for each token."""
    known = texts.greedy(target, **BATCH, max_new_tokens=16).tolist()
    arguments = strategies.STRATEGIES[name](draft, known)
    drafter = arguments["strategy"]
    if isinstance(drafter, str):
        drafter = NoDraft() if drafter == "none" else Assisted()
    assistant = arguments.get("assistant_model")
    settings = {"do_sample": True, "temperature": 0.9, "top_k": 0, "verification": verification}
    plain = generate(target, drafter, assistant, **settings)
    notes = Notes()
    recorded = generate(target, Recorder(drafter, notes), assistant, **settings)

    assert recorded.sequences.tolist() == plain.sequences.tolist()
    stats = recorded.speculation
    assert stats.strategy == drafter.name
    counted = tuple(sum(counts[name] for counts in notes.counts) for name in ("drafted", "accepted"))
    assert counted == (plain.speculation.drafted, plain.speculation.accepted)
    assert counted == (stats.drafted, stats.accepted)
    # Each round that a row takes part in gives it the accepted tokens and one more, unless the text is full.
    for counts, proposals in zip(notes.counts, notes.proposals, strict=True):
        assert len(proposals) == 16 <= counts["rounds"] + counts["accepted"] <= 17


def test_picked_guesses_stand_beside_the_token_they_were_for(target: PreTrainedModel) -> None:
    """The script names each guess by the position that it is for."""

    def script(context: Any) -> list[list[list[int]]]:
        return [[[(40 + n + i) % 97 for i in range(3)], [90]] for n in context.num_generated]

    notes = Notes()
    generate(target, Recorder(Scripted(script), notes), None)
    for row in notes.proposals:
        assert row[0].stratum == "plain"
        for position, one in enumerate(row[1:-1], start=1):
            assert one.stratum == "1"
            assert one.picked[0] == (40 + position) % 97
            assert one.q is None


def test_strata_follow_the_accepted_path(target: PreTrainedModel) -> None:
    """A chain of four that is always right: three guessed strata, then the token behind the last guess."""
    known = texts.greedy(target, **BATCH, max_new_tokens=16).tolist()
    notes = Notes()
    output = generate(target, Recorder(strategies.oracle(known, depth=4), notes), None)
    block = ["1", "2", "3+", "3+", "bonus"]
    assert [one.stratum for one in notes.proposals[0]] == ["plain", *block, *block, *block]
    new = output.sequences[:, BATCH["input_ids"].shape[1] :].tolist()
    for row, tokens in zip(notes.proposals, new, strict=True):
        assert all(token in one.picked for one, token in zip(row, tokens, strict=True) if one.picked)


@pytest.mark.parametrize("drafter", [Assisted(), Tree(nodes=8, min_gain=0.0, min_score=0.0)])
def test_drawn_guesses_come_with_the_draft_models_law(
    drafter: Drafter, target: PreTrainedModel, draft: PreTrainedModel
) -> None:
    notes = Notes()
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "verification": "rejection"}
    output = generate(target, Recorder(drafter, notes), draft, **settings)
    prompt = BATCH["input_ids"][:1]
    for row, sequence in zip(notes.proposals, output.sequences.tolist(), strict=True):
        (logits,) = forced_logits(draft, prompt, [sequence[prompt.shape[1] :]])
        expected = (logits.double() / 0.8).softmax(-1)
        guessed = [i for i, one in enumerate(row) if one.q is not None]
        assert guessed
        for i in guessed:
            assert row[i].q is not None
            torch.testing.assert_close(row[i].q.double(), expected[i], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_forced_logits_are_those_of_step_by_step_decoding(family: str, length: int) -> None:
    """Texts of several lengths behind one prompt, the shortest prompts and windows that the prompt fills included."""
    target = zoo.make(family)
    prompt = texts.prompt(length)
    whole = [list(range(20, 30)), list(range(50, 53)), [7]]
    found = forced_logits(target, prompt, whole)
    for text, logits in zip(whole, found, strict=True):
        with torch.no_grad():
            alone = target(torch.tensor([[*prompt[0].tolist(), *text[:-1]]]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, alone[length - 1 :], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_a_prompt_that_is_read_once_gives_the_same_texts(family: str) -> None:
    target = zoo.make(family)
    for length in (1, 2, 9):
        prompt = texts.prompt(length)
        inputs = texts.inputs(prompt.repeat(3, 1))
        expected = texts.greedy(target, **inputs, max_new_tokens=8).tolist()
        for arguments in ({}, {"custom_generate": Speculation(PromptLookup(max_ngram=1), seed=0)}):
            cache = read_prompt(target, prompt, 3)
            assert cache.get_seq_length() == length - 1
            found = texts.greedy(target, **inputs, cache=cache, max_new_tokens=8, **arguments)
            assert found.tolist() == expected


def test_the_recorder_asks_the_strategy(target: PreTrainedModel) -> None:
    recorder = Recorder(PromptLookup(branches=1), Notes())
    assert recorder.chains_only
    assert recorder.name == "prompt_lookup"
    assert recorder.settings == PromptLookup.settings
