"""No draft: plain decoding through the same loop, the baseline of everything."""

from __future__ import annotations

from dataclasses import dataclass

from hf_specdec.drafters.base import DraftContext, Drafter
from hf_specdec.tree import DraftTree


@dataclass(frozen=True)
class NoDraft(Drafter):
    """Strategy "none": every tree is its root."""

    name = "none"

    @property
    def chains_only(self) -> bool:
        """A root alone is a chain."""
        return True

    def propose(self, context: DraftContext) -> DraftTree:
        """Guess nothing."""
        return DraftTree.roots(context.pending_tokens)
