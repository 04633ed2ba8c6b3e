"""The n-grams that lookahead decoding has collected."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEYS = 8192


class NgramPool:
    """What may follow a token: for each token a few continuations of equal length. The least recently added go first.

    Args:
        ngram: tokens of an n-gram; the first is its key, the others are the continuation.
        max_continuations: most continuations of a key.
        max_keys: most keys.
        excluded: n-grams that hold one of these tokens are not kept.
    """

    def __init__(
        self, ngram: int, max_continuations: int, max_keys: int = MAX_KEYS, excluded: frozenset[int] = frozenset()
    ) -> None:
        self._ngram = ngram
        self._max_continuations = max_continuations
        self._max_keys = max_keys
        self._excluded = excluded
        self._continuations: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = OrderedDict()
        self._length_read = 0

    def __len__(self) -> int:
        return len(self._continuations)

    def add(self, ngram: Sequence[int]) -> None:
        """Take one n-gram in, as the most recent one."""
        if not self._excluded.isdisjoint(ngram):
            return
        key, continuation = ngram[0], tuple(ngram[1:])
        known = self._continuations.setdefault(key, OrderedDict())
        self._continuations.move_to_end(key)
        if len(self._continuations) > self._max_keys:
            self._continuations.popitem(last=False)
        known[continuation] = None
        known.move_to_end(continuation)
        if len(known) > self._max_continuations:
            known.popitem(last=False)

    def read(self, text: Sequence[int]) -> None:
        """Take in the n-grams of a growing text that were not there at the last call."""
        for end in range(max(self._length_read + 1, self._ngram), len(text) + 1):
            self.add(text[end - self._ngram : end])
        self._length_read = len(text)

    def continuations(self, token: int) -> list[tuple[int, ...]]:
        """What may follow a token, the most recent first."""
        return list(reversed(self._continuations.get(token, ())))

    def extended(self, path: Sequence[int], length: int) -> list[int]:
        """A path of so many tokens that goes on with the latest continuation of its last token, again and again.

        It ends earlier at a token without continuations.
        """
        tokens = list(path)
        while len(tokens) < length and tokens[-1] in self._continuations:
            tokens += next(reversed(self._continuations[tokens[-1]]))
        return tokens[:length]
