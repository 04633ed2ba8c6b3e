"""Jacobi iteration: guesses are replaced by the target's answers until they stop changing, and that is the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import texts
import zoo
from contexts import context
from hf_specdec import (
    ArgumentError,
    DraftContext,
    DrafterCandidateGenerator,
    Jacobi,
    RoundOutputs,
    generate,
    stock_assisted,
)
from hf_specdec.sampling import Sampling

PROMPT = texts.prompt(12)


def outputs(tokens: list[int]) -> RoundOutputs:
    """A target that answers with these tokens, one a node of the only row."""
    return RoundOutputs(torch.nn.functional.one_hot(torch.tensor([tokens]), zoo.VOCAB_SIZE) * 10.0, None)


def grow(state: DraftContext, tokens: list[int]) -> None:
    state.texts[0] += tokens
    state.num_generated[0] += len(tokens)


def test_first_guesses_are_copies_of_the_pending_token() -> None:
    state = context([[7, 8, 9, 10], [3, 4]], target=None, budgets=[9, 9])

    tree = Jacobi(block=3).begin(state).propose(state)

    assert tree.tokens == [[10, 10, 10, 10], [4, 4, 4, 4]]
    assert tree.is_chain


def test_a_round_keeps_the_answers_behind_the_newest_token() -> None:
    state = context([[1, 2, 3, 4, 5]], target=None)
    drafter = Jacobi(block=4).begin(state)
    tree = drafter.propose(state)

    # Node 1 was right: 5 is accepted, 31 is the new token, the answers of nodes 2 to 4 stay.
    grow(state, [5, 31])
    drafter.observe(tree, [[0, 1]], outputs([5, 31, 32, 33, 34]))

    assert drafter.propose(state).tokens == [[31, 32, 33, 34, 34]]


def test_everything_accepted_starts_afresh() -> None:
    state = context([[1, 2, 3]], target=None)
    drafter = Jacobi(block=2).begin(state)
    tree = drafter.propose(state)
    grow(state, [3, 3, 40])

    drafter.observe(tree, [[0, 1, 2]], outputs([3, 3, 40]))

    assert drafter.propose(state).tokens == [[40, 40, 40]]


def test_budgets_are_limits() -> None:
    state = context([list(range(1, 11))] * 3, target=None, budgets=[0, 2, 9])

    assert Jacobi(block=5).begin(state).propose(state).num_drafted == [0, 2, 5]


@pytest.mark.parametrize("eos", [3, [90, 3]])
def test_blocks_end_in_front_of_eos(eos: int | list[int]) -> None:
    state = context([[1, 2, 3, 4]], target=None, eos_token_id=eos)
    drafter = Jacobi(block=3).begin(state)
    tree = drafter.propose(state)

    grow(state, [50])
    drafter.observe(tree, [[0]], outputs([50, 51, 3, 52]))

    assert drafter.propose(state).tokens == [[50, 51]]


def test_behind_an_eos_in_the_prompt_nothing_is_guessed() -> None:
    state = context([[1, 3]], target=None, eos_token_id=3)

    assert Jacobi().begin(state).propose(state).tokens == [[3]]


def test_rows_that_sat_out_keep_no_block() -> None:
    state = context([[1, 2, 3], [4, 5, 6]], target=None)
    drafter = Jacobi(block=2).begin(state)
    tree = drafter.propose(state)
    state.texts[1].append(50)
    both = RoundOutputs(torch.cat([outputs([9, 9, 9]).logits, outputs([50, 51, 52]).logits]), None)

    drafter.observe(tree, [[], [0]], both)

    assert drafter.propose(state).tokens == [[3, 3, 3], [50, 51, 52]]


@pytest.mark.parametrize("sampling", [Sampling([(5, 0)]), Sampling([(5, 0)], torch.Generator())])
def test_overflow_behind_a_wrong_guess_is_no_error(sampling: Sampling) -> None:
    state = context([[1, 2, 3]], target=None, sampling=sampling)
    drafter = Jacobi(block=2).begin(state)
    tree = drafter.propose(state)
    broken = torch.full((1, 3, zoo.VOCAB_SIZE), torch.nan)
    grow(state, [9])

    drafter.observe(tree, [[0]], RoundOutputs(broken, None))

    assert drafter.propose(state).num_drafted == [2]


def plain_rounds(target: PreTrainedModel, sampling: Sampling, new_tokens: int) -> tuple[list[int], int]:
    """Jacobi decoding by hand, with a plain forward of the whole text a round: the text, and how many rounds."""
    state = context(PROMPT.tolist(), target=target, sampling=sampling)
    drafter = Jacobi(block=6).begin(state)
    rounds = 0
    while state.num_generated[0] < new_tokens:
        tree = drafter.propose(state)
        chain = tree.tokens[0]
        logits = target(torch.tensor([state.texts[0] + chain[1:]])).logits[:, -len(chain) :].detach()
        steps = [state.num_generated[0] + depth for depth in range(len(chain))]
        answers = sampling.choose([0] * len(chain), steps, logits[0])
        path = [0]
        while path[-1] + 1 < len(chain) and chain[path[-1] + 1] == answers[path[-1]]:
            path.append(path[-1] + 1)
        grow(state, answers[: len(path)])
        drafter.observe(tree, [path], RoundOutputs(logits, None))
        rounds += 1
        following = drafter.propose(state).tokens[0][1:]
        assert following[: len(chain) - len(path)] == answers[len(path) :]
    return state.texts[0], rounds


@pytest.mark.parametrize("seeds", [None, [(5, 0)]], ids=["greedy", "keyed"])
def test_the_fixed_point_is_the_text(seeds: list[tuple[int, int]] | None) -> None:
    """Answers use the noise of their own positions, so at T > 0 too a block settles on the sampled text."""
    target = zoo.make("opt")  # learned positions: a token tells more than the one in front of it
    text, rounds = plain_rounds(target, Sampling(seeds), new_tokens=30)
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 30}
    expected = texts.greedy(target, **settings) if seeds is None else texts.sampled(target, seed=5, **settings)

    assert text[: expected.shape[1]] == expected[0].tolist()
    assert rounds < 30


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "keyed": {"do_sample": True, "seed": texts.SEED, "temperature": 0.7, "top_k": 20},
    "rejection": {"do_sample": True, "seed": texts.SEED, "verification": "rejection", "temperature": 0.4},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_in_generate(target: PreTrainedModel, case: str) -> None:
    """Some guesses are right, and no call takes more forwards than tokens."""
    stats = generate(
        target,
        **texts.inputs(PROMPT),
        max_new_tokens=40,
        strategy="jacobi",
        return_dict_in_generate=True,
        **SETTINGS[case],
    ).speculation

    assert stats.accepted > 0
    assert stats.rounds < stats.emitted == 40


def test_text_when_sampling_is_the_stock_text(target: PreTrainedModel) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 40}
    expected = texts.sampled(target, temperature=0.7, top_k=20, **settings)

    assert generate(target, **settings, strategy=Jacobi(), **SETTINGS["keyed"]).tolist() == expected.tolist()


def test_in_the_stock_loop(target: PreTrainedModel) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 20, "do_sample": False}
    expected = texts.greedy(target, **settings)

    with stock_assisted(target, DrafterCandidateGenerator(Jacobi(block=4), target)) as stock:
        ours = stock.generate(**settings, pad_token_id=texts.PAD, prompt_lookup_num_tokens=1)

    assert ours.tolist() == expected.tolist()


def test_chains_run_under_any_attention() -> None:
    assert Jacobi().chains_only


def test_a_call_leaves_the_object_alone(target: PreTrainedModel) -> None:
    drafter = Jacobi(block=4)
    before = dict(vars(drafter))

    generate(target, **texts.inputs(PROMPT), max_new_tokens=8, do_sample=False, strategy=drafter)

    assert vars(drafter) == before


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
def test_block_is_checked(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Jacobi\(block="):
        Jacobi(block=value)
