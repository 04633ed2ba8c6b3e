"""The layouts in which Medusa heads are published, and what they have in common.

| layout | tensors, for head h and layer l of L |
| --- | --- |
| own | `blocks.{h}.{l}.linear.{weight,bias}`, `outputs.{h}.weight`, `token_map` |
| FasterDecoding, TGI | `{h}.{l}.linear.{weight,bias}`, `{h}.{L}.weight`; in a whole model behind `medusa_head.` |
| vLLM | `blocks.{h}.layers.{l}.{weight,bias}`, `lm_heads.{h}.weight` or `lm_head.weight`, `token_map` |

In the second layout heads without output matrices are "version 2": they use the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hf_specdec.checks import is_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.heads.checks import checked_token_map

# What a tensor is: block weight (head, layer), block bias (head, layer), output (head, L or -1), shared or token_map.
_Role = tuple[str, int, int]
_SHARED: _Role = ("shared", 0, 0)
_TOKEN_MAP: _Role = ("token_map", 0, 0)
_NUM_DIMENSIONS = {"weight": 2, "bias": 1, "output": 2, "shared": 2, "token_map": 1}

_OWN = re.compile(r"(?P<kind>blocks)\.(?P<head>\d+)\.(?P<layer>\d+)\.linear\.(?P<part>weight|bias)")
_OWN_OUTPUT = re.compile(r"(?P<kind>outputs)\.(?P<head>\d+)\.weight")
_PUBLISHED = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<kind>linear\.)?(?P<part>weight|bias)")
_VLLM = re.compile(r"(?P<kind>blocks)\.(?P<head>\d+)\.layers\.(?P<layer>\d+)\.(?P<part>weight|bias)")
_VLLM_OUTPUT = re.compile(r"(?P<kind>lm_heads)\.(?P<head>\d+)\.weight")
_PREFIX = re.compile(r"medusa_heads?\.")


@dataclass(frozen=True)
class Weights:
    """Heads as tensors, in no layout.

    Args:
        blocks: weight `[H, H]` of each layer of each head.
        biases: `[H]` of each layer of each head, or None if there are none.
        outputs: `[D, H]` of each head, or None if heads use the target's output matrix.
        token_map: int64 `[D]`, or None for the whole vocabulary.
        vocab_size: V, or None if nothing says it.
        settings: further arguments of the heads.
    """

    blocks: list[list[Tensor]]
    biases: list[list[Tensor]] | None
    outputs: list[Tensor] | None
    token_map: Tensor | None
    vocab_size: int | None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.blocks[0][0].shape[0]

    def state(self) -> dict[str, Tensor]:
        """The same under the names of the own layout."""
        tensors = {}
        for head, layers in enumerate(self.blocks):
            for layer, weight in enumerate(layers):
                tensors[f"blocks.{head}.{layer}.linear.weight"] = weight
                if self.biases is not None:
                    tensors[f"blocks.{head}.{layer}.linear.bias"] = self.biases[head][layer]
        for head, weight in enumerate(self.outputs or ()):
            tensors[f"outputs.{head}.weight"] = weight
        return tensors if self.token_map is None else tensors | {"token_map": self.token_map}


def head_tensors(names: Iterable[str]) -> dict[str, str]:
    """Which tensors of a checkpoint belong to heads.

    Returns:
        Name in the file to name without prefix; empty if there are no heads.
    """
    names = list(names)
    prefixed = {name: name[match.end() :] for name in names if (match := _PREFIX.match(name))}
    if any(_PUBLISHED.fullmatch(name) or _VLLM.fullmatch(name) for name in prefixed.values()):
        # What stands beside them without the prefix is the target, except for what vLLM writes without it.
        beside = ("token_map", "lm_head.weight") if any(_VLLM.fullmatch(name) for name in prefixed.values()) else ()
        return prefixed | {name: name for name in names if name in beside or _VLLM_OUTPUT.fullmatch(name)}
    heads = (_PUBLISHED, _VLLM, _OWN)
    return {name: name for name in names} if any(form.fullmatch(name) for form in heads for name in names) else {}


def is_own(names: Iterable[str]) -> bool:
    """Whether tensors are those of the own layout."""
    return any(_OWN.fullmatch(name) for name in names)


def parse(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Weights:
    """Bring heads of any layout into one form.

    How many heads and layers there are is counted, since published configs are known to be wrong about it.

    Args:
        tensors: what `head_tensors` selects, without prefixes.
        config: what `config.json` says; empty if there is none.

    Raises:
        ArgumentError: tensors that belong to no layout, gaps, shapes that contradict each other or the config, or
            settings of a wrong type.
    """
    _check_config(config)
    roles = {_role(name): tensor for name, tensor in tensors.items()}
    if len(roles) < len(tensors):
        raise ArgumentError("the heads hold the same tensor under two names")
    for name, tensor in tensors.items():
        expected = _NUM_DIMENSIONS[_role(name)[0]]
        if tensor.ndim != expected:
            raise ArgumentError(
                f"the tensor {name!r} of heads must have {expected} dimensions, but its shape is "
                f"{list(tensor.shape)}: the file is damaged, or holds something else"
            )
    if config.get("original_lm_head"):
        # vLLM: heads use the target's matrix, of which the file brings a copy under one of two names.
        shared = roles.get(_SHARED, roles.get(("output", 0, -1)))
        roles = {role: tensor for role, tensor in roles.items() if role[0] not in ("shared", "output")}
        roles |= {} if shared is None else {_SHARED: shared}
    floating = {role: tensor for role, tensor in roles.items() if role[0] != "token_map"}
    if odd := next((tensor.dtype for tensor in floating.values() if not tensor.is_floating_point()), None):
        raise ArgumentError(f"the heads hold tensors of {odd}; quantised heads cannot be read")
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in floating.values()))
    roles |= {role: tensor.to(dtype) for role, tensor in floating.items()}

    blocks = _layers(roles, "weight")
    hidden_size = blocks[0][0].shape[0]
    _same_shape("block weights", (weight for layers in blocks for weight in layers), (hidden_size, hidden_size))
    biases = None
    if any(kind == "bias" for kind, _, _ in roles):
        biases = _layers(roles, "bias")
        if [len(layers) for layers in biases] != [len(layers) for layers in blocks]:
            raise ArgumentError("the heads hold biases for some blocks and none for others")
        _same_shape("biases", (bias for layers in biases for bias in layers), (hidden_size,))
    outputs = _outputs(roles, len(blocks))
    rows = None if not outputs else outputs[0].shape[0]
    if rows is not None and outputs is not None:
        _same_shape("output matrices", outputs, (rows, hidden_size))
    if _SHARED in roles:
        rows = roles[_SHARED].shape[0]
    vocab_size, token_map = _vocabulary(roles, config, rows)
    if outputs is not None and token_map is not None and rows != len(token_map):
        outputs = [weight[token_map] for weight in outputs]
    if config.get("hidden_size") not in (None, hidden_size):
        raise ArgumentError(f"config.json says hidden_size={config['hidden_size']}, but weights have {hidden_size}")
    return Weights(blocks, biases, outputs, token_map, vocab_size)


def _check_config(config: Mapping[str, Any]) -> None:
    """Refuse settings of a wrong type, which would else be compared in vain with what the weights say."""
    for name in ("hidden_size", "vocab_size", "draft_vocab_size", "truncated_vocab_size"):
        size = config.get(name)
        if size is not None and (not is_whole(size) or size < 1):
            raise ArgumentError(
                f"config.json says {name}={size!r}, which must be a whole number of at least 1; correct or remove it"
            )
    if config.get("original_lm_head") not in (None, True, False):
        raise ArgumentError(
            f"config.json says original_lm_head={config['original_lm_head']!r}, which must be true or false; "
            "correct or remove it"
        )


def _role(name: str) -> _Role:
    if match := _OWN.fullmatch(name) or _VLLM.fullmatch(name):
        return match["part"], int(match["head"]), int(match["layer"])
    if match := _OWN_OUTPUT.fullmatch(name) or _VLLM_OUTPUT.fullmatch(name):
        return "output", int(match["head"]), -1
    if (match := _PUBLISHED.fullmatch(name)) and (match["kind"] or match["part"] == "weight"):
        return match["part"] if match["kind"] else "output", int(match["head"]), int(match["layer"])
    if name == "lm_head.weight":
        return _SHARED
    if name == "token_map":
        return _TOKEN_MAP
    raise ArgumentError(f"the heads hold a tensor {name!r} that no known layout of Medusa heads has")


def _layers(roles: Mapping[_Role, Tensor], part: str) -> list[list[Tensor]]:
    """Weights or biases of each layer of each head."""
    num_heads = 1 + max((head for _, head, _ in roles), default=0)
    heads = []
    for head in range(num_heads):
        layers = {layer: tensor for (kind, owner, layer), tensor in roles.items() if (kind, owner) == (part, head)}
        end = next((layer for kind, owner, layer in roles if (kind, owner) == ("output", head)), -1)
        if len(layers) == 1 < end:
            # The published code repeats one block, and safetensors files of it keep that block once.
            (only,) = layers.values()
            layers = {layer: only.clone() for layer in range(end)}
        if sorted(layers) != list(range(len(layers))) or not layers or end not in (-1, len(layers)):
            raise ArgumentError(
                f"head {head} of {num_heads} has a {part} for the layers {sorted(layers)}"
                + (f" and its output matrix at {end}" if end >= 0 else "")
                + ": the file is incomplete"
            )
        heads.append([layers[layer] for layer in range(len(layers))])
    if len({len(layers) for layers in heads}) > 1:
        raise ArgumentError(f"heads have different numbers of layers: {[len(layers) for layers in heads]}")
    return heads


def _outputs(roles: Mapping[_Role, Tensor], num_heads: int) -> list[Tensor] | None:
    """The output matrix of each head, or None if all use the target's."""
    outputs = {head: tensor for (kind, head, _), tensor in roles.items() if kind == "output"}
    if not outputs:
        return None
    if _SHARED in roles or sorted(outputs) != list(range(num_heads)):
        raise ArgumentError(
            f"there are {num_heads} heads, but output matrices for the heads {sorted(outputs)}"
            + (" and one for all" if _SHARED in roles else "")
        )
    return [outputs[head] for head in range(num_heads)]


