"""`hf-specdec distill-draft`: from answers to a folder that `--assistant` takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import taught
from hf_specdec import load_draft
from hf_specdec.cli.app import app
from hf_specdec.drafts import own_parameters

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def answers(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    return taught.write_answers(tmp_path_factory.mktemp("data") / "answers.jsonl", taught.make_examples(model, 30))


def distill(model: Path, answers: Path, output: Path, *further: str) -> str:
    arguments = ["distill-draft", "--model", model, "--data", answers, "--output", output, "--cpu"]
    settings = ["--layers", "1", "--dtype", "float32", "--held-out", "0.2", "--top-k", "8", "--batch-size", "4"]
    result = RUNNER.invoke(app, [str(one) for one in (*arguments, *settings, "--evaluations", "2", *further)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run(tiny_model_folder: Path, answers: Path, tmp_path: Path) -> None:
    """Files, card and log; the draft serves `generate`, and the full model needs nothing else."""
    output = tmp_path / "draft"
    printed = distill(
        tiny_model_folder, answers, output, "--draft-vocab", "12", "--full", "--model-name", "owner/name"
    )

    assert "same best token" in printed
    names = {path.name for path in output.iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "curves.png", "training_log.json", "full"}
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "base_model: owner/name" in card
    assert str(tmp_path) not in card
    log = json.loads((output / "training_log.json").read_text(encoding="utf-8"))
    assert log["layers"] == [1]
    assert {"eval_kl", "eval_agreement", "eval_acceptance_5"} <= log["history"][-1].keys() | log["history"][-2].keys()
    target = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    draft = load_draft(output, target)
    full = AutoModelForCausalLM.from_pretrained(output / "full")
    ids = torch.tensor([[5, 6, 7]])
    tokens = draft.get_output_embeddings().token_map
    torch.testing.assert_close(full(ids).logits[..., tokens], draft(ids).logits[..., tokens], rtol=0.05, atol=0.01)
    for strategy in ("assisted", "tree"):
        arguments = ["generate", "the boat", "--model", tiny_model_folder, "--assistant", output, "--json"]
        result = RUNNER.invoke(
            app,
            [str(one) for one in (*arguments, "--strategy", strategy, "--max-new-tokens", "12", "--device", "cpu")],
        )
        assert result.exit_code == 0, result.output
        assert json.loads(re.search(r"\{.*\}", result.stdout, re.DOTALL)[0])["stats"]["drafted"] > 0  # type: ignore[index]


def test_a_killed_run_goes_on(
    tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind a checkpoint, it ends with the same draft as one that ran through."""
    from hf_specdec.training import distill as module

    distill(tiny_model_folder, answers, tmp_path / "whole", "--epochs", "2")
    compute_loss, steps = module.DistillTrainer.compute_loss, []

    def die(*arguments: object, **further: object) -> object:
        steps.append(1)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return compute_loss(*arguments, **further)  # type: ignore[arg-type]

    monkeypatch.setattr(module.DistillTrainer, "compute_loss", die)
    settings = ("--epochs", "2")
    command = ["distill-draft", "--model", tiny_model_folder, "--data", answers, "--output", tmp_path / "killed"]
    fixed = ["--cpu", "--layers", "1", "--dtype", "float32", "--held-out", "0.2", "--top-k", "8", "--batch-size", "4"]
    result = RUNNER.invoke(app, [str(one) for one in (*command, *fixed, "--evaluations", "2", *settings)])
    assert result.exit_code == 130
    assert "The same command goes on from the last checkpoint" in result.output
    assert list((tmp_path / "killed" / "checkpoints").glob("checkpoint-*"))
    distill(tiny_model_folder, answers, tmp_path / "killed", *settings)

    target = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    whole, killed = (own_parameters(load_draft(tmp_path / name, target)) for name in ("whole", "killed"))
    assert len(steps) < 9 + 12
    assert all(torch.equal(weight, whole[name]) for name, weight in killed.items())


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (("--layers", "0;1"), "not a list of numbers"),
        (("--layers", "1,7"), "from 0 to 1"),
        (("--own-output",), "needs draft_vocab_size"),
        (("--draft-vocab", "500"), "500"),
        (("--top-k", "26"), "Invalid value for --top-k: 26 is more than the target's 25 tokens"),
        (("--learning-rate", "inf"), "learning_rate=inf must be above 0 and finite"),
        (("--learning-rate", "nan"), "learning_rate=nan must be above 0 and finite"),
        (("--cache-max-gb", "inf"), "cache_max_gb=inf must be a finite number"),
    ],
)
def test_refusals(
    tiny_model_folder: Path, answers: Path, tmp_path: Path, further: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "draft"
    arguments = ["distill-draft", "--model", tiny_model_folder, "--data", answers, "--output", output, "--cpu"]
    result = RUNNER.invoke(app, [str(one) for one in (*arguments, "--top-k", "8", *further)])

    assert not output.exists()
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_top_k_is_clipped_to_the_vocabulary(tiny_model_folder: Path, answers: Path, tmp_path: Path) -> None:
    arguments = ["distill-draft", "--model", tiny_model_folder, "--data", answers, "--output", tmp_path / "draft"]
    result = RUNNER.invoke(app, [*map(str, arguments), "--cpu", "--layers", "1", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    log = json.loads((tmp_path / "draft" / "training_log.json").read_text(encoding="utf-8"))
    assert log["settings"]["top_k"] == 25


def test_a_loss_that_is_not_finite_ends_the_run(
    tiny_model_folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_specdec.training import distill as module

    divergence = module.divergence
    monkeypatch.setattr(module, "divergence", lambda *arguments: divergence(*arguments) * float("nan"))
    arguments = ["distill-draft", "--model", tiny_model_folder, "--data", answers, "--output", tmp_path / "draft"]
    result = RUNNER.invoke(app, [*map(str, arguments), "--cpu", "--layers", "1", "--dtype", "float32"])
    assert result.exit_code == 1
    assert "the loss of step 1 is nan: the training is lost" in " ".join(result.output.split())
    assert not (tmp_path / "draft" / "model.safetensors").exists()
