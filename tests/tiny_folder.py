"""A tiny model and its tokenizer in a folder, for everything that loads by path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = (
    "the a boat harbour gull sun sea wind sail leaves returns follows sleeps wakes and then at noon night .".split()
)
SPECIAL = ["<pad>", "<eos>", "<user>", "<model>", "<unk>"]


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words as tokens, with a chat template."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<model>"],
        chat_template=(
            "{% for message in messages %}<user> {{ message['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}<model>{% endif %}"
        ),
    )


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A random two-layer Llama and its tokenizer, saved."""
    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    # A random model ends its text anywhere; with a logit of 0 the end token is never the likeliest.
    model.lm_head.weight.data[1] = 0
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
