"""Lookahead decoding: the pool of n-grams, the window as a tree, and both in a call."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import texts
import zoo
from contexts import context
from hf_specdec import ArgumentError, DraftTree, Lookahead, RoundOutputs, generate
from hf_specdec.drafters import lookahead
from hf_specdec.drafters.lookahead_pool import NgramPool
from hf_specdec.drafters.lookahead_window import LookaheadWindow

NO_TOKENS: frozenset[int] = frozenset()


# --- the pool


@given(
    ngrams=st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=60),
    max_continuations=st.integers(1, 3),
    max_keys=st.integers(1, 4),
)
def test_pool_against_a_list(ngrams: list[tuple[int, ...]], max_continuations: int, max_keys: int) -> None:
    """Both bounds drop what was added least recently."""
    pool = NgramPool(3, max_continuations, max_keys)
    keys: list[int] = []
    known: dict[int, list[tuple[int, ...]]] = {}
    for ngram in ngrams:
        pool.add(ngram)
        keys = [key for key in keys if key != ngram[0]] + [ngram[0]]
        for forgotten in keys[:-max_keys]:
            del known[forgotten]
        keys = keys[-max_keys:]
        others = [one for one in known.get(ngram[0], []) if one != ngram[1:]]
        known[ngram[0]] = [*others, ngram[1:]][-max_continuations:]

    assert len(pool) == len(keys)
    for key in range(5):
        assert pool.continuations(key) == known.get(key, [])[::-1]


def test_pool_reads_a_growing_text_once() -> None:
    pool = NgramPool(3, 8)
    pool.read([1, 2])
    assert len(pool) == 0

    pool.read([1, 2, 3, 1])
    pool.read([1, 2, 3, 1, 2, 4])

    assert pool.continuations(1) == [(2, 4), (2, 3)]
    assert pool.continuations(2) == [(3, 1)]
    assert pool.continuations(3) == [(1, 2)]


def test_pool_keeps_no_excluded_tokens() -> None:
    pool = NgramPool(2, 4, excluded=frozenset({9}))

    for ngram in ([1, 9], [9, 1], [1, 2]):
        pool.add(ngram)

    assert (pool.continuations(1), pool.continuations(9)) == ([(2,)], [])


def test_pool_extends_a_path_by_the_latest_continuations() -> None:
    pool = NgramPool(3, 8)
    for ngram in ([1, 2, 9], [1, 2, 3], [3, 4, 1], [9, 9, 9]):
        pool.add(ngram)

    assert pool.extended([5, 1], 7) == [5, 1, 2, 3, 4, 1, 2]
    assert pool.extended([5, 4], 7) == [5, 4]
    assert pool.extended([1, 2, 3], 2) == [1, 2]
    assert pool.continuations(1) == [(2, 3), (2, 9)]


# --- the window


def filled(width: int, ngram: int, rounds: int) -> LookaheadWindow:
    """A window whose tokens all differ: level l, column c holds 100 * l + c."""
    window = LookaheadWindow(width, ngram, [1], NO_TOKENS)
    window.levels = [list(range(width))]
    for level in range(1, rounds + 1):
        list(window.advance([100 * level + column for column in range(width)]))
    return window


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_tree_sees_what_the_papers_mask_sees(levels: int) -> None:
    """Level l, column c sees the text, columns 0 to c of level 0, and column c of levels 1 to l."""
    width = 5
    window = filled(width, ngram=5, rounds=levels - 1)

    tree = DraftTree.from_paths([999], [list(window.paths())])

    assert sorted(tree.tokens[0][1:]) == sorted(100 * level + c for level in range(levels) for c in range(width))
    mask = tree.ancestors()[0]
    for node, (token, depth) in enumerate(zip(tree.tokens[0][1:], tree.row_depths[0][1:], strict=True), start=1):
        level, column = divmod(token, 100)
        expected = {999, *range(column + 1), *(100 * above + column for above in range(1, level + 1))}
        assert {tree.tokens[0][other] for other in mask[node].nonzero().flatten().tolist()} == expected
        assert depth == 1 + column + level


def test_window_fills_one_level_a_round_then_gives_ngrams() -> None:
    window = filled(2, ngram=4, rounds=0)

    assert list(window.advance([100, 101])) == []
    assert list(window.advance([200, 201])) == []
    assert window.levels == [[0, 1], [100, 101], [200, 201]]
    assert list(window.advance([300, 301])) == [(0, 100, 200, 300), (1, 101, 201, 301)]
    assert window.levels == [[100, 101], [200, 201], [300, 301]]


def test_window_shrinks_from_the_right() -> None:
    window = filled(4, ngram=4, rounds=2)
    deepest = [len(path) for path in window.paths()]
    assert deepest == [3, 4, 5, 6]

    for budget, width in [(9, 4), (5, 3), (4, 2), (3, 1), (2, 0), (0, 0)]:
        window.shrink(budget)
        assert window.width == width
        assert len(window.levels) == 3
    assert list(window.advance([])) == []


def test_window_never_holds_excluded_tokens() -> None:
    window = LookaheadWindow(6, 3, [7, 9, 8], frozenset({9}))
    ngrams = [ngram for _ in range(3) for ngram in window.advance([9, 1, 9, 2, 9, 3])]

    assert not any(9 in ngram for ngram in ngrams)
    assert not any(9 in level for level in window.levels)
    assert {window.levels[0][0], window.levels[0][2]} <= {7, 8}
    assert window.levels[0][1::2] == [1, 2, 3]


def test_window_starts_with_tokens_of_the_prompt_and_its_own_randomness() -> None:
    state = random.getstate()
    text = list(range(50, 90))

    first, again, other = (LookaheadWindow(8, 3, prompt, NO_TOKENS) for prompt in (text, text, text[:-1]))

    assert set(first.levels[0]) <= set(text)
    assert first.levels == again.levels != other.levels
    assert random.getstate() == state


# --- the strategy


def outputs(tree: DraftTree, answers: dict[int, int]) -> RoundOutputs:
    """A target that answers to each token with another one."""
    tokens = tree.padded_tokens().apply_(lambda token: answers.get(token, 0))
    return RoundOutputs(torch.nn.functional.one_hot(tokens, zoo.VOCAB_SIZE).float(), None)


def test_rounds_by_hand() -> None:
    """Trigrams: one round fills the window, each further one gives an n-gram a column."""
    state = context([[20, 21, 22, 23], [30, 31]], target=None)
    drafter = Lookahead(window=2, ngram=3, guesses=2).begin(state)
    drafter.observe(DraftTree.roots([23, 31]), [[0], [0]], outputs(DraftTree.roots([23, 31]), {}))
    tree = drafter.propose(state)
    assert tree.num_drafted == [2, 2]
    (a, b), (c, d) = tree.tokens[0][1:], tree.tokens[1][1:]
    assert {a, b} <= {20, 21, 22, 23}
    assert {c, d} <= {30, 31}

    answers = {token: token + 40 for token in range(20, 40)} | {token: token - 30 for token in range(60, 80)}
    drafter.observe(tree, [[0], []], outputs(tree, answers))  # the second row sat out
    state.texts[0].append(b)
    tree = drafter.propose(state)
    assert sorted(tree.tokens[0][1:])[:2] == sorted([a, b])
    assert {a + 40, b + 40} <= set(tree.tokens[0])
    assert tree.tokens[1] == [31, c, d]

    drafter.observe(tree, [[0], []], outputs(tree, answers))
    state.texts[0].append(a)
    tree = drafter.propose(state)
    first_steps = [tree.tokens[0][node] for node in tree.children[0][0]]
    assert a + 40 in first_steps
    assert tree.child(0, tree.child(0, 0, a + 40), a + 10) is not None


def test_guesses_come_from_the_text_too() -> None:
    state = context([[5, 6, 7, 8, 9, 5]], target=None)

    tree = Lookahead(window=1, ngram=4, guesses=1).begin(state).propose(state)

    assert DraftTree.from_paths([5], [[[6, 7, 8]]]).tokens[0][1:] == tree.tokens[0][-3:]


def test_nodes_left_by_shared_prefixes_continue_the_guesses() -> None:
    """The tree never gets larger than the paper's: (W + G)(N - 1) guesses."""
    text = [5, 6, 7, 8, 5, 6, 7, 8, 5]
    tree = (
        Lookahead(window=1, ngram=3, guesses=9)
        .begin(context([text], target=None))
        .propose(context([text], target=None))
    )
    assert tree.num_drafted == [1 + 6]  # three bigrams in a row: 6 7, 8 5, 6 7

    text = [token for other in range(10, 40) for token in (5, other, 6, other + 30)] + [5]
    for window, guesses in [(1, 1), (2, 5), (3, 20)]:
        state = context([text], target=None)
        tree = Lookahead(window, 3, guesses).begin(state).propose(state)
        assert tree.num_drafted == [(window + guesses) * 2]


