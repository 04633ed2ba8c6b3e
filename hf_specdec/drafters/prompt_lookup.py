"""The text itself as draft: what followed the last tokens when they stood in it before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

from hf_specdec.drafters.base import DraftContext, Drafter
from hf_specdec.drafters.settings import require_whole
from hf_specdec.tree import DraftTree

_MAX_MATCHES = 32  # looked at in a round; most often the first few say all


@dataclass
class PromptLookup(Drafter):
    """Strategy "prompt_lookup": copies continuations from prompt and output; several matches become branches.

    The longest match is tried first, and of equally long ones the latest. What a match promises grows with its length,
    so a match of n tokens copies `tokens_per_match * n` of them. `prompt_lookup_num_tokens` and
    `max_matching_ngram_size`, if given to `generate`, override `num_tokens` and `max_ngram`.

    Args:
        nodes: number of guesses a round.
        num_tokens: longest copied continuation.
        max_ngram: longest match that is looked for, in tokens.
        branches: number of different continuations; 1 makes a chain.
        tokens_per_match: copied tokens for each matching token.
    """

    nodes: int = 24
    num_tokens: int = 20
    max_ngram: int = 5
    branches: int = 2
    tokens_per_match: int = 4

    name = "prompt_lookup"
    settings = frozenset({"prompt_lookup_num_tokens", "max_matching_ngram_size"})

    _indices: list[NgramIndex] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_whole(self, "nodes", "num_tokens", "max_ngram", "branches", "tokens_per_match")

    @property
    def chains_only(self) -> bool:
        """One branch is a chain."""
        return self.branches == 1

    def begin(self, context: DraftContext) -> Self:
        """Start an empty index for each row."""
        drafter = super().begin(context)
        drafter.num_tokens = context.config.prompt_lookup_num_tokens or self.num_tokens
        drafter.max_ngram = context.config.max_matching_ngram_size or self.max_ngram
        drafter._indices = [NgramIndex(drafter.max_ngram) for _ in context.texts]
        return drafter

    def propose(self, context: DraftContext) -> DraftTree:
        """Look up each row's last tokens in its own text."""
        paths = []
        for index, text, budget in zip(self._indices, context.texts, context.budgets, strict=True):
            index.extend(text)
            paths.append(self._continuations(index, text, min(self.num_tokens, budget)))
        return DraftTree.from_paths(context.pending_tokens, paths, self.nodes)

    def _continuations(self, index: NgramIndex, text: Sequence[int], longest: int) -> list[Sequence[int]]:
        found: list[Sequence[int]] = []
        for start, num_matching in islice(index.matches(text), _MAX_MATCHES) if longest else ():
            length, period = min(longest, self.tokens_per_match * num_matching), len(text) - start
            path = [text[start + i % period] for i in range(length)]  # a copy may run on into itself, as in a loop
            if not any(other[: len(path)] == path for other in found):
                found.append(path)
            if len(found) == self.branches:
                break
        return found


class NgramIndex:
    """Where each n-gram of a growing text ended. Appending and looking up cost the same however long the text is."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._length = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, text: Sequence[int]) -> None:
        """Index the tokens that were appended since the last call."""
        for end in range(self._length + 1, len(text) + 1):
            for n in range(1, min(self._max_ngram, end) + 1):
                self._ends.setdefault(tuple(text[end - n : end]), []).append(end)
        self._length = len(text)

    def matches(self, text: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Earlier occurrences of the text's last tokens: the position right after, and how many tokens match.

        Longest first, then latest first; a position comes once, with its longest match.
        """
        seen: set[int] = set()
        for n in range(min(self._max_ngram, len(text)), 0, -1):
            for end in reversed(self._ends.get(tuple(text[-n:]), [])):
                if end < len(text) and end not in seen:
                    seen.add(end)
                    yield end, n
