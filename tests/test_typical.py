"""Typical acceptance: lossy, so it must be wanted, and says so; what it keeps, worked out by hand."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

import test_sampling_law as laws
import texts
import zoo
from hf_specdec import ArgumentError, Medusa, Speculation, SpeculativeOutput, generate
from hf_specdec.emit import Emitter, StopRules
from hf_specdec.processors import RowProcessors
from hf_specdec.sampling import Sampling
from hf_specdec.tree import DraftTree
from hf_specdec.verify import Scorer, Typical, typical_threshold
from strategies import STRATEGIES

LOSSY = {"verification": "typical", "lossless": False}


def test_the_threshold_is_that_of_the_paper() -> None:
    even = torch.full((4,), 0.25, dtype=torch.float64)
    assert typical_threshold(even) == pytest.approx(0.3 / 4)  # exp(-H) is a quarter
    sure = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert typical_threshold(sure) == pytest.approx(0.09)
    mixed = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert typical_threshold(mixed) == pytest.approx(min(0.09, 0.3 * exp(-log(2))))


def emitted(probs: list[list[float]], tree: DraftTree, processors: Any = ()) -> tuple[list[int], list[int]]:
    """What a round emits behind a pending token, and the accepted path; `probs` are p at each node."""
    emitter = Emitter(
        torch.tensor([[9, tree.tokens[0][0]]]),
        StopRules(StoppingCriteriaList([MaxLengthCriteria(99)])),
        0,
        None,
        False,
    )
    scorer = Scorer(RowProcessors(LogitsProcessorList(processors), 1), emitter, None)
    path = Typical(scorer, emitter, Sampling([(0, 0)])).verify(tree, torch.tensor([probs]).log())
    return emitter.generated[0], path[0]


SURE = [0.0, 1.0, 0.0, 0.0]  # chooses token 1
EVEN = [0.25, 0.25, 0.25, 0.25]


def test_what_the_target_finds_too_unlikely_is_dropped() -> None:
    p = [0.05, 0.95, 0.0, 0.0]  # the threshold is 0.09
    tokens, path = emitted([p, SURE], DraftTree([[0, 0]], [[-1, 0]]))
    assert path == [0]
    assert len(tokens) == 1


def test_likely_enough_is_kept_although_another_token_is_likelier() -> None:
    p = [0.10, 0.90, 0.0, 0.0]
    tokens, path = emitted([p, SURE], DraftTree([[0, 0]], [[-1, 0]]))
    assert tokens == [0, 1]  # the guess, and the one that p behind it allows
    assert path == [0, 1]


def test_a_flat_law_keeps_what_a_sharp_one_drops() -> None:
    flat = [0.08] * 12 + [0.04]  # exp(-H) = 0.079: the threshold is 0.024
    sharp = [0.04, *[0.0] * 11, 0.96]
    rest = [*[0.0] * 12, 1.0]
    tree = DraftTree([[0, 0]], [[-1, 0]])
    assert emitted([flat, rest], tree)[0] == [0, 12]
    assert emitted([sharp, rest], tree)[1] == [0]


def test_the_longest_path_wins_over_a_likelier_child() -> None:
    """Token 1 is likelier at the root, but nothing kept stands behind it."""
    p = [0.3, 0.7, 0.0, 0.0]
    tree = DraftTree([[0, 1, 0, 2]], [[-1, 0, 0, 2]])
    tokens, path = emitted([p, SURE, EVEN, SURE], tree)
    assert path == [0, 2, 3]
    assert tokens == [0, 2, 1]


def test_of_equally_long_paths_the_likeliest_wins() -> None:
    p, q = [0.4, 0.6, 0.0, 0.0], [0.0, 0.0, 0.45, 0.55]
    tree = DraftTree([[0, 1, 0, 2, 3, 3]], [[-1, 0, 0, 2, 2, 1]])
    # 1 then 3: 0.6 * 0.25; 0 then 2: 0.4 * 0.45; 0 then 3: 0.4 * 0.55
    tokens, path = emitted([p, EVEN, q, SURE, SURE, SURE], tree)
    assert path == [0, 2, 4]
    assert tokens == [0, 3, 1]


def test_a_processor_with_a_state_takes_the_likeliest_child() -> None:
    p = [0.3, 0.7, 0.0, 0.0]
    tree = DraftTree([[0, 1, 0, 2]], [[-1, 0, 0, 2]])
    assert emitted([p, SURE, EVEN, SURE], tree, [lambda ids, scores: scores])[1] == [0, 1]


def test_overflow_behind_a_guess_drops_what_follows_it() -> None:
    p, broken = [0.5, 0.5, 0.0, 0.0], [float("nan")] * 4
    tree = DraftTree([[0, 0, 1, 1]], [[-1, 0, 0, 1]])
    tokens, path = emitted([p, EVEN, broken, SURE], tree)
    assert path == [0, 1, 3]
    assert tokens == [0, 1, 1]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return zoo.make("llama")


def run(target: PreTrainedModel, strategy: Any, **settings: Any) -> SpeculativeOutput:
    arguments = {"max_new_tokens": 30, "do_sample": True, "top_k": 0, "seed": 3, **LOSSY} | settings
    output = generate(target, **texts.padded([9, 5]), strategy=strategy, return_dict_in_generate=True, **arguments)
    assert isinstance(output, SpeculativeOutput)
    return output


def test_the_output_says_that_it_is_lossy(target: PreTrainedModel) -> None:
    strategy = Medusa(heads=zoo.make_heads(target), node_cost=0)
    lossy, keyed = run(target, strategy), run(target, strategy, verification="keyed", lossless=True)
    assert (lossy.speculation.verification, lossy.speculation.lossless) == ("typical", False)
    assert (keyed.speculation.verification, keyed.speculation.lossless) == ("keyed", True)
    assert lossy.speculation.to_dict()["lossless"] is False
    assert lossy.sequences.tolist() != keyed.sequences.tolist()
    assert lossy.speculation.accepted > keyed.speculation.accepted


@pytest.mark.parametrize("name", ["medusa_tree", "tree", "scripted", "auto_heads"])
def test_one_seed_one_text(target: PreTrainedModel, name: str) -> None:
    known = [list(range(60)), list(range(60))]
    arguments = STRATEGIES[name](zoo.make_draft(target), known)
    strategy = arguments.pop("strategy")
    first, second = (run(target, strategy, **arguments).sequences.tolist() for _ in range(2))
    assert first == second


def test_without_guesses_it_is_plain_sampling(target: PreTrainedModel) -> None:
    assert torch.equal(
        run(target, "none").sequences, run(target, "none", verification="keyed", lossless=True).sequences
    )


@pytest.mark.parametrize("recorded", [False, True])
def test_greedy_decoding_stays_exact(target: PreTrainedModel, recorded: bool) -> None:
    output = run(target, Medusa(heads=zoo.make_heads(target), node_cost=0), do_sample=False, output_scores=recorded)
    assert output.sequences.tolist() == texts.greedy(target, **texts.padded([9, 5]), max_new_tokens=30).tolist()
    assert (output.speculation.verification, output.speculation.lossless) == ("greedy", True)


def test_recorded_logits_belong_to_the_emitted_tokens(target: PreTrainedModel) -> None:
    output = run(target, Medusa(heads=zoo.make_heads(target), node_cost=0), output_logits=True)
    batch = texts.padded([9, 5])
    assert output.speculation.accepted > 0
    for row, text in enumerate(texts.rows_without_padding(batch, output.sequences)):
        with torch.no_grad():
            expected = target(torch.tensor([text])).logits[0, -31:-1]
        torch.testing.assert_close(torch.stack([step[row] for step in output.logits]), expected, rtol=1e-3, atol=1e-4)


def test_the_law_test_sees_it() -> None:
    observed, _ = laws.sample("scripted", "plain", **LOSSY)
    assert laws.p_value(observed, "plain") < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification": "typical"}, "lossless=False"),
        ({"verification": "typical", "lossless": True}, "lossless=False"),
        ({"lossless": False}, "'typical'"),
        ({"verification": "rejection", "lossless": False}, "'typical'"),
        ({"verification": "typical", "lossless": 0}, "lossless=0"),
    ],
)
def test_it_must_be_wanted(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Speculation("prompt_lookup", **settings)
    target = zoo.make("llama")
    target.register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    with pytest.raises(ArgumentError, match=message):
        generate(target, **texts.inputs(texts.prompt(5)), strategy="prompt_lookup", **settings)


def test_lossless_belongs_to_a_strategy(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="belong to strategy="):
        generate(target, **texts.inputs(texts.prompt(5)), lossless=False)
