"""Trained heads that read the target's last hidden state (Cai et al. 2024, "Medusa")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.grown import GrownDrafter
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.heads.choices import Choices, checked_tree, load_tree
from hf_specdec.sources.base import Source
from hf_specdec.sources.heads import HeadGuesses

_TUNED = "tuned"


@dataclass
class Medusa(GrownDrafter):
    """Strategy "medusa": trained heads guess the tokens after the next one, from the hidden state that chose that one.

    Guessing needs no forward of its own: heads read what the target computed for the newest accepted token. Head i
    guesses the token at depth i + 1 whatever was guessed before it, so all guesses together make a product tree. Each
    round drafts the part of it that is likeliest by the heads' own probabilities, as far as these have proved right.

    Args:
        heads: the heads, trained for this target; also given by `generate(..., heads=...)`.
        tree: draft this tree instead, whatever the probabilities are: one tuple of ranks for each node, the path of a
            JSON file of such, or "tuned" for the tree that is stored with the heads. It has `nodes` of its own, and
            all of them are drafted unless `node_cost` is given too.
        nodes, depth, node_cost: see `GrownDrafter`. No guess is deeper than there are heads.
    """

    heads: MedusaHeads | None = field(default=None, repr=False)
    tree: str | Sequence[Sequence[int]] | None = None

    name = "medusa"
    needs_hidden_states = "last"

    _choices: Choices | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads is not None and not isinstance(self.heads, MedusaHeads):
            raise ArgumentError(
                f"Medusa(heads=...) must be MedusaHeads, not {type(self.heads).__name__}; load them with "
                "MedusaHeads.from_pretrained"
            )
        if self.tree is None:
            return
        if not isinstance(self.tree, str | Sequence):
            raise ArgumentError(f"Medusa(tree={self.tree!r}) must be a list of tuples of ranks, a file or {_TUNED!r}")
        if self.nodes != GrownDrafter.nodes:
            raise ArgumentError(
                f"Medusa(nodes={self.nodes}) would play no part, since tree= says which nodes there are: drop it"
            )
        if self.heads is not None:
            self._choices = _choices(self.tree, self.heads)

    def with_heads(self, heads: MedusaHeads) -> Self:
        """The same settings with these heads."""
        if self.heads is not None:
            raise ArgumentError("heads are given twice, in the strategy object and as heads=: drop one of them")
        return replace(self, heads=heads)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse to draft without heads, or with those of another model."""
        if self.heads is None:
            raise ArgumentError(
                "strategy 'medusa' drafts with trained heads: pass heads=MedusaHeads.from_pretrained(...)"
            )
        self.heads.check(target)

    def begin(self, context: DraftContext) -> Self:
        """As every `GrownDrafter`; a tree of its own has as many nodes as it has."""
        drafter = super().begin(context)
        if self._choices is not None:
            drafter.nodes = len(self._choices)
        return drafter

    def _cost_of_node(self, context: DraftContext) -> float:
        """Whoever names a tree means all of it."""
        return 0.0 if self._choices is not None and self.node_cost is None else super()._cost_of_node(context)

    def sources(self, context: DraftContext) -> list[Source]:
        """The heads; in the target's dtype, as a copy unless they are."""
        assert self.heads is not None  # see `check`
        heads = self.heads.placed(context.target)
        return [
            HeadGuesses(
                heads,
                heads.output_of(context.target),
                vocab_size=context.vocab_size,
                sampling=context.sampling,
                processors=context.score_processors,
                num_generated=context.num_generated,
                tree=self._choices,
            )
        ]


def _choices(tree: str | Sequence[Sequence[int]], heads: MedusaHeads) -> Choices:
    if not isinstance(tree, str):
        return checked_tree(tree, heads.num_heads, heads.num_guessable)
    if tree != _TUNED:
        return load_tree(tree, heads.num_heads, heads.num_guessable)
    if heads.tree is None:
        raise ArgumentError("tree='tuned': no tree is stored with these heads; measure one with hf-specdec tune-tree")
    return heads.tree
