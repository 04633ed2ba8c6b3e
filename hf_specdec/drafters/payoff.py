"""What a chain of guesses brings, and how long it should be (Leviathan et al. 2023, sections 3.3 and 3.5)."""

from __future__ import annotations


def speedup(acceptance: float, cost: float, length: int) -> float:
    """Expected tokens a round over the time of a round, with plain decoding as 1.

    Args:
        acceptance: probability that a guess is right if those before it are.
        cost: time of one guess over the time of one forward of the target.
        length: guesses a round.
    """
    tokens = sum(acceptance**depth for depth in range(length + 1))
    return tokens / (1 + cost * length)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The length of the chain, from 0 to `longest`, that promises most; the shortest of equals."""
    return max(range(longest + 1), key=lambda length: (speedup(acceptance, cost, length), -length))
