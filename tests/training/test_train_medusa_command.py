"""`hf-specdec train-medusa` from texts to heads that draft, its files, its card, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from typer.testing import CliRunner, Result

import hf_specdec
from hf_specdec.cli import app
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads, best_tree
from hf_specdec.training import curves, facts, medusa, medusa_run
from hf_specdec.training.facts import RunClock
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.medusa_run import MedusaSettings
from hf_specdec.training.runs import RunNames
from hf_specdec.training.texts import Example
from taught import make_examples, write_answers

STEPS = 12  # 24 texts for training, 4 at a time, twice


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model_folder)


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("data") / "answers.jsonl", make_examples(model, 27))


def train(model: Path, data: Path, output: Path, *more: str) -> Result:
    words = {
        "--model": model,
        "--data": data,
        "--output": output,
        "--heads": 2,
        "--draft-vocab": 20,
        "--epochs": 2,
        "--batch-size": 4,
        "--held-out": 0.12,
        "--evaluations": 3,
        "--learning-rate": 0.01,
        "--dtype": "float32",
    }
    arguments = ["train-medusa", *(f"{name}={word}" for name, word in words.items()), "--cpu", *more]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["hf-specdec", *arguments])
        return CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, arguments)


@pytest.fixture(scope="module")
def trained(tiny_model_folder: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("trained") / "heads"
    result = train(tiny_model_folder, answers, folder, "--nodes", "6", "--width", "5")
    assert result.exit_code == 0, result.output
    return folder, result


class Killed(Exception):
    """Like a kill, for all that the files can tell."""


def kill_after(step: int, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException] = Killed) -> None:
    def on_step_end(self: TrainerCallback, args: Any, state: Any, control: Any, **further: Any) -> None:
        if state.global_step == step:
            raise kind

    monkeypatch.setattr(RunClock, "on_step_end", on_step_end)


class TestResult:
    def test_heads_are_complete(self, trained: tuple[Path, Result], model: PreTrainedModel) -> None:
        folder, result = trained
        heads = MedusaHeads.from_pretrained(folder)
        assert (heads.num_heads, heads.num_layers, heads.own_output) == (2, 1, False)
        assert heads.token_map is not None
        assert len(heads.token_map) == len(set(heads.token_map.tolist())) == 20
        assert model.generation_config.eos_token_id in heads.token_map
        assert heads.rank_rates is not None
        assert [len(rates) for rates in heads.rank_rates] == [5, 5]
        assert heads.tree == best_tree(heads.rank_rates, 6)
        assert any(weight.abs().sum() > 0 for weight in heads.blocks.parameters())
        assert f"{heads.rank_rates[0][0]:.3f}" in result.stdout
        assert f"step {STEPS} of {STEPS}" in result.stderr

    def test_heads_draft_and_the_text_stays(self, trained: tuple[Path, Result], model: PreTrainedModel) -> None:
        heads = MedusaHeads.from_pretrained(trained[0])
        prompt = torch.tensor([[6, 7, 8, 9]])
        settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24}
        expected = model.generate(prompt, **settings, do_sample=False)
        with hf_specdec.enabled(model):
            found = model.generate(prompt, **settings, do_sample=False, strategy=heads, return_dict_in_generate=True)
        assert torch.equal(found.sequences, expected)
        assert found.speculation.drafted > 0

    def test_nothing_of_the_run_is_left(self, trained: tuple[Path, Result]) -> None:
        assert sorted(path.name for path in trained[0].iterdir()) == [
            "README.md",
            "config.json",
            "curves.png",
            "model.safetensors",
            "training_log.json",
        ]

    def test_log(self, trained: tuple[Path, Result]) -> None:
        log = json.loads((trained[0] / "training_log.json").read_text(encoding="utf-8"))
        assert log["steps"] == STEPS
        assert log["texts"] == {"training": 24, "held out": 3}
        assert log["seconds"] > 0
        assert 0 < log["coverage"] <= 1
        assert [record["step"] for record in log["history"] if "loss" in record] == list(range(1, STEPS + 1))
        evaluations = [record for record in log["history"] if "eval_loss" in record]
        assert [record["step"] for record in evaluations] == [4, 8, 12]
        heads = MedusaHeads.from_pretrained(trained[0])
        assert evaluations[-1]["eval_head0_top1"] == pytest.approx((heads.rank_rates or ())[0][0])

    def test_curves(self, trained: tuple[Path, Result]) -> None:
        assert (trained[0] / "curves.png").read_bytes().startswith(b"\x89PNG")

    def test_card_tells_how_and_not_where(
        self, trained: tuple[Path, Result], tiny_model_folder: Path, answers: Path
    ) -> None:
        card = (trained[0] / "README.md").read_text(encoding="utf-8")
        assert "Data: answers.jsonl; 24 texts" in card
        assert f"hf-specdec train-medusa --model={tiny_model_folder.name} --data=answers.jsonl --output=heads " in card
        assert f"{STEPS} steps in" in card
        assert "](curves.png)" in card
        assert f"torch {torch.__version__}" in card
        for place in (tiny_model_folder, answers.parent, trained[0].parent):
            assert str(place) not in card + (trained[0] / "training_log.json").read_text(encoding="utf-8")


class TestResuming:
    @pytest.mark.parametrize("step", [3, 6, STEPS])
    def test_a_killed_run_ends_as_one_that_was_not(
        self,
        step: int,
        trained: tuple[Path, Result],
        tiny_model_folder: Path,
        answers: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with monkeypatch.context() as patched:
            kill_after(step, patched)
            result = train(tiny_model_folder, answers, tmp_path / "heads", "--nodes", "6", "--width", "5")
            assert isinstance(result.exception, Killed)
        assert not (tmp_path / "heads" / "model.safetensors").exists()
        # A checkpoint that was being written.
        (tmp_path / "heads" / "checkpoints" / "checkpoint-99").mkdir(parents=True)
        result = train(tiny_model_folder, answers, tmp_path / "heads", "--nodes", "6", "--width", "5")
        assert result.exit_code == 0, result.output
        one, other = (MedusaHeads.from_pretrained(folder) for folder in (trained[0], tmp_path / "heads"))
        assert one.config | {"notes": None} == other.config | {"notes": None}
        for weight, other_weight in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(weight, other_weight)
        logs = [json.loads((path / "training_log.json").read_text()) for path in (trained[0], tmp_path / "heads")]
        losses = [[record["loss"] for record in log["history"] if "loss" in record] for log in logs]
        assert losses[0] == losses[1]

    def test_a_kill_while_files_are_written(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def draw(*arguments: object) -> None:
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(medusa_run, "draw_head_curves", draw)
            assert isinstance(train(tiny_model_folder, answers, tmp_path / "heads").exception, Killed)
        result = train(tiny_model_folder, answers, tmp_path / "heads")
        assert result.exit_code == 0, result.output
        log = json.loads((tmp_path / "heads" / "training_log.json").read_text(encoding="utf-8"))
        assert log["steps"] == STEPS
        assert MedusaHeads.from_pretrained(tmp_path / "heads").tree is not None

    def test_other_settings_are_another_run(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            kill_after(3, patched)
            train(tiny_model_folder, answers, tmp_path / "heads")
        result = train(tiny_model_folder, answers, tmp_path / "heads", "--head-decay", "0.5")
        assert result.exit_code == 1
        assert "holds a run that differs in head_decay;" in result.stderr

    def test_ctrl_c(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for step, words in ((1, "before the first checkpoint. The same command begins"), (6, "goes on from the last")):
            with monkeypatch.context() as patched:
                kill_after(step, patched, KeyboardInterrupt)
                result = train(tiny_model_folder, answers, tmp_path / "heads")
            assert result.exit_code == 130
            assert words in result.stderr

    def test_a_loss_that_is_not_finite_ends_the_run(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        losses = medusa.head_losses
        monkeypatch.setattr(medusa, "head_losses", lambda *arguments: losses(*arguments) * float("nan"))
        result = train(tiny_model_folder, answers, tmp_path / "heads")
        assert result.exit_code == 1
        assert "Error: the loss of step 1 is nan: the training is lost; begin again" in result.stderr
        assert not (tmp_path / "heads" / "model.safetensors").exists()


class TestRefusals:
    """All come before the model is loaded, and change nothing."""

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--heads", "40"], r"none of the 24 training texts has 41 tokens to learn"),
            (["--held-out", "0"], r"held_out=0\.0"),
            (["--epochs", "0"], r"epochs=0\.0 must be above 0"),
            (["--epochs", "inf"], r"epochs=inf must be above 0 and finite"),
            (["--learning-rate", "inf"], r"learning_rate=inf must be above 0 and finite"),
            (["--learning-rate", "nan"], r"learning_rate=nan must be above 0 and finite"),
            (["--cache-max-gb", "inf"], r"cache_max_gb=inf must be a finite number"),
            (["--held-out", "nan"], r"held_out=nan"),
            (["--head-decay", "2"], r"head_decay=2\.0"),
            (["--head-decay", "nan"], r"head_decay=nan"),
            (["--draft-vocab", "3"], r"draft_vocab_size=3 must be .* at least width=10"),
        ],
    )
    def test_of_options(
        self,
        more: list[str],
        message: str,
        tiny_model_folder: Path,
        answers: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
        result = train(tiny_model_folder, answers, tmp_path / "heads", *more)
        assert result.exit_code == 1
        assert re.search(message, result.stderr)
        assert not (tmp_path / "heads").exists()

    def test_of_a_draft_vocabulary_beyond_the_target(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path
    ) -> None:
        result = train(tiny_model_folder, answers, tmp_path / "heads", "--draft-vocab", "500")
        assert result.exit_code == 1
        assert "draft_vocab_size=500 is more than the 25 tokens" in result.stderr

    def test_of_a_width_leaves_the_folder_free(self, tiny_model_folder: Path, answers: Path, tmp_path: Path) -> None:
        words = ["--model", tiny_model_folder, "--data", answers, "--output", tmp_path / "heads", "--heads", "2"]
        arguments = ["train-medusa", *map(str, words), "--cpu", "--dtype", "float32", "--held-out", "0.12"]
        result = CliRunner().invoke(app, [*arguments, "--width", "99"])
        assert result.exit_code == 1
        assert "width=99 must be a whole number from 1 to 25" in result.stderr
        assert not (tmp_path / "heads").exists()
        assert CliRunner().invoke(app, [*arguments, "--width", "9"]).exit_code == 0

    def test_of_an_empty_file(self, tiny_model_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
        result = train(tiny_model_folder, tmp_path / "empty.jsonl", tmp_path / "heads")
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")

    def test_of_a_folder_in_use(
        self, tiny_model_folder: Path, answers: Path, tmp_path: Path, trained: tuple[Path, Result]
    ) -> None:
        (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
        for folder in (tmp_path, trained[0], tmp_path / "notes.txt"):
            result = train(tiny_model_folder, answers, folder)
            assert result.exit_code == 1
            assert "Error: output: " in result.stderr
        assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"

    def test_of_a_folder_whose_record_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text("[]", encoding="utf-8")
        with pytest.raises(ArgumentError, match="no record of a training run"):
            RunFolder(tmp_path, {"seed": 0}).check()

    @pytest.mark.parametrize("name", ["num_heads", "num_layers", "batch_size", "evaluations", "num_nodes", "width"])
    @pytest.mark.parametrize("value", [0, 1.5, True])
    def test_of_settings(self, name: str, value: object) -> None:
        with pytest.raises(ArgumentError, match=rf"{name}={value!r} must be a whole number"):
            MedusaSettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["learning_rate", "epochs", "head_decay", "seed"])
def test_settings_that_are_no_numbers(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='a' must be"):
        MedusaSettings(**{name: "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "words"), [(1, "on 1 core of"), (4, "on 4 cores of")])
def test_one_core_is_no_plural(cores: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "usable_cores", lambda: cores)
    known = {"seconds": 3.0, "steps": 2, "processes": 1, "settings": {"learning_rate": 0.1}}
    assert words in facts.how_it_went(known, torch.device("cpu"), "loss")


def test_curves_show_their_labels_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(curves, "save_figure", lambda path, figure, axes: figures.append(figure))
    curves.draw_head_curves(tmp_path / "curves.png", [{"step": 1, "loss": 1.0, "eval_head0_top1": 0.5}], 1)
    canvas = FigureCanvasAgg(figures[0])
    canvas.draw()
    for axes in figures[0].axes:
        box = axes.yaxis.label.get_window_extent(canvas.get_renderer())
        assert 0 <= box.y0 < box.y1 <= figures[0].bbox.height


def test_settings_are_checked_against_the_held_out_texts_too() -> None:
    long, short = Example(list(range(9)), 1), Example([1, 2], 1)
    names = RunNames("model", "data", "command")
    with pytest.raises(ArgumentError, match="none of the 1 held-out texts has 5 tokens"):
        medusa_run.prepare_run(Path("nowhere"), [long], [short], MedusaSettings(), names)
