"""What a chain of guesses brings, and how long it should be (Leviathan et al. 2023, sections 3.3 and 3.5)."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel

from hf_specdec.costs import node_cost
from hf_specdec.layers import layers_cost


def guess_cost(target: PreTrainedModel, kept: Collection[int], num_rows: int = 1) -> float:
    """Time of one guess in each row over the time of a forward of the target with one node a row.

    A part of the target's layers drafts it, which is counted in weights, and the target verifies one more node in each
    row, which is measured.

    Args:
        target: the model.
        kept: indices of the layers that draft.
        num_rows: rows of the batch.
    """
    node = node_cost(target)
    return layers_cost(target, kept) + node * num_rows / (1 + node * (num_rows - 1))


def speedup(acceptance: float, cost: float, length: int) -> float:
    """Expected tokens a round over the time of a round, with plain decoding as 1.

    Args:
        acceptance: probability that a guess is right if those before it are.
        cost: time of one guess over the time of one forward of the target.
        length: guesses a round.
    """
    tokens = sum(acceptance**depth for depth in range(length + 1))
    return tokens / (1 + cost * length)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The length of the chain, from 0 to `longest`, that promises most; the shortest of equals."""
    return max(range(longest + 1), key=lambda length: (speedup(acceptance, cost, length), -length))
