"""Does this model compute the same for a tree as for its paths? Asked once a model, before its first speculation."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.compat import attention_implementation
from hf_specdec.errors import NonFiniteLogitsError, UnsupportedModelError
from hf_specdec.runner import TREE_ATTENTION, ModelRunner
from hf_specdec.tree import DraftTree

_PREFIX_LENGTH = 4
_TREE_PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
_CHAIN_PARENTS = [-1, 0, 1, 2]
# Largest difference allowed, in standard deviations of the logits. Wrong positions or masks give 0.3 and more.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-3}
_TOLERANCE_16_BIT = 0.25

_passed: weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[str, torch.dtype, bool]]] = weakref.WeakKeyDictionary()


def check_tree_logits(model: PreTrainedModel) -> None:
    """Compare a tree's logits with those of its paths run alone; remembered for the model's attention and dtype.

    Raises:
        UnsupportedModelError: they differ, or the forward does not accept a tree at all.
    """
    key = (attention_implementation(model), model.dtype, model.training)
    if key in _passed.setdefault(model, set()):
        return
    try:
        difference = _difference(model)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not accept a tree of drafts ({type(error).__name__}: {error}); "
            "use stock generate for this model"
        ) from error
    if difference != difference:
        raise NonFiniteLogitsError(
            f"{type(model).__name__} computes NaN for ordinary tokens; look for broken weights or overflow in 16 bit"
        )
    if difference > _tolerance(model):
        cure = "call model.eval() first" if model.training else "use stock generate for this model"
        raise UnsupportedModelError(
            f"{type(model).__name__} computes other logits for a tree than for its paths (difference {difference:.2g} "
            f"standard deviations), so drafts could not be verified exactly; {cure}"
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
    return float((logits[path] - expected).abs().max() / expected.std())


def _leaf_paths(tree: DraftTree) -> list[list[int]]:
    paths = []
    for leaf in (node for node, children in enumerate(tree.children[0]) if not children):
        path = [leaf]
        while path[0] > 0:
            path.insert(0, tree.parents[0][path[0]])
        paths.append(path)
    return paths
