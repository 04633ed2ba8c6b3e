"""Quantised models run as they are: the same text as the quantised model's own stock `generate`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedModel

import texts
import zoo
from hf_specdec import Tree, generate
from strategies import STRATEGIES

pytest.importorskip("bitsandbytes")
pytestmark = [
    # What bitsandbytes and transformers say about kernels and casts on a CPU is no business of these tests.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.platform == "darwin", reason="bitsandbytes quantises on Linux and Windows"),
]
QUANTISATIONS = {
    # With outliers (the default threshold) a row's numbers depend on the other rows of its forward, in any batch of
    # stock generate too; then no text is reproducible to the token.
    "8-bit": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "4-bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
}
# Long enough that each text repeats a token with something left to guess, so prompt lookup drafts too.
NEW_TOKENS = 24
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    zoo.make("llama", **SIZES).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=QUANTISATIONS)
def quantised(request: pytest.FixtureRequest, folder: Path) -> PreTrainedModel:
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=QUANTISATIONS[request.param], dtype=torch.float32, device_map="cpu"
    )
    assert "torch.nn" not in type(model.model.layers[0].mlp.up_proj).__module__
    return model.eval()


@pytest.mark.parametrize("strategy", ["prompt_lookup", "tree", "scripted", "medusa", "medusa_tree"])
def test_a_quantised_target(quantised: PreTrainedModel, strategy: str) -> None:
    draft = zoo.make("llama", **SIZES)
    for batch in (texts.padded([9]), texts.padded([7, 12])):
        expected = texts.greedy(quantised, **batch, max_new_tokens=NEW_TOKENS)

        arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected))
        output = generate(
            quantised,
            **batch,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=texts.PAD,
            return_dict_in_generate=True,
            **arguments,
        )

        assert output.sequences.tolist() == expected.tolist()
        assert output.speculation.drafted > 0


def test_a_quantised_draft(quantised: PreTrainedModel) -> None:
    """The quantised target as draft of the full one: close, so much is accepted."""
    target = zoo.make("llama", **SIZES)
    batch = texts.inputs(texts.prompt(9))
    expected = texts.greedy(target, **batch, max_new_tokens=16)
    texts.greedy(quantised, **batch, max_new_tokens=2)  # bitsandbytes packs its weights at first use
    before = {name: weight.clone() for name, weight in quantised.named_parameters()}

    output = generate(
        target,
        **batch,
        max_new_tokens=16,
        do_sample=False,
        strategy=Tree(min_gain=0.0, min_score=0.0),
        assistant_model=quantised,
        return_dict_in_generate=True,
    )

    assert output.sequences.tolist() == expected.tolist()
    assert output.speculation.tokens_per_forward > 1.5
    after = dict(quantised.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
