"""The two-dimensional window of lookahead decoding, as paths of a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random


class LookaheadWindow:
    """Columns of guesses at neighbouring positions; each level of the window is one more Jacobi iteration.

    With tokens `x[level][column]` the first level is a chain that follows the text, and every other token follows the
    one of the same column a level above:

        text - x[0][0] - x[0][1] - x[0][2]        level 0
                  |         |         |
               x[1][0]   x[1][1]   x[1][2]        level 1

    So a token sees what the paper's mask lets it see, and its depth is the paper's position.

    Args:
        width: columns.
        ngram: tokens of the n-grams that the columns grow to; the window holds one level less.
        fillers: tokens of the prompt, for the first level and in place of tokens that must not occur.
        excluded: tokens that must not occur, such as EOS.
    """

    def __init__(self, width: int, ngram: int, fillers: Sequence[int], excluded: frozenset[int]) -> None:
        # Seeded with the text: the same call always drafts the same, and nobody's random state is touched.
        self._random = Random(str(fillers))
        self._excluded = excluded
        self._fillers = [token for token in fillers if token not in excluded] or list(fillers)
        self._ngram = ngram
        self.levels = [[self._filler() for _ in range(width)]]

    @property
    def width(self) -> int:
        """Number of columns."""
        return len(self.levels[0])

    def shrink(self, budget: int) -> None:
        """Drop the columns whose last token would be deeper than `budget`."""
        width = max(budget - len(self.levels) + 1, 0)
        self.levels = [level[:width] for level in self.levels]

    def paths(self) -> Iterator[list[int]]:
        """For each column the tokens from the text down to its last level."""
        for column in range(self.width):
            yield self.levels[0][: column + 1] + [level[column] for level in self.levels[1:]]

    def advance(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Let each column grow by what the target says at its end; full columns drop their first token.

        Args:
            tokens: one for each column.

        Returns:
            The n-grams of full columns.
        """
        self.levels.append([self._filler() if token in self._excluded else token for token in tokens])
        if len(self.levels) < self._ngram:
            return iter(())
        ngrams = zip(*self.levels, strict=True)
        del self.levels[0]
        return ngrams

    def _filler(self) -> int:
        return self._random.choice(self._fillers)
