"""Heads on a target whose output matrix is itself quantised."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM, PreTrainedModel

import zoo
from hf_specdec import MedusaHeads, UnsupportedModelError

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # kernels and casts on a CPU
    pytest.mark.skipif(sys.platform == "darwin", reason="bitsandbytes quantises on Linux and Windows"),
]
# By default transformers leaves the output matrix as it is.
QUANTISATIONS = {
    "8-bit": BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["none"], llm_int8_threshold=0.0),
    "4-bit": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["none"]),
}


@pytest.fixture(scope="module", params=QUANTISATIONS)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder: Path = tmp_path_factory.mktemp("llama")
    zoo.make("llama", hidden_size=64, vocab_size=128).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=QUANTISATIONS[request.param], dtype=torch.float32, device_map="cpu"
    )
    assert "bitsandbytes" in type(model.lm_head).__module__
    return model.eval()


@pytest.mark.parametrize("token_map", [None, torch.tensor([100, 3, 5])])
def test_the_module_computes(quantised: PreTrainedModel, token_map: torch.Tensor | None) -> None:
    heads = MedusaHeads.for_target(quantised, num_heads=2, token_map=token_map)
    heads.check(quantised)
    hidden = torch.randn(3, 64, dtype=quantised.dtype)
    with torch.no_grad():
        expected = quantised.lm_head(hidden.expand(2, 3, 64))  # untrained heads pass their input on
        logits = heads.placed(quantised).logits(hidden, heads.output_of(quantised))
    assert torch.equal(logits, expected if token_map is None else expected[..., token_map])


def test_its_matrix_cannot_be_copied(quantised: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="quantised, adapted or offloaded"):
        MedusaHeads.for_target(quantised, own_output=True)
