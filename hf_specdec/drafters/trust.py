"""How far a draft's own probabilities can be believed, learned while it is used."""

from __future__ import annotations

_MEMORY = 0.95
_PRIOR = 1.0


class Trust:
    """Accepted guesses over promised ones, with exponential forgetting.

    Forgetting goes on while nothing is drafted, so trust in a draft that was left alone comes back and it is tried
    again.

    Attributes:
        value: factor in (0, 1] for the probabilities that the draft states.
    """

    def __init__(self) -> None:
        self._promised = 0.0
        self._accepted = 0.0

    @property
    def value(self) -> float:
        """Starts at 1: the draft is believed until it disappoints."""
        return min((self._accepted + _PRIOR) / (self._promised + _PRIOR), 1.0)

    def observe(self, promised: float, accepted: float) -> None:
        """Add one round: the summed probability of its first guesses, and how many of them came true."""
        self._promised = _MEMORY * self._promised + promised
        self._accepted = _MEMORY * self._accepted + accepted
