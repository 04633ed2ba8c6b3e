"""Sampled texts have the model's law, end to end: the joint law of three tokens on a vocabulary of six.

Two tests together: chi-square over the 216 texts, and a z-test of the mean log q/p, which sees a drift towards the
draft that chi-square misses. The expected law is enumerated with plain forwards of the model. All runs have fixed
seeds, so the outcome is always the same; a right rule would fail with one set of seeds in 10 000. The power is shown,
not assumed: `test_a_wrong_rule_fails` has the same tests refuse each wrong rule with p < 1e-6 from as many samples, an
ensemble that gives the draft three tenths of the say among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper

import texts
import zoo
from hf_specdec import Assisted, DraftContext, Medusa, Scripted, Tree, generate
from hf_specdec import verify as rules
from hf_specdec.sampling import Children, Sampling
from hf_specdec.verify import block_verification

VOCAB = 6
LENGTH = 3
ROWS = 250
RUNS = 16
ALPHA = 1e-4
PROMPT = torch.tensor([[1, 4, 2, 1, 4]])
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_k": 0},
    "temperature and top_k": {"temperature": 1.4, "top_k": 4},
}


@cache
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target that is not too sure of anything, and a draft that disagrees with it a good deal."""
    target, draft = (zoo.make("llama", seed=seed, vocab_size=VOCAB) for seed in (1, 2))
    with torch.no_grad():
        for model in (target, draft):
            model.lm_head.weight *= 0.5
    draft.generation_config.assistant_confidence_threshold = 0
    return target, draft


@cache
def exact_law(case: str, of_draft: bool = False) -> Tensor:
    """Probabilities of all VOCAB ** LENGTH texts, by plain forwards."""
    model = models()[1 if of_draft else 0]
    continuations = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    text = torch.cat([PROMPT.expand(len(continuations), -1), continuations], dim=1)
    with torch.no_grad():
        logits = model(text).logits[:, PROMPT.shape[1] - 1 : -1].float()
    settings = SETTINGS[case]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings["temperature"])])
    if settings["top_k"]:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    probs = warpers(text, logits.flatten(0, 1)).double().softmax(-1).view(*logits.shape)
    return probs.gather(-1, continuations[..., None]).squeeze(-1).prod(-1)


def look_up(context: DraftContext) -> list[list[list[int]]]:
    """Picked guesses, two branches, by the row's own text: point masses."""
    return [[[(text[-1] + 1) % VOCAB, text[-2]], [(text[-1] + 3) % VOCAB]] for text in context.texts]


STRATEGIES: dict[str, dict[str, Any]] = {
    "assisted": {"strategy": Assisted()},
    "assisted_unsure": {"strategy": Assisted(), "assistant_confidence_threshold": 0.3},
    "tree": {"strategy": Tree(nodes=9, depth=2, branching=3, width=2, min_gain=0.0, min_score=0.0)},
    "scripted": {"strategy": Scripted(look_up)},
    "prompt_lookup": {"strategy": "prompt_lookup"},
    "medusa": {"strategy": Medusa(heads=zoo.make_heads(models()[0]), tree=[(0,), (1,), (0, 0), (0, 1), (1, 0)])},
}


def sample(strategy: str, case: str, **settings: Any) -> tuple[Tensor, float]:
    """RUNS batches of ROWS texts as indices into `exact_law`, and how often a draft was accepted."""
    target, draft = models()
    arguments = dict(STRATEGIES[strategy])
    if strategy not in ("scripted", "prompt_lookup", "medusa"):
        arguments["assistant_model"] = draft
    powers = torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    indices, accepted, drafted = [], 0, 0
    for run in range(RUNS):
        output = generate(
            target,
            **texts.inputs(PROMPT.expand(ROWS, -1)),
            do_sample=True,
            max_new_tokens=LENGTH,
            seed=1000 + run,
            return_dict_in_generate=True,
            **SETTINGS[case],
            **arguments,
            **settings,
        )
        indices.append((output.sequences[:, PROMPT.shape[1] :] * powers).sum(-1))
        accepted += output.speculation.accepted
        drafted += output.speculation.drafted
    return torch.cat(indices), accepted / drafted


def p_value(observed: Tensor, case: str) -> float:
    """Of the two tests together."""
    law = exact_law(case)
    return min(1.0, 2 * min(chi_square(observed, law), drift(observed, law, exact_law("plain", of_draft=True))))


