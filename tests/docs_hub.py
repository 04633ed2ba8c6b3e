"""Tiny random models under the names that the documentation uses.

`from_pretrained` takes an existing folder before it asks the hub. So with a folder `owner/name` in the working
directory the pages' code runs as printed, in seconds and without a network.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN_SIZE = 64
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>"]
TARGET = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
DRAFT = "HuggingFaceTB/SmolLM2-135M-Instruct"
HEADS_TARGET = "lmsys/vicuna-7b-v1.3"
HEADS = "FasterDecoding/medusa-vicuna-7b-v1.3"


def build_hub(folder: Path) -> None:
    """Write the models and their tokenizer below `folder`."""
    tokenizer = byte_tokenizer()
    for name, disagreement in ((TARGET, 0.0), (DRAFT, 0.005), (HEADS_TARGET, 0.0)):
        tiny_llama(tokenizer, disagreement).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    published_heads(folder / HEADS, len(tokenizer))


def published_heads(folder: Path, vocab_size: int) -> None:
    """Untrained Medusa heads in the layout, and with the wrong count in the config, of the published ones."""
    tensors = {}
    for head in range(5):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN_SIZE)
        tensors[f"{head}.1.weight"] = torch.randn(vocab_size, HIDDEN_SIZE)
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": HEADS_TARGET}
    (folder / "config.json").write_text(json.dumps(config))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so every text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_llama(tokenizer: PreTrainedTokenizerFast, disagreement: float) -> LlamaForCausalLM:
    """A random float32 Llama; wide initial weights, so that its choices are not near-ties.

    Args:
        tokenizer: gives vocabulary and end of text.
        disagreement: standard deviation of noise on the weights; a little makes a draft that is often right.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += disagreement * torch.randn_like(parameter)
    return model
