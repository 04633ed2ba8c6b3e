"""Distilled drafts learn what their target says: losses and metrics against plain formulas, and whole runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

import taught
import zoo
from hf_specdec import ArgumentError, make_draft
from hf_specdec.drafts import own_parameters
from hf_specdec.training.distill import DistillTrainer, _chains
from hf_specdec.training.divergence import Guesser, compare, divergence
from hf_specdec.training.student import Student

TOKENS = torch.arange(3, 60)
K = 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A target of three layers."""
    return zoo.make("llama", num_hidden_layers=3)


def make_trainer(model: PreTrainedModel, folder: Path, callbacks: Any = (), **changes: Any) -> DistillTrainer:
    draft = make_draft(model, [0, 2], token_map=TOKENS)
    features = taught.make_features(model, 24, top_k=K)
    held_out = taught.make_features(model, 6, seed=1, top_k=K)
    return DistillTrainer(
        draft,
        train_dataset=features,
        eval_dataset=held_out,
        depth=3,
        args=taught.arguments(folder, **changes),
        callbacks=list(callbacks),
    )


def target_probs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the draft shall learn, `[T, D]`: the target's K best tokens, those of them that the draft can guess."""
    with torch.no_grad():
        logits = model(ids).logits[0]
    kept = torch.zeros_like(logits).scatter_(-1, logits.topk(K).indices, 1.0).bool()
    return logits.masked_fill(~kept, -torch.inf)[:, TOKENS].softmax(-1)


