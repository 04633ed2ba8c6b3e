"""Checkpoints written by hand, tensor by tensor, and what the published code would make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

HIDDEN = 32  # that of the tiny Llama
VOCAB = 97


class Numbers:
    """Tensors from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=self._generator)


def hidden_states() -> Tensor:
    return Numbers(99)(5, HIDDEN)


def write(folder: Path, name: str, tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Path:
    """A checkpoint in one file, pickled unless its name says safetensors, and its config."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, shards: list[dict[str, Tensor]], config: dict[str, Any]) -> Path:
    """A checkpoint in several safetensors files with an index."""
    weight_map = {}
    for index, tensors in enumerate(shards):
        name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        write(folder, name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fasterdecoding(num_heads: int, output: bool = True, layers: int = 1) -> dict[str, Tensor]:
    """`medusa_head.state_dict()` of the published training code, blocks as different as a reader must allow."""
    numbers = Numbers(1)
    tensors = {}
    for head in range(num_heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = numbers(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = numbers(HIDDEN)
        if output:
            tensors[f"{head}.{layers}.weight"] = numbers(VOCAB, HIDDEN)
    return tensors


def fasterdecoding_logits(tensors: dict[str, Tensor], num_heads: int, layers: int, shared: Tensor | None) -> Tensor:
    """x + SiLU(Wx + b) for each layer, then the head's matrix or the target's."""
    heads = []
    for head in range(num_heads):
        x = hidden_states()
        for layer in range(layers):
            x = x + silu(linear(x, tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]))
        heads.append(linear(x, tensors[f"{head}.{layers}.weight"] if shared is None else shared))
    return torch.stack(heads)


def vllm(num_heads: int, layers: int = 1, bias: bool = False, rows: int = VOCAB) -> dict[str, Tensor]:
    """vLLM's Medusa with a matrix for each head."""
    numbers = Numbers(2)
    tensors = {}
    for head in range(num_heads):
        for layer in range(layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = numbers(HIDDEN, HIDDEN)
            if bias:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = numbers(HIDDEN)
        tensors[f"lm_heads.{head}.weight"] = numbers(rows, HIDDEN)
    return tensors


def vllm_config(num_heads: int, layers: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": layers,
    } | changes


def vllm_logits(tensors: dict[str, Tensor], num_heads: int, layers: int, token_map: Tensor | None = None) -> Tensor:
    """vLLM's forward; with a token map, rows of larger matrices are picked by it when they are loaded."""
    heads = []
    for head in range(num_heads):
        x = hidden_states()
        for layer in range(layers):
            bias = tensors.get(f"blocks.{head}.layers.{layer}.bias")
            x = x + silu(linear(x, tensors[f"blocks.{head}.layers.{layer}.weight"], bias))
        weight = tensors["lm_head.weight"] if "lm_head.weight" in tensors else tensors[f"lm_heads.{head}.weight"]
        if token_map is not None and len(weight) > len(token_map):
            weight = weight[token_map]
        heads.append(linear(x, weight))
    return torch.stack(heads)