def chi_square(observed: Tensor, law: Tensor) -> float:
    """Cells that expect fewer than five texts are put together."""
    counts = torch.bincount(observed, minlength=len(law)).double()
    assert bool((counts[law < 1e-12] == 0).all()), "impossible texts were emitted"
    expected = law * len(observed)
    rare = expected < 5
    cells = torch.cat([counts[~rare], counts[rare].sum()[None]])
    means = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if means[-1] < 5:
        cells, means = cells[:-1], means[:-1]
    return float(stats.chisquare(cells.numpy(), (means * cells.sum() / means.sum()).numpy()).pvalue)


def drift(observed: Tensor, law: Tensor, draft_law: Tensor) -> float:
    """Whether texts that the draft likes better than the target come too often, or too seldom."""
    liking = torch.where(law > 1e-12, draft_law.log() - law.clamp_min(1e-300).log(), 0.0)
    mean = float((law * liking).sum())
    variance = float((law * liking**2).sum()) - mean**2
    z = (float(liking[observed].mean()) - mean) / (variance / len(observed)) ** 0.5
    return float(2 * stats.norm.sf(abs(z)))


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rejection_sampling(strategy: str, case: str) -> None:
    observed, rate = sample(strategy, case, verification="rejection")

    assert p_value(observed, case) > ALPHA
    if strategy != "prompt_lookup":
        assert 0.1 < rate < 0.9


@pytest.mark.parametrize("strategy", ["assisted", "tree", "medusa"])
def test_keyed_sampling(strategy: str) -> None:
    observed, _ = sample(strategy, "plain")

    assert p_value(observed, "plain") > ALPHA


def test_rejection_under_processors_of_the_prefix() -> None:
    """A stateful-looking processor takes trees and chains through the node-by-node rule, in lock-step."""

    def neutral(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    observed, _ = sample("assisted", "plain", verification="rejection", logits_processor=[neutral])

    assert p_value(observed, "plain") > ALPHA


def residual_is_p(p: Tensor, q: Tensor | None, tokens: Any, uniform: Any, draw: Any) -> tuple[int, int | None]:
    for index, token in enumerate(tokens):
        if uniform() * (float(q[token]) if q is not None else 1.0) < float(p[token]):
            return token, index
    return draw(p), None


def block_with_residual_p(p: Any, q: Any, tokens: Any, uniform: Any, draw: Any) -> tuple[int, int]:
    for i, token in enumerate(tokens):
        if not uniform() * float(q[i][token]) < float(p[i][token]):
            return i, draw(p[i])
    return len(tokens), draw(p[-1])


def believes_in_q(p: Any, q: Any, tokens: Any, uniform: Any, draw: Any) -> tuple[int, int]:
    """An ensemble of target and draft, as a lossy option of other libraries has it."""
    mixed = [0.7 * p_i + 0.3 * q_i for p_i, q_i in zip(p, [*q, p[-1]], strict=True)]
    return block_verification(mixed, q, tokens, uniform, draw)


@pytest.mark.parametrize(
    ("strategy", "name", "rule"),
    [
        ("tree", "recursive_rejection", residual_is_p),
        ("scripted", "recursive_rejection", residual_is_p),
        ("assisted", "block_verification", block_with_residual_p),
        ("assisted", "block_verification", believes_in_q),
    ],
)
def test_a_wrong_rule_fails(
    monkeypatch: pytest.MonkeyPatch, strategy: str, name: str, rule: Callable[..., Any]
) -> None:
    monkeypatch.setattr(rules, name, rule)

    observed, _ = sample(strategy, "plain", verification="rejection")

    assert p_value(observed, "plain") < 1e-6


def test_a_greedy_draft_posing_as_sampled_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft proposes its most likely token and reports softmax: the classical mistake."""

    def greedy_children(self: Sampling, rows: Any, steps: Any, scores: Tensor, counts: Any) -> list[Children]:
        q = scores.double().softmax(-1)
        best = q.argmax(-1).tolist()
        return [
            Children([token], [float(q[i, token])], [float(q[i, token])], q[i])
            for i, (token, _) in enumerate(zip(best, counts, strict=True))
        ]

    monkeypatch.setattr(Sampling, "draw_children", greedy_children)

    observed, _ = sample("assisted", "plain", verification="rejection")

    assert p_value(observed, "plain") < 1e-6


@pytest.mark.parametrize("strategy", ["tree", "assisted"])
def test_a_draft_whose_probabilities_underflow(strategy: str) -> None:
    """At a temperature near zero the draft knows one token only."""
    model = zoo.make("llama")
    settings = {**texts.inputs(texts.prompt(9)), "max_new_tokens": 12}
    expected = texts.greedy(model, **settings)

    for seed in range(3):
        ours = generate(
            model,
            **settings,
            strategy=strategy,
            assistant_model=zoo.make_draft(model),
            do_sample=True,
            temperature=1e-3,
            verification="rejection",
            seed=seed,
        )
        assert ours.tolist() == expected.tolist()