def test_budgets_are_limits() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3
    for budget in range(9):
        state = context([text], target=None, budgets=[budget])
        tree = Lookahead(window=5, ngram=4, guesses=3).begin(state).propose(state)

        assert max(tree.row_depths[0]) <= budget


def test_drafts_are_the_same_in_every_call(target: PreTrainedModel) -> None:
    settings = {**texts.inputs(texts.prompt(12)), "max_new_tokens": 30, "return_dict_in_generate": True}

    first, again = (
        generate(target, **settings, do_sample=False, strategy=Lookahead(5, 3, 4)).speculation.to_dict()
        for _ in range(2)
    )

    assert {k: v for k, v in first.items() if "seconds" not in k} == {
        k: v for k, v in again.items() if "seconds" not in k
    }


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "keyed"])
def test_up_to_the_last_token(target: PreTrainedModel, sampling: bool) -> None:
    """The window gets narrower where the text must end, and the call goes on."""
    mode = {"do_sample": True, "seed": texts.SEED, **texts.SAMPLING} if sampling else {"do_sample": False}
    for new_tokens in range(1, 14):
        settings = {**texts.inputs(texts.prompt(12)), "max_new_tokens": new_tokens}
        expected = (
            texts.sampled(target, **texts.SAMPLING, **settings) if sampling else texts.greedy(target, **settings)
        )

        output = generate(target, **settings, **mode, strategy=Lookahead(6, 4, 5), return_dict_in_generate=True)

        assert output.sequences.tolist() == expected.tolist()
        assert output.speculation.rounds <= new_tokens


