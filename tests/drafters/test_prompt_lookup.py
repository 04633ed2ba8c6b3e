"""The text as its own draft, against a naive search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

import texts
from contexts import context
from hf_specdec import PromptLookup, generate


def naive(text: list[int], max_ngram: int, length: int, branches: int, per_match: int) -> list[list[int]]:
    """Continuations after earlier occurrences of the last tokens: longest match first, then latest.

    Each is as long as its match promises, running on into itself where the text ends; what an earlier one says already
    does not count.
    """
    found: list[list[int]] = []
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            longer = n < max_ngram and n < end and text[end - n - 1 : end] == text[-n - 1 :]
            if text[end - n : end] == text[-n:] and not longer and len(found) < branches:
                path = (text[end:] * length)[: min(length, per_match * n)]
                if not any(other[: len(path)] == path for other in found):
                    found.append(path)
    return found


def paths(tree: Any, row: int) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row][1:], tree.parents[row][1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    grown=st.lists(st.integers(0, 3), max_size=8),
    settings=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5)),
)
def test_against_a_naive_search(text: list[int], grown: list[int], settings: tuple[int, int, int, int]) -> None:
    """In the first round, and after the text has grown."""
    max_ngram, length, branches, per_match = settings
    drafter = PromptLookup(
        nodes=1000, num_tokens=length, max_ngram=max_ngram, branches=branches, tokens_per_match=per_match
    )
    state = context([text], target=None)
    begun = drafter.begin(state)
    for _ in range(2):
        tree = begun.propose(state)
        expected = naive(state.texts[0], max_ngram, length, branches, per_match)

        assert paths(tree, 0) == {tuple(path[:end]) for path in expected for end in range(1, len(path) + 1)}
        assert tree.tokens[0][0] == state.texts[0][-1]
        if expected:
            assert tree.tokens[0][1] == expected[0][0]
        state.texts[0] += grown


def test_nodes_are_a_limit() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 2 + [1, 9, 8, 7, 6] * 2 + [1]
    state = context([text], target=None)

    for nodes in (1, 3, 8):
        tree = PromptLookup(nodes=nodes, num_tokens=6).begin(state).propose(state)
        assert tree.num_drafted == [nodes]


def test_budgets_are_limits() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 3
    state = context([text, text, text], target=None, budgets=[0, 2, 9])

    tree = PromptLookup(branches=1).begin(state).propose(state)

    assert tree.num_drafted == [0, 2, 9]


def test_one_branch_is_a_chain() -> None:
    assert PromptLookup(branches=1).chains_only
    assert not PromptLookup().chains_only


@pytest.mark.parametrize(("name", "value"), [("prompt_lookup_num_tokens", 2), ("max_matching_ngram_size", 1)])
def test_settings_of_generate(target: PreTrainedModel, name: str, value: int) -> None:
    """transformers' own names override the strategy's, in the call that gives them."""
    drafter = PromptLookup(num_tokens=7, max_ngram=4)
    state = context([[1, 2, 3]], target=target, **{name: value})

    begun = drafter.begin(state)

    expected = {"prompt_lookup_num_tokens": (2, 4), "max_matching_ngram_size": (7, 1)}[name]
    assert (begun.num_tokens, begun.max_ngram) == expected
    assert (drafter.num_tokens, drafter.max_ngram) == (7, 4)


def test_settings_of_generate_in_a_call(target: PreTrainedModel) -> None:
    settings = {**texts.inputs(texts.prompt(12)), "max_new_tokens": 30, "do_sample": False}
    expected = texts.greedy(target, **settings)

    for length in (1, 6):
        output = generate(
            target,
            **settings,
            strategy="prompt_lookup",
            prompt_lookup_num_tokens=length,
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == expected.tolist()
        assert max(output.speculation.accepted_lengths) <= length