def _vocabulary(
    roles: Mapping[_Role, Tensor], config: Mapping[str, Any], rows: int | None
) -> tuple[int | None, Tensor | None]:
    """V and the token map."""
    token_map = roles.get(_TOKEN_MAP)
    vocab_size = config.get("vocab_size")
    promised = config.get("draft_vocab_size", config.get("truncated_vocab_size"))
    held = vocab_size if token_map is None else len(token_map)
    if promised not in (None, held, vocab_size):
        held_by = "token_map has" if token_map is not None else "there is no token_map, and the vocabulary has"
        raise ArgumentError(f"config.json promises a reduced vocabulary of {promised} tokens, but {held_by} {held}")
    if token_map is not None and vocab_size is not None and config.get("truncated_vocab_size") == vocab_size:
        token_map = None  # vLLM ignores it then
    if token_map is None:
        if rows is not None and vocab_size not in (None, rows):
            raise ArgumentError(f"config.json says vocab_size={vocab_size}, but output matrices have {rows} rows")
        return rows if vocab_size is None else vocab_size, None
    size = len(token_map)
    if rows not in (None, size, vocab_size) and vocab_size is not None:
        raise ArgumentError(f"output matrices have {rows} rows, neither {size} as token_map nor {vocab_size}")
    vocab_size = (None if rows == size else rows) if vocab_size is None else vocab_size
    if vocab_size is None:
        raise ArgumentError("token_map needs a config.json that says the vocab_size it is a part of")
    return vocab_size, checked_token_map(token_map, vocab_size)


def _same_shape(what: str, tensors: Iterable[Tensor], shape: tuple[int, ...]) -> None:
    for tensor in tensors:
        if tuple(tensor.shape) != shape:
            raise ArgumentError(f"{what} of heads must all be {list(shape)}, but one is {list(tensor.shape)}")