def plain_divergence(model: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, num_prompt: int) -> Tensor:
    """For each position of the answer, by the formula; NaN where the draft can guess nothing."""
    p = target_probs(model, ids)[num_prompt - 1 : -1]
    log_q = draft(ids).logits[0, num_prompt - 1 : -1, TOKENS].log_softmax(-1)
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "phi", "gpt2", "opt"])
def test_divergence(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients are those of the formula, in whatever pieces it is computed."""
    target = zoo.make(family, attention="eager", **({"final_logit_softcapping": 3.0} if family == "gemma2" else {}))
    draft = make_draft(target, [1], token_map=TOKENS)
    features = taught.make_features(target, 1, top_k=K)
    batch = features.collator()([features[0]])
    reference = copy.deepcopy(draft)
    values = plain_divergence(target, reference, batch["input_ids"], taught.NUM_PROMPT)
    values[~values.isnan()].mean().backward()
    monkeypatch.setattr("hf_specdec.training.divergence._LOGITS_AT_ONCE", 3 * len(TOKENS))

    guesser = Guesser(draft)
    states = Student(draft)(batch["input_ids"], batch["positions"])
    teacher = guesser.teacher(batch["top_ids"], batch["top_logits"])
    loss = divergence(guesser, states, teacher)
    loss.backward()

    torch.testing.assert_close(loss.detach(), values.detach()[~values.isnan()].mean(), rtol=1e-4, atol=1e-5)
    expected = own_parameters(reference)
    for name, weight in own_parameters(draft).items():
        torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-5)
    found, same = compare(guesser, states, teacher)
    torch.testing.assert_close(found[~values.isnan()], values.detach()[~values.isnan()], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        best = [one(batch["input_ids"]).logits[0, taught.NUM_PROMPT - 1 : -1].argmax(-1) for one in (draft, target)]
    assert same.tolist() == (best[0] == best[1]).tolist()


def test_nothing_to_guess(model: PreTrainedModel) -> None:
    """Where all of the target's best tokens are unknown to the draft, nothing is learned."""
    draft = make_draft(model, [0], token_map=TOKENS)
    guesser = Guesser(draft)
    teacher = guesser.teacher(torch.tensor([[70, 80]]), torch.tensor([[2.0, 1.0]]))
    states = torch.randn(1, 32, requires_grad=True)
    loss = divergence(guesser, states, teacher)
    loss.backward()

    assert loss.item() == 0
    assert states.grad is not None
    assert not states.grad.any()


def test_own_output(model: PreTrainedModel) -> None:
    """Its rows learn too, and the target's stay."""
    draft = make_draft(model, [0], token_map=TOKENS, own_output=True)
    features = taught.make_features(model, 1, top_k=K)
    batch = features.collator()([features[0]])
    reference = copy.deepcopy(draft)
    values = plain_divergence(model, reference, batch["input_ids"], taught.NUM_PROMPT)
    values[~values.isnan()].mean().backward()
    guesser = Guesser(draft)
    states = Student(draft)(batch["input_ids"], batch["positions"])
    divergence(guesser, states, guesser.teacher(batch["top_ids"], batch["top_logits"])).backward()

    torch.testing.assert_close(draft.lm_head.weight.grad, reference.lm_head.weight.grad, rtol=1e-3, atol=1e-5)
    assert draft.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()


def test_chains() -> None:
    same = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    rows = torch.tensor([0, 0, 0, 1, 1, 1])

    right, tried = _chains(same, rows, 3, 4).unbind(-1)

    assert right.tolist() == [[2, 1, 0, 0], [3, 2, 1, 0], [0, 0, 0, 0]]
    assert tried.tolist() == [[3, 2, 1, 0], [3, 2, 1, 0], [0, 0, 0, 0]]


def test_metrics(model: PreTrainedModel, tmp_path: Path) -> None:
    """Against a plain loop over the texts."""
    trainer = make_trainer(model, tmp_path)
    metrics = trainer.evaluate()

    kl, same, chains = [], [], []
    for example in trainer.eval_dataset.examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            values = plain_divergence(model, trainer.draft, ids, example.num_prompt)
            ours, theirs = (
                one(ids).logits[0, example.num_prompt - 1 : -1].argmax(-1) for one in (trainer.draft, model)
            )
        kl += values[~values.isnan()].tolist()
        hits = (ours == theirs).tolist()
        same += hits
        chains += [all(hits[i : i + 2]) for i in range(len(hits) - 1)]
    assert metrics["eval_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert metrics["eval_agreement"] == metrics["eval_acceptance_1"] == pytest.approx(sum(same) / len(same))
    assert metrics["eval_acceptance_2"] == pytest.approx(sum(chains) / len(chains))
    assert metrics["eval_tokens"] == pytest.approx(1 + sum(metrics[f"eval_acceptance_{d}"] for d in (1, 2, 3)))


def test_training(model: PreTrainedModel, tmp_path: Path) -> None:
    """It gets better, only its own parameters move, and the target is as before."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(model, tmp_path, num_train_epochs=15)
    draft = trainer.draft
    shared = {name: weight.clone() for name, weight in draft.named_parameters() if name not in own_parameters(draft)}
    own = {name: weight.detach().clone() for name, weight in own_parameters(draft).items()}
    # The target is random: what it says to other prompts cannot be learned.
    first = trainer.evaluate(trainer.train_dataset)
    trainer.train()
    last = trainer.evaluate(trainer.train_dataset)

    assert last["eval_kl"] < 0.8 * first["eval_kl"]
    assert all(not torch.equal(weight, own[name]) for name, weight in own_parameters(draft).items())
    after = dict(draft.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in shared.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


class _Stop(TrainerCallback):
    """As if the process were killed behind a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **further: Any) -> None:
        if state.global_step == 9:
            raise KeyboardInterrupt


def test_resumed_is_uninterrupted(model: PreTrainedModel, tmp_path: Path) -> None:
    """In the middle of an epoch; a checkpoint holds only what the draft does not share."""
    settings = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    whole = make_trainer(model, tmp_path / "whole", **settings)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(model, tmp_path / "killed", [_Stop()], **settings).train()
    resumed = make_trainer(model, tmp_path / "killed", **settings)
    resumed.train(resume_from_checkpoint=True)

    expected = own_parameters(whole.draft)
    assert whole.state.global_step == resumed.state.global_step == 18
    for name, weight in own_parameters(resumed.draft).items():
        assert torch.equal(weight, expected[name])
    losses = [[one["loss"] for one in trainer.state.log_history if "loss" in one] for trainer in (whole, resumed)]
    assert losses[0] == losses[1]
    file = tmp_path / "killed" / "checkpoint-8" / "model.safetensors"
    size = sum(weight.numel() for weight in expected.values()) * 4
    assert size < file.stat().st_size < size + 4000


def test_the_state_of_a_student(model: PreTrainedModel) -> None:
    """The student's state round-trips, and a strange one is refused."""
    student = Student(make_draft(model, [0, 2], token_map=TOKENS))
    state = {name: value + 1 for name, value in student.state_dict().items()}
    student.load_state_dict(state)

    assert all(torch.equal(value, state[name]) for name, value in student.state_dict().items())
    with pytest.raises(RuntimeError, match="missing"):
        student.load_state_dict({})


def test_refusals(model: PreTrainedModel, tmp_path: Path) -> None:
    draft = make_draft(model, [0])
    for dataset, message in (
        (taught.make_features(model, 2), "without top_k"),
        ([1, 2], "not list"),
    ):
        with pytest.raises(ArgumentError, match=message):
            DistillTrainer(draft, train_dataset=dataset, args=taught.arguments(tmp_path))
    with pytest.raises(ArgumentError, match="nothing to train"):
        DistillTrainer(draft, args=taught.arguments(tmp_path))
    features = taught.make_features(model, 2, top_k=4)
    with pytest.raises(ArgumentError, match="depth=0"):
        DistillTrainer(draft, train_dataset=features, depth=0, args=taught.arguments(tmp_path))
    with pytest.raises(ArgumentError, match="no distilled draft"):
        DistillTrainer(model, train_dataset=features, args=taught.arguments(tmp_path))
