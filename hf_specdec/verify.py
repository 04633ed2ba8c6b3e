"""Which drafted tokens are accepted, and which token follows them. The only place where losslessness is decided.

Every rule walks from the root: at a node it emits one token with the target's law p (after all processors); if a child
of the node guessed that token the walk goes on there, else the round ends. What is emitted has the law p whatever the
tree looks like. `Typical` alone is another matter: it is lossy, and must be asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_specdec.emit import Emitter
from hf_specdec.processors import RowProcessors
from hf_specdec.sampling import Sampling, check_finite, in_double
from hf_specdec.tree import DraftTree


class Step(NamedTuple):
    """What happens at one node: the emitted token, and the child to go on at, if one guessed it."""

    token: int
    child: int | None


_TYPICAL_FLOOR, _TYPICAL_SHARE = 0.09, 0.3  # epsilon and delta as in Medusa's own code

Decide = Callable[[Sequence[int], Sequence[int]], list[Step]]
Observe = Callable[[Sequence[int], Sequence[int], Tensor, Tensor], None]


def walk(tree: DraftTree, emitter: Emitter, decide: Decide) -> list[list[int]]:
    """Walk all open rows down their trees, emitting one token at each node.

    Returns:
        For each row the nodes whose tokens stand in the text in front of its newest token, root first; empty for rows
        that took no part. A row that ran ahead of the others may be cut to less by a stop rule that hit it later.
    """
    paths: list[list[int]] = [[] for _ in range(tree.batch_size)]
    active = dict.fromkeys(emitter.open_rows(), 0)
    while active:
        for row, node in active.items():
            paths[row].append(node)
        steps = [
            _padding_step(tree, emitter, row, node) if emitter.is_finished(row) else step
            for (row, node), step in zip(active.items(), decide(list(active), list(active.values())), strict=True)
        ]
        emitter.append(list(active), [step.token for step in steps])
        going_on = {
            row: step.child
            for row, step in zip(active, steps, strict=True)
            if step.child is not None and (emitter.is_open(row) or (emitter.lockstep and not emitter.done))
        }
        active = {} if emitter.lockstep and len(going_on) < len(active) else going_on
    return paths


def _match(tree: DraftTree, rows: Sequence[int], nodes: Sequence[int], tokens: Sequence[int]) -> list[Step]:
    """Emit these tokens and go on where a child guessed one."""
    return [Step(t, tree.child(row, node, t)) for row, node, t in zip(rows, nodes, tokens, strict=True)]


def _padding_step(tree: DraftTree, emitter: Emitter, row: int, node: int) -> Step:
    """A finished row in lock-step: it is padded, and a chain of padding keeps up with the others."""
    return Step(emitter.pad_token, tree.child(row, node, emitter.pad_token))


class Scorer:
    """Processed scores of nodes on the accepted path: each processor sees the exact prefixes of plain generation.

    Args:
        processors: the call's processors.
        emitter: holds the prefixes.
        observe: called with rows, nodes, raw logits and processed scores (float32 `[R, V]`) for everything scored.
    """

    def __init__(self, processors: RowProcessors, emitter: Emitter, observe: Observe | None) -> None:
        self.processors = processors
        self._emitter = emitter
        self._observe = observe

    @property
    def records(self) -> bool:
        """Whether somebody wants to see the scores of every emitted token."""
        return self._observe is not None

    def __call__(self, logits: Tensor, rows: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """float32 `[R, V]` from the target's logits `[B, n, V]`."""
        raw = logits[list(rows), list(nodes)].float()
        prefixes = [self._emitter.prefix(row) for row in rows]
        raw = raw.to(prefixes[0].device)
        scores = self.processors(rows, prefixes, raw.clone() if self._observe else raw)
        if self._observe:
            self._observe(rows, nodes, raw, scores)
        return scores


