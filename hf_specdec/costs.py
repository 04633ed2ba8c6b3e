"""What one more node in a forward costs on this machine: the number that says how large a tree may be."""

from __future__ import annotations

import threading
import time
import weakref
from math import ceil, inf, log2

import torch
from transformers import PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.compat import attention_implementation, num_positions
from hf_specdec.runner import ModelRunner
from hf_specdec.tree import DraftTree, chain_parents

_CONTEXT = 64  # tokens
_EXTRA_NODES = 32
_PAIRS = 8  # of measurements; a slow model gets fewer, as many as fit in the time
_ENOUGH_SECONDS = 1.0
_SMALLEST = 2.0**-10

_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[torch.device, torch.dtype, str], float]] = (
    weakref.WeakKeyDictionary()
)


def node_cost(model: PreTrainedModel) -> float:
    """The time of one more node in a forward, as a share of the time of a forward of one node.

    Measured once for a model on its device, with a few forwards of a short text; later calls remember it. About 0.001
    where a forward only reads weights (a large model on a GPU), 0.02 to 0.1 where it computes (a CPU). Rounded up to
    a power of two, so that it is the same, and with it the drafts, in nearly every process of a machine.

    Returns:
        At least 2**-10, at most 1.
    """
    key = (model.device, model.dtype, attention_implementation(model))
    with _lock:  # one at a time: two measurements would disturb each other
        costs = _known.setdefault(model, {})
        if key not in costs:
            costs[key] = _rounded(_measure(model))
        return costs[key]


def _rounded(share: float) -> float:
    return 2.0 ** ceil(log2(min(max(share, _SMALLEST), 1.0)))


@torch.no_grad()
def _measure(model: PreTrainedModel) -> float:
    positions = num_positions(model) or _CONTEXT
    context = max(min(_CONTEXT, positions // 2), 1)
    runner = ModelRunner(model, TreeCache(), 1, None, torch.zeros(1, dtype=torch.int64), positions - 1)
    runner.prefill(torch.zeros(1, context, dtype=torch.int64))
    one, many = inf, inf
    start = time.perf_counter()
    for pair in range(_PAIRS):  # in turns, so that a busy moment of the machine slows both
        if pair >= 2 and time.perf_counter() - start > _ENOUGH_SECONDS:
            break
        one = min(one, _seconds(runner, 1))
        many = min(many, _seconds(runner, 1 + _EXTRA_NODES))
    return (many - one) / one / _EXTRA_NODES


def _seconds(runner: ModelRunner, width: int) -> float:
    tree = DraftTree([[0] * width], [chain_parents(width)])
    tokens, depths, ancestors = tree.padded_tokens(), tree.padded_depths(), tree.ancestors()
    start = time.perf_counter()
    logits = runner.forward(tokens, depths, ancestors).logits
    float(logits[0, 0, 0])  # waits for the device
    seconds = time.perf_counter() - start
    runner.view.drop_tail()
    return seconds
