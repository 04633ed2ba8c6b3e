"""The table of successors."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zoo
from hf_specdec import ArgumentError, SuccessorTable, UnsupportedError
from hf_specdec.sources.successors import Successors


def logits_of(probs: dict[int, float], vocab_size: int = 10) -> torch.Tensor:
    row = torch.full((vocab_size,), -30.0)
    for token, prob in probs.items():
        row[token] = torch.tensor(prob).log()
    return row


def test_successors_are_ranked_and_averaged() -> None:
    table = SuccessorTable(10, num_successors=3)
    table.observe([4], logits_of({1: 0.7, 2: 0.2, 3: 0.1})[None])
    seen, first = table.successors(4)
    assert seen == 1
    assert [token for token, _ in first] == [1, 2, 3]
    assert [weight for _, weight in first] == pytest.approx([0.7, 0.2, 0.1], abs=1e-5)

    table.observe([4], logits_of({2: 0.8, 5: 0.15, 1: 0.05})[None])
    seen, second = table.successors(4)
    assert seen == 2
    assert [token for token, _ in second] == [2, 1, 5]
    assert [weight for _, weight in second] == pytest.approx([0.5, 0.375, 0.075], abs=1e-5)


def test_late_observations_keep_a_tenth() -> None:
    table = SuccessorTable(10, num_successors=2)
    for _ in range(50):
        table.observe([0], logits_of({1: 0.9, 2: 0.1})[None])
    table.observe([0], logits_of({3: 0.9, 4: 0.1})[None])
    weights = dict(table.successors(0)[1])
    assert weights[1] == pytest.approx(0.81, abs=1e-3)
    assert weights[3] == pytest.approx(0.09, abs=1e-3)


def test_of_equal_tokens_the_first_node_counts() -> None:
    table = SuccessorTable(10, num_successors=2)
    rows = torch.stack([logits_of({7: 1.0}), logits_of({8: 1.0}), logits_of({9: 1.0})])
    Successors(table).observe([4, 5, 4], rows)
    assert {token: table.successors(token)[1][0][0] for token in (4, 5)} == {4: 7, 5: 8}
    assert table.successors(4)[0] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_left_out(value: float) -> None:
    table = SuccessorTable(10, num_successors=3)
    table.observe([4], logits_of({1: 0.7, 2: 0.3})[None])
    before = table.successors(4)
    broken = torch.full((10,), value)
    table.observe([4, 5], torch.stack([broken, logits_of({1: 1.0})]))
    assert table.successors(4) == before
    assert table.successors(5)[0] == 1


def test_a_vocabulary_padded_in_the_logits_is_cut() -> None:
    table = SuccessorTable(10, num_successors=2)
    table.observe([1], logits_of({11: 0.9, 2: 0.1}, vocab_size=12)[None])
    assert table.successors(1)[1][0][0] == 2


def test_nothing_is_guessed_after_an_unknown_token() -> None:
    source = Successors(SuccessorTable(10))
    assert source.guesses(source.start(0, [3, 5])) == []


@pytest.mark.parametrize("prefix", [None, [], [4, 8, 15]])
def test_fill_asks_the_model_about_every_unknown_token(prefix: list[int] | None) -> None:
    model = zoo.make("llama")
    table = SuccessorTable(zoo.VOCAB_SIZE, num_successors=4)
    table.observe([3], logits_of({7: 0.9, 8: 0.1}, zoo.VOCAB_SIZE)[None])
    table.fill(model, prefix, batch_size=10)
    assert len(table) == zoo.VOCAB_SIZE
    assert table.successors(3)[1][0][0] == 7
    assert model.config.bos_token_id is None
    start = prefix or []
    for token in (0, 5, zoo.VOCAB_SIZE - 1):
        assert table.successors(token)[0] == 1
        assert table.successors(token)[1][0][0] == int(model(torch.tensor([[*start, token]])).logits[0, -1].argmax())


def test_without_a_prefix_the_token_that_begins_a_text_stands_in_front() -> None:
    model = zoo.make("llama")
    model.config.bos_token_id = 6
    default, explicit = SuccessorTable(zoo.VOCAB_SIZE), SuccessorTable(zoo.VOCAB_SIZE)
    default.fill(model)
    explicit.fill(model, [6])
    assert all(default.successors(token) == explicit.successors(token) for token in range(zoo.VOCAB_SIZE))


@pytest.mark.parametrize("prefix", [[-1], [zoo.VOCAB_SIZE], [1.5]])
def test_fill_refuses_a_prefix_that_the_model_does_not_know(prefix: list[int]) -> None:
    with pytest.raises(ArgumentError, match="prefix"):
        SuccessorTable(zoo.VOCAB_SIZE).fill(zoo.make("llama"), prefix)


def test_save_and_load(tmp_path: Path) -> None:
    table = SuccessorTable(10, num_successors=3)
    table.observe([4, 5], torch.stack([logits_of({1: 0.7, 2: 0.3}), logits_of({9: 1.0})]))
    table.save(tmp_path / "table.safetensors")
    loaded = SuccessorTable.load(tmp_path / "table.safetensors")
    assert (loaded.vocab_size, loaded.num_successors, len(loaded)) == (10, 3, 2)
    for token in range(10):
        assert loaded.successors(token) == table.successors(token)


def test_a_table_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    table = SuccessorTable(10, num_successors=3)
    table._tokens[2, 1] = 10
    table.save(tmp_path / "table.safetensors")
    with pytest.raises(ArgumentError, match="do not fit"):
        SuccessorTable.load(tmp_path / "table.safetensors")


@pytest.mark.parametrize("batch_size", [0, -1, 2.0])
def test_fill_refuses_a_batch_size_below_one(batch_size: int) -> None:
    with pytest.raises(ArgumentError, match="batch_size"):
        SuccessorTable(zoo.VOCAB_SIZE).fill(zoo.make("llama"), batch_size=batch_size)


def test_fill_refuses_attention_without_a_dense_mask() -> None:
    model = zoo.make("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedError, match="sdpa"):
        SuccessorTable(zoo.VOCAB_SIZE).fill(model)


def test_files_that_are_no_table_are_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no table", encoding="utf-8")
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    for name in ("missing", "text", "other.safetensors"):
        with pytest.raises(ArgumentError, match=name):
            SuccessorTable.load(tmp_path / name)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((0, 8), "vocab_size"), ((10, 0), "num_successors"), ((4, 5), "vocab_size=4"), ((True, 1), "v")],
)
def test_bad_sizes_are_refused(sizes: tuple[int, int], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        SuccessorTable(*sizes)


def test_a_model_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ArgumentError, match=f"10 tokens.*{zoo.VOCAB_SIZE}"):
        SuccessorTable(10).fill(zoo.make("llama"))


def test_threads_may_learn_at_once() -> None:
    table = SuccessorTable(50)

    def work() -> None:
        for i in range(100):
            table.observe([i % 5], torch.eye(50)[i % 50][None])
            assert len(table.successors(i % 5)[1]) == 8

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(table.successors(token)[0] for token in range(5)) == 400
