"""The target's own scores, kept from every node of every tree (Token Recycling, Luo et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.grown import GrownDrafter
from hf_specdec.errors import ArgumentError
from hf_specdec.sources.base import Source
from hf_specdec.sources.successors import Successors, SuccessorTable, check_vocab_size

_SUCCESSORS = 8


@dataclass
class Recycling(GrownDrafter):
    """Strategy "recycling": guesses what the target found likely after the same token before.

    The forward of a tree says what follows each of its nodes, whether the node was right or wrong. All of it goes into
    a table of successors, and the next trees grow from the table, likeliest nodes first.

    Args:
        table: a table that outlives the call; by default each call starts with an empty one.
        nodes, depth, node_cost: see `GrownDrafter`.
    """

    table: SuccessorTable | None = None

    name = "recycling"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None and not isinstance(self.table, SuccessorTable):
            raise ArgumentError(f"Recycling(table={self.table!r}) must be a SuccessorTable")

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a table that was made for another vocabulary."""
        if self.table is not None:
            check_vocab_size(self.table, target)

    def sources(self, context: DraftContext) -> list[Source]:
        """The table."""
        table = self.table
        if table is None:
            table = SuccessorTable(context.vocab_size, min(_SUCCESSORS, context.vocab_size))
        return [Successors(table)]
