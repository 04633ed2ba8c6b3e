"""How long the next chain should be, learned from the last ones; a draft that is no use is left alone."""

from __future__ import annotations

from hf_specdec.drafters.payoff import best_length

_PRIOR = 0.6  # acceptance of a draft that nothing is known of: one guess is worth a try, a long chain is not
_PRIOR_WEIGHT = 3.0  # guesses that the prior counts for
_MEMORY = 0.95  # of each guess before, when another one is judged
_FIRST_PAUSE = 16  # rounds
_LONGEST_PAUSE = 64


class ChainLength:
    """Counts which guesses came true, with forgetting, and makes chains as long as pays at that rate.

    While none pays, a single guess is tried every now and then. Each wrong one doubles the pause before the next, up
    to a bound; a right one is followed by another at once. So a draft that stays useless costs less and less, and one
    that becomes right is back in use in few rounds.

    Args:
        cost: time of one guess over the time of a forward of the target.
        longest: length of the longest chain; 0 never drafts.
    """

    def __init__(self, cost: float, longest: int) -> None:
        self._cost = cost
        self._longest = longest
        self._right = _PRIOR_WEIGHT * _PRIOR
        self._tried = _PRIOR_WEIGHT
        self._pause = _FIRST_PAUSE
        self._wait = 0

    @property
    def acceptance(self) -> float:
        """Share of guesses that were right, of those that stood behind right ones."""
        return self._right / self._tried

    @property
    def value(self) -> int:
        """Guesses for the next round; 0 in a pause."""
        return self._paying() or min(int(not self._wait), self._longest)

    def observe(self, tried: int, right: int) -> None:
        """Add a round.

        Args:
            tried: guesses that were judged: the right ones and the first wrong one of each chain; 0 if none was made.
            right: how many of them came true.
        """
        if not tried:
            self._wait = max(self._wait - 1, 0)
            return
        kept = _MEMORY**tried
        self._right = kept * self._right + right
        self._tried = kept * self._tried + tried
        if self._paying():
            self._pause = _FIRST_PAUSE
        elif not right:
            self._wait, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)

    def _paying(self) -> int:
        return best_length(self.acceptance, self._cost, self._longest)
