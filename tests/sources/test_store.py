"""The store: bounded, shared between threads, saved and loaded, filled from files."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, ones, tensor
from transformers import PreTrainedTokenizerFast

from hf_specdec import ArgumentError, SuffixStore
from hf_specdec.sources.automaton import ROOT
from hf_specdec.sources.store import StoredTexts


def follow(store: SuffixStore, text: list[int]) -> list[int]:
    """Tokens that the store expects after a text, most frequent first."""
    source = StoredTexts(store, 1)
    match = source.start(0, text)
    return [] if match is None else [guess.token for guess in source.guesses(match)]


def test_what_was_added_is_expected_again() -> None:
    store = SuffixStore()
    store.add([1, 2, 3, 4])
    store.add([1, 2, 3, 5])
    store.add([7, 2, 3, 5])
    assert follow(store, [9, 9, 1, 2]) == [3]
    assert follow(store, [2, 3]) == [5, 4]
    assert len(store) == 15


def test_no_match_runs_from_one_text_into_the_next() -> None:
    store = SuffixStore()
    store.add([1, 2])
    store.add([3, 4])
    assert follow(store, [1, 2]) == []


def test_a_text_read_in_pieces_keeps_its_match() -> None:
    store = SuffixStore()
    store.add(list(range(20)))
    source = StoredTexts(store, 2)
    for end in range(3, 15):
        match = source.start(1, list(range(end)))
        assert match is not None
        assert match.length == end
    assert source.start(0, [50]) is None


def test_the_oldest_texts_go_when_it_is_full() -> None:
    store = SuffixStore(max_tokens=40)
    for first in range(0, 300, 10):
        store.add(range(first, first + 8))
        assert len(store) <= 40
    assert len(store) >= 20
    assert follow(store, [292]) == [293]
    assert follow(store, [2]) == []


def test_of_a_text_longer_than_half_the_store_the_end_is_kept() -> None:
    store = SuffixStore(max_tokens=20)
    store.add(list(range(100)))
    assert len(store) == 10
    assert follow(store, [97]) == [98]
    assert follow(store, [50]) == []


def test_a_match_survives_that_its_text_is_thrown_away() -> None:
    store = SuffixStore(max_tokens=40)
    store.add([1, 2, 3, 4])
    source = StoredTexts(store, 1)
    match = source.start(0, [1, 2])
    assert match is not None
    for _ in range(20):
        store.add([8, 9, 8, 9, 8])
    assert [guess.token for guess in source.guesses(match)] == [3]
    assert source.start(0, [1, 2, 3]) is None


def test_save_and_load(tmp_path: Path) -> None:
    store = SuffixStore(max_tokens=30)
    for first in range(0, 80, 10):
        store.add(range(first, first + 6))
    store.save(tmp_path / "store.safetensors")
    loaded = SuffixStore.load(tmp_path / "store.safetensors", learn=False)
    assert len(loaded) == len(store)
    assert loaded.max_tokens == 30
    assert not loaded.learn
    assert loaded.largest_token == 75
    for last in range(80):
        assert follow(loaded, [last]) == follow(store, [last])


def test_an_empty_store_can_be_saved(tmp_path: Path) -> None:
    SuffixStore().save(tmp_path / "empty.safetensors")
    assert len(SuffixStore.load(tmp_path / "empty.safetensors")) == 0


def test_files_and_texts_are_encoded(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:

    (tmp_path / "a.txt").write_text("the boat leaves the harbour and returns", encoding="utf-8")
    from_file, from_text = SuffixStore(), SuffixStore()
    from_file.add_files([tmp_path / "a.txt"], tiny_tokenizer)
    from_text.add_texts(["the boat leaves the harbour and returns"], tiny_tokenizer)
    ids = tiny_tokenizer.encode("the boat leaves the harbour and returns", add_special_tokens=False)
    assert len(from_file) == len(from_text) == len(ids) + 1
    assert ids[3] in follow(from_file, ids[:3])


@pytest.mark.parametrize("max_tokens", [0, 1, 3, -5, 8.0, True, None])
def test_bad_bounds_are_refused(max_tokens: object) -> None:
    with pytest.raises(ArgumentError, match="max_tokens"):
        SuffixStore(max_tokens=max_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [[1, -1], ["a"], [1.0]])
def test_only_token_ids_are_taken(tokens: list[int]) -> None:
    store = SuffixStore()
    with pytest.raises(ArgumentError, match="token ids"):
        store.add(tokens)
    assert len(store) == 0


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    store = SuffixStore()
    with pytest.raises(ArgumentError, match="token ids"):
        store.add([1, 2, 2**31])
    store.add(iter([5, 6]))  # type: ignore[arg-type]
    store.add(tensor([7, 8]))
    store.save(tmp_path / "store.safetensors")
    assert SuffixStore.load(tmp_path / "store.safetensors")._new.tokens.tolist() == [5, 6, -1, 7, 8, -1]


@pytest.mark.parametrize(
    "parts",
    [
        {"old": tensor([-7, 3]).int(), "new": tensor([1]).int(), "max_tokens": tensor(10)},
        {"old": tensor([1] * 8).int(), "new": tensor([1] * 8).int(), "max_tokens": tensor(10)},
        {"old": tensor([0.5]), "new": tensor([0.5]), "max_tokens": tensor(10)},
        {"old": tensor([1]).int(), "new": tensor([1]).int(), "max_tokens": tensor([4, 5])},
    ],
)
def test_a_store_whose_parts_do_not_fit_is_refused(parts: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(parts, tmp_path / "store.safetensors", {"format": "hf_specdec suffix store 1"})
    with pytest.raises(ArgumentError, match="do not fit"):
        SuffixStore.load(tmp_path / "store.safetensors")


def test_one_string_is_not_taken_letter_by_letter(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    store = SuffixStore()
    with pytest.raises(ArgumentError, match="texts"):
        store.add_texts("the boat", tiny_tokenizer)
    with pytest.raises(ArgumentError, match="paths"):
        store.add_files("boat.txt", tiny_tokenizer)
    assert len(store) == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12), st.integers(4, 30))
def test_the_bound_holds(texts: list[list[int]], max_tokens: int) -> None:
    store = SuffixStore(max_tokens)
    for text in texts:
        store.add(text)
        assert len(store) <= max_tokens


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), min_size=1, max_size=6),
    read=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
def test_what_others_add_meanwhile_changes_no_match(texts: list[list[int]], read: list[int]) -> None:
    """Adding may split the state that a match stands at; whoever reads on must agree with one who starts afresh."""
    store = SuffixStore()
    source = StoredTexts(store, 1)
    for length, token in enumerate(read):
        source.start(0, read[: length + 1])
        store.add(texts[(length + token) % len(texts)])
    match, afresh = source.start(0, [*read, 1]), StoredTexts(store, 1).start(0, [*read, 1])
    if match is not None:
        assert afresh is not None
        assert match.length <= afresh.length  # what was added behind the match's back may make a longer one
        text = [*read, 1][-match.length :]
        state = ROOT
        for token in text:
            state = match.automaton.transitions[state][token]
        assert match.state == state


def test_unreadable_files_are_named(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:

    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.txt", "binary.txt"):
        with pytest.raises(ArgumentError, match=name):
            SuffixStore().add_files([tmp_path / name], tiny_tokenizer)
    save_file({"other": ones(1)}, tmp_path / "other.safetensors")
    for name in ("missing.safetensors", "binary.txt", "other.safetensors"):
        with pytest.raises(ArgumentError, match=name):
            SuffixStore.load(tmp_path / name)


def test_threads_may_read_and_add_at_once() -> None:
    store = SuffixStore(max_tokens=2000)
    failures: list[BaseException] = []

    def work(salt: int) -> None:
        try:
            source = StoredTexts(store, 1)
            text = [salt]
            for i in range(300):
                text.append((salt * 7 + i * i) % 23)
                match = source.start(0, text)
                if match is not None:
                    source.guesses(match)
                if i % 10 == 0:
                    store.add(text[-20:])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(salt,)) for salt in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 0 < len(store) <= 2000
