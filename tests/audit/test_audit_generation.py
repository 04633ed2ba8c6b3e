"""The texts that strategies are compared with, and what an audit leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import audits
from hf_specdec import NoDraft, PromptLookup
from hf_specdec.audit.generation import clean_generation_config, inputs_for, stock_keyed, stock_sampled
from hf_specdec.noise import gumbel

PROMPT = torch.tensor([[5, 9, 30, 5, 9]])
SMALL = {"max_new_tokens": 8, "law_tokens": 200, "control_tokens": 1, "rows": 8}


def opinionated() -> PreTrainedModel:
    """A checkpoint whose generation config changes greedy text, sampled text, or both."""
    model = audits.make()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_k=4,
        top_p=0.4,
        min_p=0.4,
        typical_p=0.5,
        epsilon_cutoff=0.1,
        repetition_penalty=3.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(0, len(audits.TOKENIZER), 2)),
        pad_token_id=0,
    )
    return model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stock_texts_follow_the_logits_alone(temperature: float) -> None:
    """One token after the other, the best of the logits, or of logits over temperature plus keyed noise."""
    model = opinionated()
    with clean_generation_config(model):
        (found,) = stock_keyed(model, inputs_for(model, [PROMPT]), 8, temperature, [3])
    text = PROMPT[0].tolist()
    for step in range(8):
        with torch.no_grad():
            scores = model(torch.tensor([text])).logits[0, -1].double()
        if temperature:
            scores = scores / temperature + gumbel(3, 0, step, len(scores))
        text.append(int(scores.argmax()))
    assert found == text[PROMPT.shape[1] :]


def test_what_a_checkpoint_wishes_for_changes_no_finding(tmp_path: Path) -> None:
    plain, wishful = (
        audits.audit(tmp_path / name, model, {"lookup": PromptLookup(max_ngram=1)}, changes=SMALL)
        for name, model in (("plain", audits.make()), ("wishful", opinionated()))
    )
    assert wishful.identity == plain.identity
    assert wishful.tests == plain.tests
    assert not [one for one in wishful.checks if not one.passed and not one.name.startswith("control")]


def test_sampling_follows_its_seed_and_leaves_torchs_generator() -> None:
    model = audits.make()
    inputs = inputs_for(model, [PROMPT] * 4)
    before = torch.get_rng_state()
    with clean_generation_config(model):
        one, same, other = (stock_sampled(model, inputs, 8, 1.0, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), before)


def test_an_audit_leaves_generator_and_config(tmp_path: Path) -> None:
    model = opinionated()
    kept, words, before = model.generation_config, model.generation_config.to_dict(), torch.get_rng_state()
    audits.audit(tmp_path / "whole", model, {"none": NoDraft()}, changes=SMALL)
    assert torch.equal(torch.get_rng_state(), before)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "law of sampled tokens":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audits.audit(tmp_path / "stopped", model, {"none": NoDraft()}, changes=SMALL, progress=stop)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.generation_config is kept
    assert kept.to_dict() == words
