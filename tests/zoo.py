"""Tiny random models of many families: two layers, 97 tokens, made from a seed, the same in every run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hf_specdec.heads import MedusaHeads

VOCAB_SIZE = 97
WINDOW = 6
POSITIONS = 128
# Wide enough that the most likely token is not the same everywhere.
SPREAD = 0.2

_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
    **_IDS,
}
_NO_GROUPS = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "initializer_range": SPREAD,
    **_IDS,
}

_GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Family:
    """How to make a model: the class name in front of `Config` and `ForCausalLM`, and the config's settings."""

    prefix: str
    settings: dict[str, Any]
    model_class: str = ""

    def make(self, seed: int, attention: str, **changes: Any) -> PreTrainedModel:
        config_class: Callable[..., Any] = getattr(transformers, f"{self.prefix}Config")
        config = config_class(**(self.settings | changes), attn_implementation=attention)
        model_class = getattr(transformers, self.model_class or f"{self.prefix}ForCausalLM")
        torch.manual_seed(seed)
        return model_class(config).eval()


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", _LLAMA),
    "qwen2": Family("Qwen2", _LLAMA),
    "qwen2-mixed": Family(
        "Qwen2", _LLAMA | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Family("Qwen3", _LLAMA | {"head_dim": 8}),
    "mistral": Family("Mistral", _LLAMA | {"sliding_window": WINDOW}),
    # Untied: a tied random Gemma repeats its input for ever.
    "gemma2": Family("Gemma2", _LLAMA | _GEMMA),
    "gemma3": Family(
        "Gemma3Text",
        _LLAMA
        | _GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "Gemma3ForCausalLM",
    ),
    "phi": Family("Phi", _LLAMA),
    "phi3": Family("Phi3", _LLAMA),
    "gpt2": Family("GPT2", _GPT2, "GPT2LMHeadModel"),
    "gpt-neox": Family("GPTNeoX", _NO_GROUPS),
    "gpt-j": Family("GPTJ", _GPT2 | {"rotary_dim": 8}),
    "opt": Family(
        "OPT",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": POSITIONS,
            "word_embed_proj_dim": 32,
            "init_std": SPREAD,
            **_IDS,
        },
    ),
    "falcon": Family("Falcon", _NO_GROUPS | {"alibi": False, "new_decoder_architecture": False}),
    "stablelm": Family("StableLm", _LLAMA),
    "mixtral": Family("Mixtral", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": Family(
        "GptOss",
        _LLAMA
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "smollm3": Family("SmolLM3", _LLAMA | {"tie_word_embeddings": False}),
    "granite": Family("Granite", _LLAMA),
    "cohere": Family("Cohere", _LLAMA),
    "olmo2": Family("Olmo2", _LLAMA),
    "deepseek-v3": Family(
        "DeepseekV3",
        _LLAMA
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}

UNSUPPORTED: dict[str, Family] = {
    "bloom": Family("Bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_IDS}),
    "mpt": Family(
        "Mpt", {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": POSITIONS, **_IDS}
    ),
    "falcon-alibi": Family("Falcon", _NO_GROUPS | {"alibi": True}),
    "mamba": Family("Mamba", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, **_IDS}),
    "qwen3-next": Family(
        "Qwen3Next",
        _LLAMA
        | {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": Family("Lfm2", _LLAMA | {"layer_types": ["conv", "full_attention"]}),
    "t5": Family(
        "T5",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        "T5ForConditionalGeneration",
    ),
}

GPT_NEO = Family(
    "GPTNeo",
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "num_heads": 4,
        "window_size": WINDOW,
        "max_position_embeddings": POSITIONS,
        "initializer_range": SPREAD,
        **_IDS,
    },
)


_EAGER_ONLY = {"gemma2", "gpt-oss"}
VARIANTS = [
    (family, attention)
    for family in FAMILIES
    for attention in (["eager"] if family in _EAGER_ONLY else ["eager", "sdpa"])
]
"""Every family with every attention that it has."""


def make(name: str, seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A model of a family in float32; `changes` go into its config."""
    return (FAMILIES | UNSUPPORTED | {"gpt-neo": GPT_NEO})[name].make(seed, attention, **changes)


def make_draft(target: PreTrainedModel, noise: float = 0.02) -> PreTrainedModel:
    """A draft that often agrees with the target and is never equal to it: the same weights, disturbed.

    Its confidence threshold is 0, so that chains are as long as they are asked to be.
    """
    config = copy.deepcopy(target.config)
    config._attn_implementation = target.config._attn_implementation
    draft = type(target)(config).eval()
    draft.load_state_dict(target.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    draft.generation_config.assistant_confidence_threshold = 0
    return draft


def make_heads(target: PreTrainedModel, num_heads: int = 3, **settings: Any) -> MedusaHeads:
    """Heads that were trained for nothing: their guesses differ, and are right now and then."""
    heads = MedusaHeads.for_target(target, num_heads=num_heads, **settings)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in heads.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    return heads
