"""What a source is: something that costs microseconds and has an opinion about the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor


class Guess(NamedTuple):
    """One opinion about the token that follows.

    Attributes:
        token: its id.
        kind: what the opinion rests on. Guesses of one kind are expected to come true equally often, and how often
            they do is measured while they are used.
        prior: how often guesses of this kind come true as far as is known beforehand, in (0, 1).
        state: where the source stands if the guess is right; what its `guesses` takes.
    """

    token: int
    kind: Hashable
    prior: float
    state: Any


class Source(ABC):
    """Serves one call of `generate`, all its rows."""

    blind: ClassVar[bool] = False
    """Whether its guesses hang on the depth alone, whatever stands before them on the path."""

    @abstractmethod
    def start(self, row: int, text: Sequence[int]) -> Any | None:
        """Where the source stands after the text of a row, or None if it knows nothing.

        Called once a round; `text` is the text of the last call with more tokens at its end.
        """

    @abstractmethod
    def guesses(self, state: Any) -> Sequence[Guess]:
        """What may follow there: a few different tokens."""

    def observe(self, tokens: Sequence[int], logits: Tensor) -> None:  # noqa: B027
        """Learn from a row's verified tree: the tokens of its n nodes and the target's raw logits there, `[n, V]`."""

    def advance(self, rows: Sequence[int], logits: Tensor, hidden_states: Tensor) -> None:  # noqa: B027
        """The texts of R rows have grown; called after `observe`, if the strategy has `needs_hidden_states`.

        Args:
            rows: all rows that are still open.
            logits: the target's raw logits from which the last token of each text was chosen, `[R, V]`.
            hidden_states: what its output matrix read there, `[R, hidden_size]`.
        """

    def finish(self, outputs: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """The call has ended well with these outputs, one a row."""
