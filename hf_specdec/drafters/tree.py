"""A draft model that guesses a tree, grown where the draft is surest.

After EAGLE-2 (Li et al. 2024) and OPT-Tree (Wang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Self

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.settings import draft_setting, require_whole
from hf_specdec.drafters.trust import Trust
from hf_specdec.errors import ArgumentError
from hf_specdec.sampling import Children
from hf_specdec.tree import DraftTree

_DEFAULT_DEPTH = 5


@dataclass
class Tree(Drafter):
    """Strategy "tree": `assistant_model` drafts a token tree, verified under tree attention.

    Level by level the draft runs the likeliest nodes and each gets `branching` children; a node's score is the product
    of the probabilities along its path, each corrected by how far the draft could be believed so far. With keyed noise
    or greedy decoding the `nodes` best of all grown nodes are kept. With rejection sampling the children are drawn at
    random and all are kept, since dropping some for their value would change the law.

    If the call gives `assistant_confidence_threshold`, guesses that the draft is less sure of get no children.

    A draft that keeps being wrong is run in few rounds only, so the text comes about as fast as without it.

    Args:
        nodes: number of guesses a round.
        depth: number of levels, unless the call gives `num_assistant_tokens`; by default that of the draft's config,
            else 5.
        branching: children of a node.
        width: nodes that the draft runs at each level.
        min_gain: run the draft only while that promises at least so many more accepted tokens; about the draft's time
            over the target's.
        min_score: drop guesses less likely than this; about the time of one more row in the target's forward.
    """

    nodes: int = 24
    depth: int | None = None
    branching: int = 4
    width: int = 4
    min_gain: float = 0.3
    min_score: float = 0.02

    name = "tree"
    needs_draft_model = True
    settings = frozenset({"num_assistant_tokens", "assistant_confidence_threshold"})

    _draft: DraftModel = field(init=False, repr=False, compare=False)
    _levels: int = field(init=False, repr=False, compare=False)
    _threshold: float = field(init=False, repr=False, compare=False)
    _trust: Trust = field(init=False, repr=False, compare=False)
    _grown: list[_Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, "nodes", "branching", "width", *(["depth"] if self.depth is not None else []))
        for setting, highest in (("min_gain", inf), ("min_score", 1.0)):
            value = getattr(self, setting)
            if not isinstance(value, int | float) or not 0 <= value <= highest:
                raise ArgumentError(f"Tree({setting}={value!r}) must be a number from 0 to {highest}")

    def begin(self, context: DraftContext) -> Self:
        """Let the draft read the prompt."""
        drafter = super().begin(context)
        assert context.draft_model is not None
        drafter._levels = self._choose_depth(context)
        drafter._draft = DraftModel(context.draft_model, context)
        drafter._trust = Trust()
        drafter._threshold = (
            context.config.assistant_confidence_threshold
            if "assistant_confidence_threshold" in context.explicit
            else 0.0
        )
        drafter._grown = [_Row(pending, 0) for pending in context.pending_tokens]
        return drafter

    def _choose_depth(self, context: DraftContext) -> int:
        """The call's `num_assistant_tokens`, else this object's depth, else the draft's own setting, else 5."""
        if "num_assistant_tokens" in context.explicit or self.depth is None:
            assert context.draft_model is not None
            own = context.draft_model.generation_config.num_assistant_tokens
            given = own is not None or "num_assistant_tokens" in context.explicit
            return int(draft_setting(context, "num_assistant_tokens")) if given else _DEFAULT_DEPTH
        return self.depth

    def propose(self, context: DraftContext) -> DraftTree:
        """Grow all rows level by level."""
        sampled = context.sampling.fresh is not None
        plan = _Plan(
            self.nodes, self.branching, self.width, self.min_gain, self._threshold, self._trust.value, sampled
        )
        rows = [
            _Row(pending, min(budget, self._levels))
            for pending, budget in zip(context.pending_tokens, self._draft.budgets(context), strict=True)
        ]
        self._grown = rows
        growing = [row for row, tree in enumerate(rows) if tree.limit > 0]
        if not growing or self._trust.value < self.min_gain:
            return DraftTree.roots(context.pending_tokens)
        scores = self._draft.catch_up(context.texts)
        self._add_children(context, rows, plan, [(row, 0) for row in growing], scores[growing])
        tail = 0
        for depth in range(1, self._levels):
            expanded = [tree.choose_expanded(depth, plan) for tree in rows]
            parents = [(row, node) for row, nodes in enumerate(expanded) for node in nodes]
            if not parents:
                break
            tokens, ancestors = _level_inputs(rows, expanded, tail)
            tail = ancestors.shape[-1]
            level = self._draft.grow(tokens, depth, ancestors)
            picked = torch.cat([level[row, : len(nodes)] for row, nodes in enumerate(expanded)])
            self._add_children(context, rows, plan, parents, picked)
        self._grown = rows if sampled else [tree.best(self.nodes, self.min_score) for tree in rows]
        probs = [tree.probs for tree in self._grown] if sampled else None
        return DraftTree([tree.tokens for tree in self._grown], [tree.parents for tree in self._grown], probs)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Keep the accepted nodes that the draft ran, and learn how far to believe it."""
        promised = sum(row.promised for row in self._grown) / len(self._grown)
        self._trust.observe(promised, sum(len(path) > 1 for path in accepted) / len(self._grown))
        self._draft.keep(
            [
                [slot for node in path if (slot := row.slots[node]) is not None]
                for row, path in zip(self._grown, accepted, strict=True)
            ]
        )

    def _add_children(
        self, context: DraftContext, rows: list[_Row], plan: _Plan, parents: list[tuple[int, int]], scores: Tensor
    ) -> None:
        steps = [context.num_generated[row] + rows[row].depths[node] for row, node in parents]
        counts = [rows[row].num_children(plan) for row, _ in parents]
        drawn = context.sampling.draw_children([row for row, _ in parents], steps, scores, counts)
        for (row, node), children in zip(parents, drawn, strict=True):
            rows[row].add(node, children, plan)


@dataclass(frozen=True)
class _Plan:
    """The settings that shape a tree."""

    nodes: int
    branching: int
    width: int
    min_gain: float
    threshold: float
    trust: float
    sampled: bool


class _Row:
    """One row's tree while it grows. Slots are positions in the draft's uncommitted tail (None: not run)."""

    def __init__(self, pending: int, limit: int) -> None:
        self.limit = limit
        self.tokens, self.parents, self.depths = [pending], [-1], [0]
        self.scores = [1.0]
        self.confidences = [1.0]
        self.slots: list[int | None] = [None]
        self.probs: dict[int, Tensor] = {}
        self.promised = 0.0

    def num_children(self, plan: _Plan) -> int:
        """How many children the next expanded node gets; sampled trees keep all, so the budget caps the draw."""
        return min(plan.branching, plan.nodes + 1 - len(self.tokens)) if plan.sampled else plan.branching

    def add(self, parent: int, children: Children, plan: _Plan) -> None:
        if children.probs is not None:
            self.probs[parent] = children.probs
        weights = children.confidences if plan.sampled else children.weights
        if parent == 0:
            self.promised = sum(weights)
        self.confidences.extend(children.confidences)
        for token, weight in zip(children.tokens, weights, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.scores.append(self.scores[parent] * weight * plan.trust)
            self.slots.append(None)

    def choose_expanded(self, depth: int, plan: _Plan) -> list[int]:
        """The likeliest nodes of a level, if running them is worth while. Looks at drawn tokens only."""
        if depth >= self.limit:
            return []
        level = (n for n, d in enumerate(self.depths) if d == depth and self.confidences[n] >= plan.threshold)
        frontier = sorted(level, key=lambda n: -self.scores[n])
        chosen = frontier[: plan.width]
        if plan.sampled:
            room = plan.nodes + 1 - len(self.tokens)
            chosen = (
                chosen[: max(room // (plan.branching * (self.limit - depth)), 1)] if room >= plan.branching else []
            )
        if sum(self.scores[node] for node in chosen) < plan.min_gain:
            return []
        return sorted(chosen)

    def best(self, count: int, min_score: float) -> _Row:
        """The `count` best nodes as a tree: no node scores higher than its parent, so parents come along."""
        likely = (n for n in range(1, len(self.tokens)) if self.scores[n] >= min_score)
        order = sorted(likely, key=lambda n: (-self.scores[n], n))[:count]
        kept = [0, *sorted(order)]
        index = {node: position for position, node in enumerate(kept)} | {-1: -1}
        row = _Row(self.tokens[0], self.limit)
        row.tokens = [self.tokens[node] for node in kept]
        row.parents = [index[self.parents[node]] for node in kept]
        row.slots = [self.slots[node] for node in kept]
        row.promised = self.promised
        return row


def _level_inputs(rows: list[_Row], expanded: list[list[int]], tail: int) -> tuple[Tensor, Tensor]:
    """Tokens `[B, m]` of the nodes to run and the tail slots `[B, m, tail + m]` they see; gives them their slots."""
    width = max(len(nodes) for nodes in expanded)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    ancestors = torch.zeros(len(rows), width, tail + width, dtype=torch.bool)
    ancestors[:, :, tail:] |= torch.eye(width, dtype=torch.bool)
    for r, (row, nodes) in enumerate(zip(rows, expanded, strict=True)):
        for i, node in enumerate(nodes):
            row.slots[node] = tail + i
            tokens[r, i] = row.tokens[node]
            while (node := row.parents[node]) > 0:
                ancestors[r, i, row.slots[node]] = True
    return tokens, ancestors
