"""No draft at all: a block of guesses is read until it stops changing (Santilli et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.settings import eos_tokens, require_whole
from hf_specdec.tree import DraftTree, chain_parents


@dataclass
class Jacobi(Drafter):
    """Strategy "jacobi": iterates a block of guesses to its fixed point, which is the text (Santilli et al. 2023).

    The block is a chain below the pending token. After each forward every guess is replaced by what the target says
    after the guess in front of it; guesses that were right leave the block at the left, and copies of the last guess
    fill it up at the right. Each forward gives at least one token its final value, so there are never more forwards
    than in plain decoding; there are fewer where a guess is right although the one in front of it was wrong.

    What the target says is its most likely token, or, when sampling with keyed noise, the token that this noise
    chooses: the fixed point then is the sampled text.

    Args:
        block: number of guesses.
    """

    block: int = 8

    name = "jacobi"

    _context: DraftContext = field(init=False, repr=False, compare=False)
    _blocks: list[list[int]] = field(init=False, repr=False, compare=False)
    _ends: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, "block")

    @property
    def chains_only(self) -> bool:
        """One guess a position."""
        return True

    def begin(self, context: DraftContext) -> Self:
        """Start with empty blocks: `propose` fills them."""
        drafter = super().begin(context)
        drafter._context = context
        drafter._blocks = [[] for _ in context.texts]
        drafter._ends = eos_tokens(context.config)
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """The blocks as chains. Nothing can follow an EOS token, so a block ends in front of one."""
        tokens = []
        for row, (pending, budget) in enumerate(zip(context.pending_tokens, context.budgets, strict=True)):
            block = self._blocks[row]
            block += [block[-1] if block else pending] * (self.block - len(block))
            end = next((depth for depth, token in enumerate(block) if token in self._ends), len(block))
            tokens.append([pending, *block[: min(end, budget)]])
        return DraftTree(tokens, [chain_parents(len(chain)) for chain in tokens])

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Replace each guess behind the newest token by the target's answer to the one in front of it."""
        rows, nodes, steps = [], [], []
        for row, path in enumerate(accepted):
            self._blocks[row] = []
            for distance, node in enumerate(range(len(path), len(tree.tokens[row])) if path else ()):
                rows.append(row)
                nodes.append(node)
                steps.append(self._context.num_generated[row] + distance)
        if rows:
            for row, token in zip(rows, self._answers(outputs.logits[rows, nodes], rows, steps), strict=True):
                self._blocks[row].append(token)

    def _answers(self, logits: Tensor, rows: Sequence[int], steps: Sequence[int]) -> list[int]:
        sampling = self._context.sampling
        if sampling.fresh is not None:  # fresh randomness cannot be foreseen
            tokens: list[int] = logits.max(dim=-1).indices.tolist()
            return tokens
        no_prefix = torch.empty((len(rows), 0), dtype=torch.int64, device=logits.device)
        scores = self._context.score_processors(no_prefix, logits.float())  # type: ignore[arg-type]
        # Behind a wrong guess a model may overflow. That makes a bad guess, not an error.
        limit = torch.finfo(scores.dtype).max
        return sampling.choose(rows, steps, scores.nan_to_num(nan=-limit, posinf=limit, neginf=-limit))