class Verifier(ABC):
    """A rule; all but `Typical` are lossless.

    Args:
        scorer: gives p.
        emitter: takes the tokens.
        sampling: the call's randomness.
    """

    def __init__(self, scorer: Scorer, emitter: Emitter, sampling: Sampling) -> None:
        self.scorer = scorer
        self.emitter = emitter
        self.sampling = sampling

    def verify(self, tree: DraftTree, logits: Tensor) -> list[list[int]]:
        """Emit tokens; returns the accepted path of each row as in `walk`. `logits` are the target's, `[B, n, V]`."""
        return walk(tree, self.emitter, self.rule(tree, logits))

    @abstractmethod
    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """The decision at one node, for this round's tree and logits."""

    def steps(self, rows: Sequence[int]) -> list[int]:
        """Number of tokens generated so far for each of some rows."""
        return [len(self.emitter.generated[row]) for row in rows]


class SampleAndMatch(Verifier):
    """Choose a token with keyed noise (or the most likely one) and look whether a child guessed it.

    The choice ignores the tree, so the text is a function of model, prompt and seed alone; and P(descend to c) = p(c),
    the best that any lossless rule can do for a tree that was not sampled.
    """

    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """Score lazily, node by node along the accepted path."""

        def decide(rows: Sequence[int], nodes: Sequence[int]) -> list[Step]:
            tokens = self.sampling.choose(rows, self.steps(rows), self.scorer(logits, rows, nodes))
            return _match(tree, rows, nodes, tokens)

        return decide


class GreedyMatch(Verifier):
    """`SampleAndMatch` for greedy decoding without processors: all nodes at once, one synchronisation a round."""

    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """Take every node's best token in one reduction."""
        best = logits.max(dim=-1)
        tokens, values = best.indices.tolist(), best.values.tolist()

        def decide(rows: Sequence[int], nodes: Sequence[int]) -> list[Step]:
            check_finite([values[row][node] for row, node in zip(rows, nodes, strict=True)], self.steps(rows))
            return _match(tree, rows, nodes, [tokens[row][node] for row, node in zip(rows, nodes, strict=True)])

        return decide


class Rejection(Verifier):
    """Recursive rejection sampling without replacement, with fresh randomness.

    Children x_1, x_2, ... were drawn from q without replacement: accept x_j with probability min(1, P(x_j) / Q(x_j)),
    else P <- norm([P - Q]+) and Q <- norm(Q without x_j); after the last rejection draw from P. One child is the rule
    of Leviathan et al. and Chen et al. (2023); several are those of Jeon et al. and Yang et al. (2024). Children that
    were picked instead of drawn count as point masses.
    """

    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """Sampled chains under processors without state are decided as a block, everything else node by node."""
        if (
            tree.draft_probs is not None
            and tree.is_chain
            and self.scorer.processors.stateless
            and not self.emitter.lockstep
        ):
            return self._block_rule(tree, logits, tree.draft_probs)
        return self._node_rule(tree, logits)

    def _node_rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """Score lazily, then accept or reject the children in order."""

        def decide(rows: Sequence[int], nodes: Sequence[int]) -> list[Step]:
            scores = self.scorer(logits, rows, nodes)
            p = target_probs(scores, self.steps(rows))
            return [
                self._try_children(tree, row, node, p[i])
                for i, (row, node) in enumerate(zip(rows, nodes, strict=True))
            ]

        return decide

    def _block_rule(self, tree: DraftTree, logits: Tensor, draft_probs: Sequence[dict[int, Tensor]]) -> Decide:
        """Decide a row's whole chain at its root; the walk then emits what was decided."""
        decided: dict[int, list[int]] = {}

        def decide(rows: Sequence[int], nodes: Sequence[int]) -> list[Step]:
            for row, node in zip(rows, nodes, strict=True):
                if node == 0:
                    decided[row] = self._verify_block(tree.tokens[row][1:], draft_probs[row], logits, row)
            if self.scorer.records:
                self.scorer(logits, rows, nodes)  # the block looked at more nodes than are emitted; record these
            return [
                Step(decided[row][node], node + 1 if node + 1 < len(decided[row]) else None)
                for row, node in zip(rows, nodes, strict=True)
            ]

        return decide

    def _try_children(self, tree: DraftTree, row: int, node: int, p: Tensor) -> Step:
        q = tree.draft_probs[row].get(node) if tree.draft_probs is not None else None
        children = tree.children[row][node]
        tokens = [tree.tokens[row][child] for child in children]
        token, index = recursive_rejection(p, q, tokens, self._uniform, self._draw)
        return Step(token, children[index] if index is not None else None)

    def _verify_block(
        self, chain: Sequence[int], draft_probs: dict[int, Tensor], logits: Tensor, row: int
    ) -> list[int]:
        """The tokens that the row emits: the accepted ones of its chain and the one that follows."""
        p = self._chain_probs(logits, row, chain)
        chain = chain[: len(p) - 1]
        q = [draft_probs[node] for node in range(len(chain))]
        num_accepted, token = block_verification(p, q, chain, self._uniform, self._draw)
        return [*chain[:num_accepted], token]

    def _chain_probs(self, logits: Tensor, row: int, chain: Sequence[int]) -> list[Tensor]:
        """p at every node of a chain, accepted or not: allowed because the processors hold no state.

        A node without usable scores ends the chain. Only a walk that ends there fails, as plain decoding would.
        """
        prefix = self.emitter.prefix(row)
        text = torch.cat([prefix, prefix.new_tensor(chain)])
        raw = logits[row].float().to(text.device)
        probs = []
        for node in range(len(chain) + 1):
            scores = self.scorer.processors([row], [text[: len(prefix) + node]], raw[node : node + 1])
            probs.append(_probs(scores)[0])
            if probs[-1].isnan().any():
                break
        return probs

    def _uniform(self) -> float:
        assert self.sampling.fresh is not None
        return float(
            torch.rand((), dtype=torch.float64, generator=self.sampling.fresh, device=self.sampling.fresh.device)
        )

    def _draw(self, probs: Tensor) -> int:
        check_finite([float(probs.max())], ["after this block"])
        return int(torch.multinomial(probs, 1, generator=self.sampling.fresh))