def test_text_that_repeats_is_guessed() -> None:
    """A model that runs into a loop: after one turn the n-grams are known."""
    target = zoo.make("gpt2", initializer_range=0.05)
    settings = {**texts.inputs(texts.prompt(6)), "max_new_tokens": 80, "do_sample": False}

    output = generate(target, **settings, strategy=Lookahead(4, 4, 4), return_dict_in_generate=True)

    assert len(set(output.sequences[0, 30:].tolist())) > 1
    assert output.speculation.tokens_per_forward > 2


def test_sizes_follow_the_cost_of_a_node(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(drafter: Lookahead, cost: float) -> tuple[int, int, int]:
        monkeypatch.setattr(lookahead, "node_cost", lambda model: cost)
        return drafter._size(context([[1, 2]], target=target))

    assert sizes(Lookahead(), 2**-10) == (15, 5, 15)
    smaller = [sizes(Lookahead(), cost) for cost in (2**-10, 2**-8, 2**-6, 2**-4)]
    assert smaller == sorted(set(smaller), reverse=True)
    assert sizes(Lookahead(), 1.0) == smaller[-1]
    assert sizes(Lookahead(window=3), 2**-10) == (3, 5, 15)
    assert sizes(Lookahead(ngram=2, guesses=1), 2**-10) == (15, 2, 1)


def test_cost_is_not_measured_when_all_sizes_are_given(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookahead, "node_cost", lambda model: pytest.fail("measured"))

    generate(target, **texts.inputs(texts.prompt(6)), max_new_tokens=4, do_sample=False, strategy=Lookahead(2, 2, 2))


def test_a_call_leaves_the_object_alone(target: PreTrainedModel) -> None:
    drafter = Lookahead(window=3, ngram=3)
    before = dict(vars(drafter))

    generate(target, **texts.inputs(texts.prompt(9)), max_new_tokens=8, do_sample=False, strategy=drafter)

    assert vars(drafter) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 0), ("window", 2.0), ("ngram", 1), ("ngram", 0), ("guesses", 0), ("guesses", -3), ("guesses", True)],
)
def test_settings_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"Lookahead\({name}={value}"):
        Lookahead(**{name: value})
