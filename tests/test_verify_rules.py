"""The verification rules have exactly the target's law: every random decision integrated out, no sampling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from branches import law
from hf_specdec.verify import block_verification, recursive_rejection

SIZE = 4
TOLERANCE = 1e-12
CHAIN = 3

Draw = Callable[[Tensor], int]
Node = Callable[[Tensor, Tensor | None, Sequence[int], Callable[[], float], Draw], tuple[int, int | None]]
Chain = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int], Callable[[], float], Draw], tuple[int, int]]


def distribution(*key: int, zeros: int = 0) -> Tensor:
    """A random distribution over `SIZE` tokens, some of them impossible."""
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    weights = torch.rand(SIZE, dtype=torch.float64, generator=generator) ** 2 + 0.01
    weights[torch.randperm(SIZE, generator=generator)[:zeros]] = 0.0
    return weights / weights.sum()


PAIRS = {
    "dense": (distribution(1), distribution(2)),
    "far apart": (distribution(3) ** 3 / (distribution(3) ** 3).sum(), distribution(4)),
    "equal": (distribution(5), distribution(5)),
    "target forbids": (distribution(6, zeros=2), distribution(7)),
    "draft forbids": (distribution(8), distribution(9, zeros=2)),
    "disjoint": (torch.tensor([0.5, 0.5, 0, 0]).double(), torch.tensor([0, 0, 0.25, 0.75]).double()),
    "certain target": (torch.tensor([0, 0, 1.0, 0]).double(), distribution(10)),
    "certain draft": (distribution(11), torch.tensor([0, 1.0, 0, 0]).double()),
}


def without_replacement(q: Tensor, count: int) -> dict[tuple[int, ...], float]:
    """The law of `count` draws from q without replacement (fewer if q allows fewer)."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(min(count, int((q > 0).sum()))):
        grown: dict[tuple[int, ...], float] = {}
        for drawn, weight in laws.items():
            left = q.clone()
            left[list(drawn)] = 0.0
            for token, prob in enumerate((left / left.sum()).tolist()):
                if prob > 0:
                    grown[*drawn, token] = weight * prob
        laws = grown
    return laws


def node_error(rule: Node, p: Tensor, q: Tensor | None, candidates: dict[tuple[int, ...], float]) -> float:
    """How far the emitted token's law is from p."""
    emitted = torch.zeros(SIZE, dtype=torch.float64)
    for tokens, weight in candidates.items():
        for (token, index), prob in law(partial(rule, p, q, tokens)).items():
            assert index is None or tokens[index] == token
            emitted[token] += weight * prob
    return float((emitted - p).abs().max())


@pytest.mark.parametrize("count", range(SIZE + 1))
@pytest.mark.parametrize("pair", PAIRS)
def test_children_drawn_without_replacement(pair: str, count: int) -> None:
    p, q = PAIRS[pair]

    assert node_error(recursive_rejection, p, q, without_replacement(q, count)) < TOLERANCE


def test_independent_draws_without_repeats() -> None:
    """Two independent draws are a draw without replacement once a repeated token is dropped."""
    p, q = PAIRS["dense"]
    pairs = itertools.product(range(SIZE), repeat=2)
    candidates = {(a, b): float(q[a] * q[b]) for a, b in pairs if a != b}
    candidates |= {(token,): float(q[token]) ** 2 for token in range(SIZE)}

    assert node_error(recursive_rejection, p, q, candidates) < TOLERANCE


