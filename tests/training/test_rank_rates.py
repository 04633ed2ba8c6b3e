"""Counting ranks, and `hf-specdec tune-tree`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

import zoo
from hf_specdec.cli import app
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import Layout, MedusaHeads, best_tree, expected_tokens, export_heads
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.guesses import IGNORED, OUTSIDE
from hf_specdec.training.rank_rates import RankCounts, count_ranks, measure_ranks
from hf_specdec.training.texts import Example
from taught import disturbed, make_examples, make_features, write_answers


class TestCounting:
    def test_by_hand(self) -> None:
        ranks = torch.tensor([[0, 2], [0, OUTSIDE], [1, IGNORED], [7, 0]])
        counts = count_ranks(ranks, torch.tensor([0, 0, 2, 2]), num_rows=3, width=3)
        assert counts.tolist() == [
            [[2, 0, 0, 0], [0, 0, 1, 1]],
            [[0, 0, 0, 0], [0, 0, 0, 0]],
            [[0, 1, 0, 1], [1, 0, 0, 0]],
        ]
        total = RankCounts.of_rows(counts)
        assert total.totals.tolist() == [4, 3]
        assert total.rates == ((0.5, 0.25, 0.0), (pytest.approx(1 / 3), 0.0, pytest.approx(1 / 3)))
        assert total.top1 == (0.5, pytest.approx(1 / 3))
        assert total.top5 == (0.75, pytest.approx(2 / 3))

    def test_batches_do_not_matter(self, target: PreTrainedModel) -> None:
        heads, features = disturbed(MedusaHeads.for_target(target)), make_features(target, 7)
        seen = []
        one, all_ = (
            measure_ranks(heads, features, batch_size=size, progress=lambda *pair: seen.append(pair))
            for size in (1, 7)
        )
        assert torch.equal(one.hits, all_.hits)
        assert torch.equal(one.totals, all_.totals)
        assert seen == [*((done, 7) for done in range(1, 8)), (7, 7)]

    @pytest.mark.parametrize("width", [0, 5, True, 2.0])
    def test_widths_beyond_the_vocabulary_are_refused(self, width: int, target: PreTrainedModel) -> None:
        heads = MedusaHeads.for_target(target, token_map=torch.arange(4))
        with pytest.raises(ArgumentError, match="width=.* from 1 to 4"):
            measure_ranks(heads, make_features(target, 1), width=width)

    def test_answers_shorter_than_the_reach_are_refused(self, target: PreTrainedModel) -> None:
        features = TargetFeatures(target, [Example([5, 6, 7, 8, 9], 2)])
        assert measure_ranks(MedusaHeads.for_target(target, num_heads=2), features).totals.tolist() == [2, 1]
        with pytest.raises(ArgumentError, match="long enough for 3 heads, which reach 4 tokens"):
            measure_ranks(MedusaHeads.for_target(target, num_heads=3), features)

    def test_heads_of_another_model_are_refused(self, target: PreTrainedModel) -> None:
        with pytest.raises(ArgumentError, match=r"48.*32"):
            measure_ranks(MedusaHeads(hidden_size=48, vocab_size=zoo.VOCAB_SIZE), make_features(target, 1))


class TestTuneTree:
    @pytest.fixture
    def folder(self, tiny_model_folder: Path, tmp_path: Path) -> Path:
        """Heads, and texts for them."""
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        write_answers(tmp_path / "answers.jsonl", make_examples(model, 6))
        disturbed(MedusaHeads.for_target(model, num_heads=3)).save_pretrained(tmp_path / "heads")
        return tmp_path

    def tune(self, folder: Path, model: Path, *more: str, heads: str = "heads") -> Result:
        arguments = ["tune-tree", "-m", str(model), "--heads", str(folder / heads), "--dtype", "float32"]
        data = ["--data", str(folder / "answers.jsonl"), "--device", "cpu"]
        return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, [*arguments, *data, *more])

    def test_stores_the_best_tree_with_the_heads(self, folder: Path, tiny_model_folder: Path) -> None:
        before = MedusaHeads.from_pretrained(folder / "heads")
        result = self.tune(folder, tiny_model_folder, "--nodes", "7", "--width", "4", "--data-name", "my answers")
        assert result.exit_code == 0, result.output
        heads = MedusaHeads.from_pretrained(folder / "heads")
        assert heads.rank_rates is not None
        assert [len(rates) for rates in heads.rank_rates] == [4, 4, 4]
        assert heads.tree == best_tree(heads.rank_rates, 7)
        for one, other in zip(before.parameters(), heads.parameters(), strict=True):
            assert torch.equal(one, other)
        tokens = expected_tokens(heads.tree, heads.rank_rates)
        assert f"A tree of 7 nodes: {tokens:.2f} tokens expected per forward" in result.stdout
        assert f"{heads.rank_rates[0][0]:.3f}" in result.stdout
        card = (folder / "heads" / "README.md").read_text(encoding="utf-8")
        assert "6 texts of my answers" in card
        assert str(folder) not in card

    def test_json_and_a_folder_of_its_own(self, folder: Path, tiny_model_folder: Path) -> None:
        result = self.tune(folder, tiny_model_folder, "--json", "--output", str(folder / "tuned"))
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        heads = MedusaHeads.from_pretrained(folder / "tuned")
        assert record["rank_rates"] == [list(rates) for rates in heads.rank_rates or ()]
        assert record["tree"] == [list(node) for node in heads.tree or ()]
        assert MedusaHeads.from_pretrained(folder / "heads").tree is None

    def test_heads_of_another_layout_need_a_new_folder(self, folder: Path, tiny_model_folder: Path) -> None:
        export_heads(MedusaHeads.from_pretrained(folder / "heads"), folder / "published", Layout.fasterdecoding)
        before = sorted(path.read_bytes() for path in (folder / "published").iterdir())
        result = self.tune(folder, tiny_model_folder, heads="published")
        assert result.exit_code == 1
        assert "give a new folder" in result.stderr
        assert before == sorted(path.read_bytes() for path in (folder / "published").iterdir())
        assert self.tune(folder, tiny_model_folder, "--output", str(folder / "new"), heads="published").exit_code == 0
        assert MedusaHeads.from_pretrained(folder / "new").tree is not None

    def test_heads_that_cannot_guess_are_refused(self, folder: Path, tiny_model_folder: Path) -> None:
        heads = MedusaHeads.from_pretrained(folder / "heads")
        next(heads.parameters()).data.view(-1)[3] = float("nan")
        heads.save_pretrained(folder / "heads")
        result = self.tune(folder, folder / "no model")
        assert result.exit_code == 1
        assert "Error: heads: blocks" in result.stderr
        assert "NaN or infinite weights" in result.stderr
        model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
        with pytest.raises(ArgumentError, match="heads: blocks"):
            measure_ranks(heads, make_features(model, 1))
        assert MedusaHeads.from_pretrained(folder / "heads").tree is None

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--width", "1000"], "width=1000"),
            (["--output", "{folder}"], "is in use"),
        ],
    )
    def test_refusals_come_before_the_model_is_loaded(self, more: list[str], message: str, folder: Path) -> None:
        result = self.tune(folder, folder / "no model", *(word.format(folder=folder) for word in more))
        assert result.exit_code == 1
        assert message in result.stderr
