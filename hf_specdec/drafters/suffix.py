"""Continuations of the longest match, weighted by how often they occurred (SuffixDecoding, Oliaro et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_specdec.drafters.base import DraftContext
from hf_specdec.drafters.grown import GrownDrafter
from hf_specdec.errors import ArgumentError
from hf_specdec.sources.base import Source
from hf_specdec.sources.matches import OwnText
from hf_specdec.sources.store import StoredTexts, SuffixStore


@dataclass
class Suffix(GrownDrafter):
    """Strategy "suffix": copies from the prompt, from the output so far and, with a store, from earlier outputs.

    The longer the match and the more of its occurrences went on in one way, the further that way is drafted; other
    ways become branches.

    Args:
        store: earlier texts; the call's outputs are added to it when the call has ended.
        nodes, depth, node_cost: see `GrownDrafter`.
    """

    store: SuffixStore | None = None

    name = "suffix"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store is not None and not isinstance(self.store, SuffixStore):
            raise ArgumentError(f"Suffix(store={self.store!r}) must be a SuffixStore")

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a store that was filled with another tokenizer."""
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        if self.store is not None and self.store.largest_token >= vocab_size:
            raise ArgumentError(
                f"the suffix store holds token {self.store.largest_token}, but the target knows {vocab_size} tokens; "
                "it was filled with another tokenizer"
            )

    def sources(self, context: DraftContext) -> list[Source]:
        """The row's own text, and the store."""
        own: list[Source] = [OwnText(context.batch_size)]
        return own if self.store is None else [*own, StoredTexts(self.store, context.batch_size)]