@pytest.mark.parametrize("tokens", [(), (0,), (3,), (0, 1), (2, 0, 3), (3, 2, 1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_children_that_were_picked(pair: str, tokens: tuple[int, ...]) -> None:
    """Point masses: exact for every fixed list, so for every way to choose one that does not look ahead."""
    assert node_error(recursive_rejection, PAIRS[pair][0], None, {tokens: 1.0}) < TOLERANCE


def test_one_child_is_accepted_as_often_as_possible() -> None:
    """P(accept) = sum min(p, q): the best that one drawn child can do."""
    for p, q in PAIRS.values():
        accepted = sum(
            weight * prob
            for tokens, weight in without_replacement(q, 1).items()
            for (_, index), prob in law(partial(recursive_rejection, p, q, tokens)).items()
            if index is not None
        )
        assert accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=TOLERANCE)


def toy_model(seed: int, zeros: int = 0) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda prefix: distribution(seed, *prefix, len(prefix), zeros=zeros)


MODELS = {
    "dense": (toy_model(1), toy_model(2)),
    "equal": (toy_model(3), toy_model(3)),
    "target forbids": (toy_model(4, zeros=2), toy_model(5)),
    "draft forbids": (toy_model(6), toy_model(7, zeros=2)),
    "both forbid": (toy_model(8, zeros=1), toy_model(9, zeros=1)),
}


def sequence_law(model: Callable[[tuple[int, ...]], Tensor], length: int) -> dict[tuple[int, ...], float]:
    laws = {(): 1.0}
    for _ in range(length):
        laws = {
            (*prefix, token): weight * prob
            for prefix, weight in laws.items()
            for token, prob in enumerate(model(prefix).tolist())
            if prob > 0
        }
    return laws


def chains(
    q: Callable[[tuple[int, ...]], Tensor], length: int, ends: Callable[[tuple[int, ...]], bool]
) -> dict[tuple[int, ...], float]:
    """The law of a drafted chain that may end early by what has been drawn."""
    laws: dict[tuple[int, ...], float] = {}

    def grow(prefix: tuple[int, ...], weight: float) -> None:
        if len(prefix) == length or (prefix and ends(prefix)):
            laws[prefix] = weight
            return
        for token, prob in enumerate(q(prefix).tolist()):
            if prob > 0:
                grow((*prefix, token), weight * prob)

    grow((), 1.0)
    return laws


def emitted_law(
    rule: Chain,
    p: Callable[[tuple[int, ...]], Tensor],
    q: Callable[[tuple[int, ...]], Tensor],
    ends: Callable[[tuple[int, ...]], bool],
) -> tuple[dict[tuple[int, ...], float], float]:
    """The law of the first CHAIN + 1 tokens when one block is verified and the target goes on; and mean acceptance."""
    full: dict[tuple[int, ...], float] = {}
    mean = 0.0
    for chain, weight in chains(q, CHAIN, ends).items():
        at_target = [p(chain[:i]) for i in range(len(chain) + 1)]
        at_draft = [q(chain[:i]) for i in range(len(chain))]
        for (accepted, token), prob in law(partial(rule, at_target, at_draft, chain)).items():
            mean += weight * prob * accepted
            laws = {(*chain[:accepted], token): weight * prob}
            while len(next(iter(laws))) < CHAIN + 1:
                laws = {
                    (*prefix, following): share * more
                    for prefix, share in laws.items()
                    for following, more in enumerate(p(prefix).tolist())
                    if more > 0
                }
            for text, share in laws.items():
                full[text] = full.get(text, 0.0) + share
    return full, mean


def chain_error(rule: Chain, name: str, ends: Callable[[tuple[int, ...]], bool] = lambda prefix: False) -> float:
    p, q = MODELS[name]
    emitted, _ = emitted_law(rule, p, q, ends)
    expected = sequence_law(p, CHAIN + 1)
    return max(abs(emitted.get(text, 0.0) - expected.get(text, 0.0)) for text in emitted.keys() | expected.keys())


def token_by_token(
    p: Sequence[Tensor], q: Sequence[Tensor], tokens: Sequence[int], uniform: Callable[[], float], draw: Draw
) -> tuple[int, int]:
    """The classical rule for a chain, a right one."""
    for i, token in enumerate(tokens):
        emitted, index = recursive_rejection(p[i], q[i], [token], uniform, draw)
        if index is None:
            return i, emitted
    return len(tokens), draw(p[-1])


@pytest.mark.parametrize("name", MODELS)
def test_block_verification(name: str) -> None:
    assert chain_error(block_verification, name) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_block_verification_of_chains_that_end_early(name: str) -> None:
    """Assisted drafting stops after a token of low confidence: a decision about what has been drawn."""
    ends = {
        "after token 1": lambda prefix: prefix[-1] == 1,
        "by confidence": lambda prefix: float(MODELS[name][1](prefix[:-1])[prefix[-1]]) < 0.3,
    }
    for rule in ends.values():
        assert chain_error(block_verification, name, rule) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_is_right_too(name: str) -> None:
    """The harness accepts another right rule."""
    assert chain_error(token_by_token, name) < TOLERANCE


def test_a_block_accepts_more() -> None:
    gains = []
    for p, q in MODELS.values():
        block, single = (
            emitted_law(rule, p, q, lambda prefix: False)[1] for rule in (block_verification, token_by_token)
        )
        assert block >= single - TOLERANCE
        gains.append(block - single)
    assert max(gains) > 0.01


def test_empty_chain() -> None:
    p = distribution(1)

    emitted = law(partial(block_verification, [p], [], ()))

    assert emitted == {(0, token): pytest.approx(prob) for token, prob in enumerate(p.tolist())}


# Rules that stand in papers' misprints, old releases and tempting shortcuts. The harness must see through each.


def draws_from_p(p: Tensor, q: Tensor | None, tokens: Sequence[int], uniform, draw: Draw) -> tuple[int, int | None]:
    for index, token in enumerate(tokens):
        if uniform() * float(q[token]) < float(p[token]):
            return token, index
    return draw(p), None


def forgets_the_residual(p: Tensor, q: Tensor, tokens: Sequence[int], uniform, draw: Draw) -> tuple[int, int | None]:
    for index, token in enumerate(tokens):
        if uniform() * float(q[token]) < float(p[token]):
            return token, index
    rest = (p - q).clamp_min(0.0)
    return draw(rest / rest.sum() if rest.sum() > 0 else p), None


def forgets_what_is_used_up(
    p: Tensor, q: Tensor, tokens: Sequence[int], uniform, draw: Draw
) -> tuple[int, int | None]:
    for index, token in enumerate(tokens):
        if uniform() * float(q[token]) < float(p[token]):
            return token, index
        rest = (p - q).clamp_min(0.0)
        p = rest / rest.sum() if rest.sum() > 0 else p
    return draw(p), None


def accepts_when_the_draft_is_surer(
    p: Tensor, q: Tensor, tokens: Sequence[int], uniform, draw: Draw
) -> tuple[int, int | None]:
    for index, token in enumerate(tokens):
        if uniform() * float(p[token]) < float(q[token]):
            return token, index
        rest = (p - q).clamp_min(0.0)
        p = rest / rest.sum() if rest.sum() > 0 else p
    return draw(p), None


@pytest.mark.parametrize(
    "rule", [draws_from_p, forgets_the_residual, forgets_what_is_used_up, accepts_when_the_draft_is_surer]
)
def test_wrong_rules_for_drawn_children_are_caught(rule: Node) -> None:
    errors = [
        node_error(rule, p, q, without_replacement(q, 2))
        for p, q in (PAIRS["dense"], PAIRS["far apart"], PAIRS["target forbids"])
    ]

    assert max(errors) > 1e-3


def test_dividing_by_the_q_of_a_picked_child_is_caught() -> None:
    """The most likely token of the draft, verified as if it had been drawn."""
    p, q = PAIRS["dense"]
    best = (int(q.argmax()),)

    assert node_error(recursive_rejection, p, q, {best: 1.0}) > 1e-3
    assert node_error(recursive_rejection, p, None, {best: 1.0}) < TOLERANCE


def test_children_in_another_order_than_drawn_are_caught() -> None:
    """Sorting a sample by its probabilities is a tempting tidiness."""
    p, q = PAIRS["dense"]
    tidied: dict[tuple[int, ...], float] = {}
    for tokens, weight in without_replacement(q, 2).items():
        ordered = tuple(sorted(tokens, key=lambda token: -float(q[token])))
        tidied[ordered] = tidied.get(ordered, 0.0) + weight

    assert node_error(recursive_rejection, p, q, tidied) > 1e-3


def keeps_the_weight_unbounded(p, q, tokens, uniform, draw) -> tuple[int, int]:
    weight, accepted, rest = 1.0, 0, (p[0] - q[0]).clamp_min(0.0)
    for i, token in enumerate(tokens, start=1):
        weight *= float(p[i - 1][token]) / float(q[i - 1][token])
        last = i == len(tokens)
        left = p[i] if last else (min(weight, 1.0) * p[i] - q[i]).clamp_min(0.0)
        mass = float(left.sum())
        if uniform() < (min(weight, 1.0) if last else mass / (mass + 1.0 - min(weight, 1.0) + 1e-300)):
            accepted, rest = i, left
    return accepted, draw(rest / rest.sum() if rest.sum() > 0 else p[accepted])


def ignores_the_weight_in_the_residual(p, q, tokens, uniform, draw) -> tuple[int, int]:
    weight, accepted, rest = 1.0, 0, (p[0] - q[0]).clamp_min(0.0)
    for i, token in enumerate(tokens, start=1):
        weight = min(1.0, weight * float(p[i - 1][token]) / float(q[i - 1][token]))
        last = i == len(tokens)
        left = p[i] if last else (p[i] - q[i]).clamp_min(0.0)
        mass = float(left.sum())
        if uniform() < (weight if last else mass / (mass + 1.0 - weight + 1e-300)):
            accepted, rest = i, left
    return accepted, draw(rest / rest.sum() if rest.sum() > 0 else p[accepted])


def stops_at_the_first_refusal(p, q, tokens, uniform, draw) -> tuple[int, int]:
    """Block weights walked token by token."""
    weight, rest = 1.0, (p[0] - q[0]).clamp_min(0.0)
    for i, token in enumerate(tokens, start=1):
        weight = min(1.0, weight * float(p[i - 1][token]) / float(q[i - 1][token]))
        left = p[i] if i == len(tokens) else (weight * p[i] - q[i]).clamp_min(0.0)
        if not uniform() < weight:
            return i - 1, draw(rest / rest.sum() if rest.sum() > 0 else p[i - 1])
        rest = left
    return len(tokens), draw(p[-1])


@pytest.mark.parametrize(
    "rule", [keeps_the_weight_unbounded, ignores_the_weight_in_the_residual, stops_at_the_first_refusal]
)
def test_wrong_rules_for_blocks_are_caught(rule: Chain) -> None:
    assert max(chain_error(rule, name) for name in MODELS) > 1e-3