class Typical(Verifier):
    """Typical acceptance (Cai et al. 2024, "Medusa"). Lossy: the text does not have the model's law.

    A guess is kept where the target finds it likely enough: p(x) > min(0.09, 0.3 exp(-H(p))), with H the entropy of p.
    Of the paths of kept guesses the longest is emitted, the likeliest of equally long ones; behind it a token is drawn
    from p.

    Processors with a state see emitted text alone, so there the walk takes the likeliest kept guess at each node.
    """

    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        """Look at the whole tree where the processors allow it."""
        ahead: dict[int, dict[int, int]] = {}  # row -> node -> the child to go on at

        def decide(rows: Sequence[int], nodes: Sequence[int]) -> list[Step]:
            scores = self.scorer(logits, rows, nodes)
            children: list[int | None]
            if self.scorer.processors.stateless:
                for row, node in zip(rows, nodes, strict=True):
                    if node == 0:
                        path = self._longest_path(tree, row, logits[row].float())
                        ahead[row] = dict(zip([0, *path], path, strict=False))
                children = [ahead[row].get(node) for row, node in zip(rows, nodes, strict=True)]
            else:
                kept = [_typical_children(tree, r, n, p) for r, n, p in zip(rows, nodes, _probs(scores), strict=True)]
                children = [max(one, key=lambda child: one[child]) if one else None for one in kept]
            drawn = iter(self._draw(scores, rows, [i for i, child in enumerate(children) if child is None]))
            return [
                Step(next(drawn), None) if child is None else Step(tree.tokens[row][child], child)
                for row, child in zip(rows, children, strict=True)
            ]

        return decide

    def _draw(self, scores: Tensor, rows: Sequence[int], ending: Sequence[int]) -> list[int]:
        """The tokens behind paths that end."""
        if not ending:
            return []
        rows = [rows[i] for i in ending]
        return self.sampling.choose(rows, self.steps(rows), scores[ending])

    def _longest_path(self, tree: DraftTree, row: int, raw: Tensor) -> list[int]:
        """Kept guesses, first to last; `raw` are the row's logits `[n, V]`."""
        prefix = self.emitter.prefix(row)
        raw = raw.to(prefix.device)
        best: list[int] = []
        level: list[tuple[float, list[int]]] = [(1.0, [])]  # likelihood and path
        while level:
            best = max(level, key=lambda one: one[0])[1]
            texts = [torch.cat([prefix, prefix.new_tensor([tree.tokens[row][n] for n in path])]) for _, path in level]
            ends = [path[-1] if path else 0 for _, path in level]
            probs = _probs(self.scorer.processors([row] * len(level), texts, raw[ends]))
            level = [
                (likelihood * p, [*path, child])
                for (likelihood, path), end, law in zip(level, ends, probs, strict=True)
                for child, p in _typical_children(tree, row, end, law).items()
            ]
        return best


