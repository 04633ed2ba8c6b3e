"""A draft model that guesses a chain, one token after the other (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.drafters.chain import draft_chains, keep_accepted
from hf_specdec.drafters.draft_model import DraftModel
from hf_specdec.drafters.settings import draft_setting
from hf_specdec.tree import DraftTree


@dataclass
class Assisted(Drafter):
    """Strategy "assisted": `assistant_model` drafts a chain.

    Its length and early stop are transformers' own settings, given to `generate` or found in the draft's
    `generation_config`: `num_assistant_tokens`, `num_assistant_tokens_schedule` (the heuristics start afresh in every
    call) and `assistant_confidence_threshold`.
    """

    name = "assisted"
    needs_draft_model = True
    settings = frozenset({"num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"})

    _draft: DraftModel = field(init=False, repr=False, compare=False)
    _length: ChainLength = field(init=False, repr=False, compare=False)
    _threshold: float = field(init=False, repr=False, compare=False)

    @property
    def chains_only(self) -> bool:
        """One guess a position."""
        return True

    def begin(self, context: DraftContext) -> Self:
        """Let the draft read the prompt."""
        drafter = super().begin(context)
        assert context.draft_model is not None
        drafter._length = ChainLength.from_context(context)
        drafter._threshold = draft_setting(context, "assistant_confidence_threshold") or 0.0
        drafter._draft = DraftModel(context.draft_model, context)
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Draft until the length, the row's budget or the draft's confidence ends the chain."""
        return draft_chains(context, self._draft, self._length.tokens, self._threshold)

    def observe(self, tree: DraftTree, accepted: Sequence[Sequence[int]], outputs: RoundOutputs) -> None:
        """Keep the accepted part of the draft's cache, and adapt the length."""
        keep_accepted(self._draft, tree, accepted)
        drafted = [count for count in tree.num_drafted if count]
        if drafted:
            self._length.adapt(
                all(len(path) - 1 == count for path, count in zip(accepted, tree.num_drafted, strict=True) if count)
            )


@dataclass
class ChainLength:
    """Tokens to draft a round, by transformers' `num_assistant_tokens_schedule`."""

    tokens: int
    adaptive: bool

    @classmethod
    def from_context(cls, context: DraftContext) -> ChainLength:
        """Read the call's and the draft's settings."""
        schedule = draft_setting(context, "num_assistant_tokens_schedule")
        return cls(draft_setting(context, "num_assistant_tokens"), schedule in ("heuristic", "heuristic_transient"))

    def adapt(self, all_accepted: bool) -> None:
        """Two more after a round without a miss, one less after a miss."""
        if self.adaptive:
            self.tokens = self.tokens + 2 if all_accepted else max(1, self.tokens - 1)
