"""Writing heads in the layouts that other programs read.

| | FasterDecoding, TGI | vLLM |
| --- | --- | --- |
| heads share the target's matrix | "version 2", without matrices | a copy of the matrix is written |
| reduced vocabulary | refused | `token_map` |
| blocks without bias | written with zeros | as they are |
| several blocks that differ | refused | as they are |
| tree | `medusa_choices.json` | left out: vLLM drafts a chain |
| rank rates, notes | left out | left out |
"""

from __future__ import annotations

import copy
import json
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.atomic import replace_file
from hf_specdec.errors import ArgumentError
from hf_specdec.heads.files import CONFIG, TREE
from hf_specdec.heads.layouts import parse
from hf_specdec.heads.medusa import MedusaHeads
from hf_specdec.heads.output import output_weight


class Layout(StrEnum):
    """Who reads it."""

    own = "own"
    fasterdecoding = "fasterdecoding"
    vllm = "vllm"


def export_heads(
    heads: MedusaHeads,
    folder: str | PathLike[str],
    layout: Layout | str,
    *,
    base: PreTrainedModel | None = None,
    own_output: bool = False,
    full_vocabulary: bool = False,
) -> list[str]:
    """Write heads in a layout.

    Args:
        heads: what to write; the object stays as it is.
        folder: new or empty.
        layout: `own`, `fasterdecoding` (which TGI reads too) or `vllm`.
        base: the target, for what must be copied from it.
        own_output: write a copy of the target's output matrix for each head that shares it; with
            `fasterdecoding` that is what programs older than "version 2" read.
        full_vocabulary: drop a reduced vocabulary, so that heads guess among all tokens, those included that they
            never met in training.

    Returns:
        Names of the files.

    Raises:
        ArgumentError: the folder holds something, the layout cannot express the heads, `base` is needed and missing or
            is not the model that the heads were made for.
    """
    if layout not in list(Layout):
        raise ArgumentError(f"layout={layout!r} must be own, fasterdecoding or vllm")
    layout = Layout(layout)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(f"{str(folder)!r} must be a new or empty folder")
    if base is not None:
        heads.check(base)
    if (own_output or full_vocabulary) and heads.own_output:
        raise ArgumentError(
            "own_output and full_vocabulary are for heads that share the target's matrix; these have their own"
        )
    if full_vocabulary and heads.token_map is None:
        raise ArgumentError("full_vocabulary plays no part: these heads guess among all tokens already")
    heads = copy.deepcopy(heads)
    if full_vocabulary:
        heads.token_map = None
    if own_output:
        heads.set_output(_needed(base, "to copy its output matrix"))
    if layout is Layout.own:
        heads.save_pretrained(folder)
    else:
        tensors, config = (_published if layout is Layout.fasterdecoding else _vllm)(heads, base)
        folder.mkdir(parents=True, exist_ok=True)
        name = "medusa_lm_head.safetensors" if layout is Layout.fasterdecoding else "model.safetensors"
        tensors = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        replace_file(folder / name, lambda path: save_file(tensors, path, {"format": "pt"}))
        _write_json(folder / CONFIG, config)
        if layout is Layout.fasterdecoding and heads.tree is not None:
            _write_json(folder / TREE, heads.tree)
    return sorted(path.name for path in folder.iterdir())


def _published(heads: MedusaHeads, base: PreTrainedModel | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    weights = parse(heads.state_dict(), heads.config)
    if weights.token_map is not None:
        raise ArgumentError(
            f"the layout of FasterDecoding has no place for a reduced vocabulary of {len(weights.token_map)} tokens; "
            "write vLLM's layout, or, for heads that share the target's matrix, drop it with full_vocabulary"
        )
    if any(not torch.equal(layers[0], layer) for layers in weights.blocks for layer in layers[1:]):
        raise ArgumentError(
            f"the layout of FasterDecoding cannot hold {heads.num_layers} different blocks: its code applies one "
            "block several times; write vLLM's layout"
        )
    tensors: dict[str, Tensor] = {}
    for head, layers in enumerate(weights.blocks):
        for layer, weight in enumerate(layers):
            bias = weight.new_zeros(len(weight)) if weights.biases is None else weights.biases[head][layer]
            tensors |= {f"{head}.{layer}.linear.weight": weight, f"{head}.{layer}.linear.bias": bias}
        if weights.outputs is not None:
            tensors[f"{head}.{len(layers)}.weight"] = weights.outputs[head]
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": heads.base_model,
    }
    return tensors, config if heads.own_output else config | {"version": "2"}


def _vllm(heads: MedusaHeads, base: PreTrainedModel | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    weights = parse(heads.state_dict(), heads.config)
    tensors: dict[str, Tensor] = {}
    for head, layers in enumerate(weights.blocks):
        for layer, weight in enumerate(layers):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = weight
            if weights.biases is not None:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = weights.biases[head][layer]
        if weights.outputs is not None:
            tensors[f"lm_heads.{head}.weight"] = weights.outputs[head]
    vocab_size = weights.vocab_size
    if weights.outputs is None:
        target = _needed(base, "since vLLM's layout brings a copy of the output matrix along")
        tensors["lm_head.weight"] = output_weight(target, weights.token_map).to(weights.blocks[0][0])
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if weights.token_map is not None:
        tensors["token_map"] = weights.token_map
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": heads.base_model,
        "dtype": str(weights.blocks[0][0].dtype).removeprefix("torch."),
        "hidden_size": heads.hidden_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "vocab_size": vocab_size,
        "truncated_vocab_size": vocab_size if weights.token_map is None else len(weights.token_map),
        "medusa_fc_bias": weights.biases is not None,
        "original_lm_head": weights.outputs is None,
    }
    return tensors, config


def _needed(base: PreTrainedModel | None, why: str) -> PreTrainedModel:
    if base is None:
        raise ArgumentError(f"base: the target is needed {why}")
    return base


def _write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))
