"""What the package brings along for the demo model: small enough, documented, and of use."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_specdec
from hf_specdec.demo_model import (
    DemoModelMissingError,
    load_demo_draft,
    load_demo_heads,
    load_demo_model,
    shipped_folder,
)

MEGABYTE = 1_000_000
PROMPT = "What are the most important things to know about bees?"


@pytest.mark.parametrize(("name", "limit"), [("heads", 10 * MEGABYTE), ("draft", 30 * MEGABYTE)])
def test_size_and_card(name: str, limit: int) -> None:
    files = [path for path in shipped_folder(name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= limit
    assert {path.suffix for path in files} <= {".json", ".md", ".png", ".safetensors"}
    card = (shipped_folder(name) / "README.md").read_text(encoding="utf-8")
    for word in ("HuggingFaceTB/SmolLM2-135M-Instruct", "hf-specdec", "answers", "curves.png"):
        assert word in card
    assert "/root" not in card
    assert "/tmp" not in card


def test_heads_know_their_tree_and_how_often_they_are_right() -> None:
    heads = load_demo_heads()
    assert heads.num_heads == 4
    assert heads.rank_rates is not None
    assert heads.rank_rates[0][0] > 0.3
    assert heads.tree is not None
    assert len(heads.tree) == 24


@pytest.fixture(scope="module")
def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        return load_demo_model(torch.float32)
    except DemoModelMissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["medusa", "auto", "assisted", "tree"])
def test_the_real_model_says_the_same_in_fewer_forwards(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], strategy: str
) -> None:
    model, tokenizer = demo
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    arguments = {**inputs, "do_sample": False, "max_new_tokens": 32}
    plain = model.generate(**arguments)
    helper = (
        {"heads": load_demo_heads()} if strategy in ("medusa", "auto") else {"assistant_model": load_demo_draft(model)}
    )
    fast = hf_specdec.generate(model, **arguments, **helper, strategy=strategy, return_dict_in_generate=True)
    assert torch.equal(fast.sequences, plain)
    assert fast.speculation.tokens_per_forward > 1.2
