"""Does this model compute the same for a tree as for its paths? Asked once a model, before its first speculation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.compat import attention_implementation
from hf_specdec.errors import NonFiniteLogitsError, UnsupportedModelError
from hf_specdec.layers import with_layers
from hf_specdec.runner import TREE_ATTENTION, ModelRunner
from hf_specdec.split import SplitRunner
from hf_specdec.tree import DraftTree

_PREFIX_LENGTH = 4
_TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
_CHAIN_PARENTS = [-1, 0, 1, 2]
# Largest difference allowed, in standard deviations of the logits. Wrong positions or masks give 0.3 and more.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3}
_TOLERANCE_16_BIT = 0.25

_Key = tuple[object, str, torch.dtype, bool]
_passed: weakref.WeakKeyDictionary[PreTrainedModel, set[_Key]] = weakref.WeakKeyDictionary()


def check_tree_logits(model: PreTrainedModel) -> None:
    """Compare a tree's logits with those of its paths run alone; remembered for the model's attention and dtype.

    Raises:
        UnsupportedModelError: they differ, or the forward does not accept a tree at all.
    """
    _check(model, "whole", ("a tree", "its paths"), partial(_difference, model))


def check_layer_set(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """The same for the model with only some of its layers."""
    compared = (f"a tree under layers {list(layers)}", "its paths")
    _check(model, tuple(layers), compared, lambda: _difference(with_layers(model, layers)))


def check_split_logits(model: PreTrainedModel, exit_layer: int) -> None:
    """Compare logits of a chain whose first layers ran before the others with those of the whole model.

    Raises:
        UnsupportedModelError: they differ, or the layers do not run in two parts.
    """
    compared = (f"a chain whose first {exit_layer} layers run before the others", "all layers at once")
    _check(model, exit_layer, compared, partial(_split_difference, model, exit_layer))


def _check(model: PreTrainedModel, part: object, compared: tuple[str, str], measure: Callable[[], float]) -> None:
    key = (part, attention_implementation(model), model.dtype, model.training)
    if key in _passed.setdefault(model, set()):
        return
    try:
        difference = measure()
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not accept {compared[0]} of drafts ({type(error).__name__}: {error}); "
            "use stock generate for this model"
        ) from error
    if difference != difference:
        raise NonFiniteLogitsError(
            f"{type(model).__name__} computes NaN for ordinary tokens; look for broken weights or overflow in 16 bit"
        )
    if difference > _tolerance(model):
        cure = "call model.eval() first" if model.training else "use stock generate for this model"
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits for {compared[0]} than for {compared[1]} (difference "
            f"{difference:.2g} standard deviations), so drafts could not be verified exactly; {cure}"
        )
    _passed[model].add(key)


def _tolerance(model: PreTrainedModel) -> float:
    """Quantised layers compute in 16 bit whatever dtype the model states."""
    if "quantization_config" in vars(model.config):
        return _TOLERANCE_16_BIT
    return _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)


@torch.no_grad()
def _difference(model: PreTrainedModel) -> float:
    parents = _TREE_PARENTS if attention_implementation(model) in TREE_ATTENTION else _CHAIN_PARENTS
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = [(7 * i + 3) % vocab_size for i in range(_PREFIX_LENGTH + len(parents))]
    prefix, tree = tokens[:_PREFIX_LENGTH], DraftTree([tokens[_PREFIX_LENGTH:]], [parents])
    runner = ModelRunner(model, TreeCache(), 1, None, torch.zeros(1, dtype=torch.int64))
    runner.prefill(torch.tensor([prefix]))
    logits = runner.forward(tree.padded_tokens(), tree.padded_depths(), tree.ancestors()).logits[0].float()
    differences = [_path_difference(model, prefix, tree, path, logits) for path in _leaf_paths(tree)]
    return float(torch.tensor(differences).max())  # unlike python's max it passes NaN on


def _path_difference(
    model: PreTrainedModel, prefix: list[int], tree: DraftTree, path: list[int], logits: Tensor
) -> float:
    text = prefix + [tree.tokens[0][node] for node in path]
    alone = model(input_ids=torch.tensor([text], device=model.device), use_cache=False, return_dict=True).logits
    expected = alone[0, len(prefix) :].float()
    possible = expected != -torch.inf  # a draft may rule tokens out
    return float((logits[path] - expected)[possible].abs().max() / expected[possible].std())


def _leaf_paths(tree: DraftTree) -> list[list[int]]:
    paths = []
    for leaf in (node for node, children in enumerate(tree.children[0]) if not children):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, tree.parents[0][path[0]])
        paths.append(path)
    return paths


@torch.no_grad()
def _split_difference(model: PreTrainedModel, exit_layer: int) -> float:
    """Two rounds: the second stands on what the first left in the cache. Drafts fewer nodes than it verifies."""
    num_nodes, num_drafted, num_kept = len(_CHAIN_PARENTS), len(_CHAIN_PARENTS) - 1, 2
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    tokens = [(7 * i + 3) % vocab_size for i in range(_PREFIX_LENGTH + num_kept + num_nodes)]
    runner = SplitRunner(model, exit_layer, TreeCache(), 1, None, torch.zeros(1, dtype=torch.int64))
    runner.prefill(torch.tensor([tokens[:_PREFIX_LENGTH]]))
    differences = []
    for start in (_PREFIX_LENGTH, _PREFIX_LENGTH + num_kept):
        chain = DraftTree([tokens[start : start + num_nodes]], [_CHAIN_PARENTS])
        inputs = chain.padded_tokens(), chain.padded_depths(), chain.ancestors()
        tokens_of_chain, depths, ancestors = inputs
        for node in range(num_drafted):
            one = slice(node, node + 1)
            runner.draft(tokens_of_chain[:, one], depths[:, one], ancestors[:, one, : node + 1])
        lengths = [layer.length for layer in runner.view.cache.layers]
        if lengths != [start + num_drafted] * exit_layer + [start] * (len(lengths) - exit_layer):
            return torch.inf  # the parts are not what they should be
        logits = runner.forward(*inputs).logits[0].float()
        differences.append(_path_difference(model, tokens[:start], chain, list(range(num_nodes)), logits))
        runner.commit([range(num_kept)])
    return float(torch.tensor(differences).max())
