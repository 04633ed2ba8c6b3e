"""Negative controls: the faults that speculative decoding is known for, built to be caught.

Each is the real loop with one thing wrong in it. They exist inside the audit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_specdec.audit.arms import Arm, describe
from hf_specdec.audit.self_draft import SelfDraft
from hf_specdec.call import Call, Request, build_call
from hf_specdec.drafters import Drafter
from hf_specdec.outputs import SpeculativeOutput
from hf_specdec.runner import ForwardOutput, ModelRunner
from hf_specdec.sampling import Seed
from hf_specdec.speculation import Speculation, decode
from hf_specdec.tree import DraftTree
from hf_specdec.verify import Decide, Rejection, Step, Typical, Verifier

IDENTITY, LAW = "identity", "law"

Tamper = Callable[[Call], None]


class TamperedSpeculation(Speculation):
    """The loop after something was done to its parts.

    Args:
        tamper: changes the call in place.
    """

    def __init__(self, strategy: Drafter, tamper: Tamper, seed: Seed, verification: str) -> None:
        super().__init__(strategy, seed=seed, verification=verification)
        self._tamper = tamper

    def _run(self, request: Request, start: float) -> SpeculativeOutput | Tensor:
        call = build_call(request)
        self._tamper(call)
        decode(call)  # the cache is not given back: it may hold anything
        return call.result()


@dataclass(frozen=True)
class Control(Arm):
    """A fault.

    Attributes:
        fault: what is wrong, in words.
        check: the test that must see it: "identity" or "law".
        tamper: puts the fault into a call.
        intact: whether nothing is wrong, so that the control must pass.
    """

    fault: str = ""
    check: str = LAW
    tamper: Tamper = lambda call: None
    intact: bool = False

    def speculation(self, drafter: Drafter, seed: Seed, verification: str) -> Speculation:
        """The loop with the fault in it."""
        return TamperedSpeculation(drafter, self.tamper, seed, verification)


def controls() -> list[Control]:
    """All of them; the first two have no fault and show that the others fail because of theirs."""

    def control(name: str, fault: str, check: str, tamper: Tamper | None = None, picked: bool = False) -> Control:
        drafter = SelfDraft(picked=picked)
        described = f"{describe(drafter)}, {fault}"
        if tamper is None:
            return Control(name, drafter, described, fault=fault, check=check, intact=True)
        return Control(name, drafter, described, fault=fault, check=check, tamper=tamper)

    def law(name: str, fault: str, rule: type[Verifier], picked: bool = False) -> Control:
        return control(name, fault, LAW, _verify_by(rule), picked)

    return [
        control("intact, identity", "nothing", IDENTITY),
        control("intact, law", "nothing", LAW),
        law("typical acceptance", "guesses are kept when p is above a threshold", Typical, picked=True),
        law("residual from p", "a refused guess is replaced by a draw from p", _ResidualFromP),
        law("double draw", "a draw that no guess matches is thrown away and drawn again", _Twice, picked=True),
        law("bonus temperature", "the token after the last guess has half the temperature", _Bonus),
        control("shifted position", "guesses stand one position too far", IDENTITY, _shift_positions),
        control("short rollback", "one refused guess stays in the cache", IDENTITY, _roll_back_less),
    ]


class _NodeByNode(Rejection):
    """A rule that decides at each node alone."""

    def rule(self, tree: DraftTree, logits: Tensor) -> Decide:
        return self._node_rule(tree, logits)


class _ResidualFromP(_NodeByNode):
    """Forgets to subtract q."""

    def _try_children(self, tree: DraftTree, row: int, node: int, p: Tensor) -> Step:
        q = tree.draft_probs[row].get(node) if tree.draft_probs is not None else None
        for child in tree.children[row][node]:
            token = tree.tokens[row][child]
            if self._uniform() * (float(q[token]) if q is not None else 1.0) < float(p[token]):
                return Step(token, child)
        return Step(self._draw(p), None)


class _Twice(_NodeByNode):
    """Draws a token to compare with the guesses, and another one to emit."""

    def _try_children(self, tree: DraftTree, row: int, node: int, p: Tensor) -> Step:
        token = self._draw(p)
        child = tree.child(row, node, token)
        return Step(token, child) if child is not None else Step(self._draw(p), None)


class _Bonus(_NodeByNode):
    """Applies the temperature twice behind the last guess."""

    def _try_children(self, tree: DraftTree, row: int, node: int, p: Tensor) -> Step:
        if node > 0 and not tree.children[row][node]:
            return Step(self._draw(p.square() / p.square().sum()), None)
        return super()._try_children(tree, row, node, p)


def _verify_by(rule: type[Verifier]) -> Tamper:
    def tamper(call: Call) -> None:
        verifier = call.verifier
        call.verifier = rule(verifier.scorer, verifier.emitter, verifier.sampling)

    return tamper


class _Changed:
    """A runner of which some methods are replaced."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _Shifted(_Changed):
    def forward(
        self, tokens: Tensor, depths: Tensor, ancestors: Tensor, hidden_states: bool | int = False
    ) -> ForwardOutput:
        return self._runner.forward(tokens, depths + (depths > 0), ancestors, hidden_states)


class _LeavesOne(_Changed):
    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._left = 0

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        tail = self._runner.view.tail
        more = [[*row, row[-1] + 1] if row and row[-1] + 1 < tail else list(row) for row in kept]
        self._left += len(more[0]) - len(kept[0])
        self._runner.commit(more)

    def truncate(self, limits: Sequence[int]) -> None:
        self._runner.truncate([limit + self._left for limit in limits])


def _shift_positions(call: Call) -> None:
    call.runner = _Shifted(call.runner)  # type: ignore[assignment]


def _roll_back_less(call: Call) -> None:
    call.runner = _LeavesOne(call.runner)  # type: ignore[assignment]