def _typical_children(tree: DraftTree, row: int, node: int, p: Tensor) -> dict[int, float]:
    """The children that typical acceptance keeps, with p of their tokens."""
    threshold = typical_threshold(p)
    children = {child: float(p[tree.tokens[row][child]]) for child in tree.children[row][node]}
    return {child: value for child, value in children.items() if value > threshold}


def typical_threshold(p: Tensor) -> float:
    """What p of a guess must exceed in typical acceptance: min(0.09, 0.3 exp(-H(p))); `p` is float64 `[V]`."""
    return min(_TYPICAL_FLOOR, _TYPICAL_SHARE * float(torch.special.entr(p).sum().neg().exp()))


def target_probs(scores: Tensor, steps: Sequence[int]) -> Tensor:
    """p in double precision, `[R, V]`, from processed scores.

    Raises:
        NonFiniteLogitsError: a row holds NaN or +inf, or allows no token.
    """
    check_finite(scores.max(dim=-1).values.tolist(), steps)
    return _probs(scores)


def _probs(scores: Tensor) -> Tensor:
    return in_double(scores).softmax(-1)


def recursive_rejection(
    p: Tensor, q: Tensor | None, tokens: Sequence[int], uniform: Callable[[], float], draw: Callable[[Tensor], int]
) -> tuple[int, int | None]:
    """One node of recursive rejection sampling without replacement.

    Args:
        p: target distribution, float64 `[V]`.
        q: the distribution that the candidates were drawn from without replacement, or None for point masses.
        tokens: the candidates in the order of drawing.
        uniform: draws from [0, 1).
        draw: draws a token from a distribution.

    Returns:
        The emitted token, and the index of the accepted candidate (None if all were rejected).
    """
    for index, token in enumerate(tokens):
        proposal = float(q[token]) if q is not None else 1.0
        if proposal > 0 and uniform() * proposal < float(p[token]):
            return token, index
        p = _residual(p, q) if q is not None else _without(p, token)
        q = _without(q, token) if q is not None else None
    return draw(p), None


def block_verification(
    p: Sequence[Tensor],
    q: Sequence[Tensor],
    tokens: Sequence[int],
    uniform: Callable[[], float],
    draw: Callable[[Tensor], int],
) -> tuple[int, int]:
    """Block verification of a sampled chain (Sun et al., ICLR 2025): accepts at least as much as token by token.

    Args:
        p: target distributions at the root and after each of the g tokens, g + 1 of float64 `[V]`.
        q: the distribution each token was drawn from, g of float64 `[V]`.
        tokens: the chain.
        uniform: draws from [0, 1).
        draw: draws a token from a distribution.

    Returns:
        Number of accepted tokens, and the token that follows them.
    """
    weight, num_accepted, leftover = 1.0, 0, p[0] if not tokens else _positive(p[0] - q[0])
    for i, token in enumerate(tokens, start=1):
        weight = min(1.0, weight * float(p[i - 1][token]) / float(q[i - 1][token]))
        last = i == len(tokens)
        residual = p[i] if last else _positive(weight * p[i] - q[i])
        mass = float(residual.sum())
        denominator = mass + 1.0 - weight
        accept = weight if last else (mass / denominator if denominator > 0 else 0.0)
        if uniform() < accept:
            num_accepted, leftover = i, residual
    return num_accepted, draw(_normalised(leftover, p[num_accepted]))


def _positive(weights: Tensor) -> Tensor:
    return weights.clamp_min(0.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    return _normalised(_positive(p - q), p)


def _without(probs: Tensor, token: int) -> Tensor:
    rest = probs.clone()
    rest[token] = 0.0
    return _normalised(rest, rest)


def _normalised(weights: Tensor, fallback: Tensor) -> Tensor:
    """Rounding may leave nothing where the exact residual is tiny; such a branch has probability about 1e-16."""
    total = weights.sum()
    return weights / total if total > 0 else fallback
