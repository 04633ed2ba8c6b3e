"""Exact laws of randomised rules: every random decision is followed both ways, weighted by its probability."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)


class _Uniform:
    """A number uniform on [0, scale) that is not drawn before it is compared."""

    def __init__(self, branch: _Branch, scale: float = 1.0) -> None:
        self._branch = branch
        self._scale = scale

    def __mul__(self, factor: float) -> _Uniform:
        return _Uniform(self._branch, self._scale * factor)

    __rmul__ = __mul__

    def __lt__(self, limit: float) -> bool:
        below = min(max(float(limit) / self._scale, 0.0), 1.0) if self._scale > 0 else float(limit > 0)
        return self._branch.choose([1.0 - below, below]) == 1


class _Branch:
    """One way through a rule: follows given choices, then always the first possible one."""

    def __init__(self, given: list[int]) -> None:
        self.weight = 1.0
        self.choices: list[int] = []
        self.open: list[list[int]] = []
        self._given = given

    def choose(self, probs: list[float]) -> int:
        possible = [i for i, prob in enumerate(probs) if prob > 0]
        position = len(self.choices)
        choice = self._given[position] if position < len(self._given) else possible[0]
        if position >= len(self._given):
            self.open += [[*self.choices, other] for other in possible[1:]]
        self.choices.append(choice)
        self.weight *= probs[choice]
        return choice

    def uniform(self) -> _Uniform:
        return _Uniform(self)

    def draw(self, probs: Tensor) -> int:
        return self.choose(probs.tolist())


Rule = Callable[[Callable[[], _Uniform], Callable[[Tensor], int]], Outcome]


def law(rule: Rule[Outcome]) -> dict[Outcome, float]:
    """The probability of everything that `rule(uniform, draw)` may return."""
    probs: dict[Outcome, float] = {}
    waiting: list[list[int]] = [[]]
    while waiting:
        branch = _Branch(waiting.pop())
        outcome = rule(branch.uniform, branch.draw)
        waiting += branch.open
        probs[outcome] = probs.get(outcome, 0.0) + branch.weight
    return probs
