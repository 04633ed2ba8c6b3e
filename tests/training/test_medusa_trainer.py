"""Losses, gradients, counts and orders of MedusaTrainer, against plain loops; and a run that is killed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import zoo
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.training import guesses
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.guesses import IGNORED, OUTSIDE, HeadCollator, rank_guesses
from hf_specdec.training.medusa import MedusaTrainer
from hf_specdec.training.order import SimilarLengths
from hf_specdec.training.rank_rates import measure_ranks
from hf_specdec.training.texts import Example
from hf_specdec.training.weights import NonFiniteTrainingError
from taught import arguments, disturbed, make_features

TOKEN_MAP = torch.arange(0, zoo.VOCAB_SIZE, 2)
DECAY = 0.7
VARIANTS = {
    "shared": {},
    "own": {"own_output": True},
    "reduced": {"token_map": TOKEN_MAP},
    "reduced, own": {"token_map": TOKEN_MAP, "own_output": True},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return zoo.make("llama")


@pytest.fixture(scope="module")
def train(target: PreTrainedModel) -> TargetFeatures:
    return make_features(target, 24)


@pytest.fixture(scope="module")
def held_out(target: PreTrainedModel) -> TargetFeatures:
    return make_features(target, 9, seed=1)


def make_heads(target: PreTrainedModel, **settings: Any) -> MedusaHeads:
    return disturbed(MedusaHeads.for_target(target, num_heads=3, **settings))


def guesses_of(heads: MedusaHeads, features: TargetFeatures) -> list[list[tuple[Tensor, int | None]]]:
    """For each head: logits `[D]` and the column of the right token (None: not in the draft vocabulary), by loops."""
    columns = {int(token): column for column, token in enumerate(heads.token_ids(torch.arange(heads.num_guessable)))}
    output = heads.output_of(features.target)
    found: list[list[tuple[Tensor, int | None]]] = [[] for _ in range(heads.num_heads)]
    for example in features.examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            states = features.target.model(ids).last_hidden_state[0]
        for position in range(example.num_prompt - 1, len(example.input_ids)):
            logits = heads.logits(states[position], output)
            for head in range(heads.num_heads):
                if position + 2 + head < len(example.input_ids):
                    found[head].append((logits[head], columns.get(example.input_ids[position + 2 + head])))
    return found


def loss_of(heads: MedusaHeads, features: TargetFeatures) -> Tensor:
    loss = torch.zeros(())
    for head, pairs in enumerate(guesses_of(heads, features)):
        losses = [-logits.log_softmax(-1)[column] for logits, column in pairs if column is not None]
        loss = loss + DECAY**head * torch.stack(losses).mean()
    return loss


def batch_of(heads: MedusaHeads, features: TargetFeatures) -> dict[str, Tensor]:
    return HeadCollator(features, heads)([features[index] for index in range(len(features))])


def plain(history: list[dict[str, float]]) -> list[dict[str, float]]:
    """A log without what a clock says, and without the line about the run as a whole."""
    clocks = ("runtime", "per_second", "preparation_time")
    return [
        {name: value for name, value in record.items() if not any(clock in name for clock in clocks)}
        for record in history
        if "train_runtime" not in record
    ]


class TestLoss:
    @pytest.mark.parametrize("at_once", [1 << 21, 700], ids=["in one piece", "in pieces"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_is_that_of_a_loop_and_so_are_its_gradients(
        self,
        variant: str,
        at_once: int,
        target: PreTrainedModel,
        held_out: TargetFeatures,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(guesses, "_LOGITS_ON_CPU", at_once)
        heads = make_heads(target, **VARIANTS[variant])
        trainer = MedusaTrainer(heads, train_dataset=held_out, head_decay=DECAY, args=arguments(tmp_path))
        loss = trainer.compute_loss(trainer.model, batch_of(heads, held_out))
        expected = loss_of(heads, held_out)
        torch.testing.assert_close(loss, expected)
        (2 * loss).backward()
        gradients = [weight.grad for weight in heads.parameters()]
        expected_gradients = torch.autograd.grad(2 * expected, list(heads.parameters()))
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
        assert all(weight.grad is None for weight in target.parameters())

    def test_a_head_without_any_guess_costs_nothing(self, target: PreTrainedModel, tmp_path: Path) -> None:
        features = TargetFeatures(target, [Example([5, 6, 7, 8, 9, 10], 4)])
        heads = make_heads(target)
        trainer = MedusaTrainer(heads, train_dataset=features, args=arguments(tmp_path))
        loss = trainer.compute_loss(trainer.model, batch_of(heads, features))
        loss.backward()
        assert loss > 0
        assert all(weight.grad.abs().sum() == 0 for weight in heads.blocks[1].parameters())

    def test_prompts_are_not_learned(self, target: PreTrainedModel) -> None:
        features = TargetFeatures(target, [Example([5, 6, 7, 8, 9, 10, 11], 4), Example([5, 6, 7], 0)])
        batch = batch_of(MedusaHeads.for_target(target, num_heads=3), features)
        # From the prompt's last token on, whose next token is the answer's first and not a head's to guess.
        assert batch["columns"].tolist() == [
            [9 + 0, 10, 11][1:] + [IGNORED],
            [11, IGNORED, IGNORED],
            [IGNORED] * 3,
            [7, IGNORED, IGNORED],
            [IGNORED] * 3,
        ]
        assert batch["rows"].tolist() == [0, 0, 0, 1, 1]

    def test_tokens_outside_the_draft_vocabulary_are_marked(self, target: PreTrainedModel) -> None:
        heads = MedusaHeads.for_target(target, num_heads=2, token_map=torch.tensor([30, 7, 9]))
        batch = batch_of(heads, TargetFeatures(target, [Example([5, 6, 7, 8, 9], 1)]))
        assert batch["columns"].tolist() == [[1, OUTSIDE], [OUTSIDE, 2], [2, IGNORED], [IGNORED] * 2]


class TestRanks:
    def test_equal_logits_share_no_rank(self) -> None:
        logits = torch.tensor([[[3.0, 5.0, 5.0, 1.0, 5.0]]])
        for column, rank in enumerate([3, 0, 1, 4, 2]):
            ranks, losses = rank_guesses(torch.zeros(1, 1, 2), torch.tensor([[column]]), lambda features: logits)
            assert ranks.item() == rank
            torch.testing.assert_close(losses[0, 0], -logits[0, 0].log_softmax(-1)[column])

    @pytest.mark.parametrize(
        ("logits", "ranks"),
        [
            ([math.nan, math.nan, math.nan], [3, 3, 3]),
            ([1.0, math.nan, 2.0], [2, 3, 1]),
            ([1.0, math.inf, 2.0], [2, 3, 1]),
            ([1.0, -math.inf, 2.0], [1, 3, 0]),
        ],
    )
    def test_scores_that_are_not_finite_are_never_right(self, logits: list[float], ranks: list[int]) -> None:
        scores = torch.tensor(logits).expand(1, 3, 3)
        found, _ = rank_guesses(torch.zeros(1, 3, 2), torch.tensor([[0], [1], [2]]), lambda features: scores)
        assert found.flatten().tolist() == ranks

    def test_marks_stay_what_they_are(self) -> None:
        columns = torch.tensor([[OUTSIDE, IGNORED, 1]])
        ranks, losses = rank_guesses(torch.zeros(3, 1, 2), columns, lambda features: torch.zeros(3, 1, 4))
        assert ranks.tolist() == [[OUTSIDE, IGNORED, 1]]
        assert losses[0, :2].tolist() == [0, 0]


class TestEvaluation:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_counts_and_loss_are_those_of_a_loop(
        self, variant: str, target: PreTrainedModel, held_out: TargetFeatures, tmp_path: Path
    ) -> None:
        heads = make_heads(target, **VARIANTS[variant])
        trainer = MedusaTrainer(heads, eval_dataset=held_out, head_decay=DECAY, width=7, args=arguments(tmp_path))
        metrics = trainer.evaluate()
        assert metrics["eval_loss"] == pytest.approx(loss_of(heads, held_out).item(), rel=1e-5)
        for head, pairs in enumerate(guesses_of(heads, held_out)):
            orders = [(logits.argsort(descending=True)[:7].tolist(), column) for logits, column in pairs]
            rates = [sum(order[rank] == column for order, column in orders) / len(pairs) for rank in range(7)]
            assert trainer.rank_counts is not None
            assert trainer.rank_counts.rates[head] == pytest.approx(rates)
            assert trainer.rank_counts.totals[head] == len(pairs)
            assert metrics[f"eval_head{head}_top1"] == pytest.approx(rates[0])
            assert metrics[f"eval_head{head}_top5"] == pytest.approx(sum(rates[:5]))

    def test_agrees_with_measuring(self, target: PreTrainedModel, held_out: TargetFeatures, tmp_path: Path) -> None:
        heads = make_heads(target)
        trainer = MedusaTrainer(heads, eval_dataset=held_out, args=arguments(tmp_path))
        trainer.evaluate()
        assert trainer.rank_counts is not None
        assert trainer.rank_counts.rates == measure_ranks(heads, held_out).rates


class TestTraining:
    def test_heads_learn_and_the_target_stays(
        self, train: TargetFeatures, target: PreTrainedModel, tmp_path: Path
    ) -> None:
        before = {name: weight.clone() for name, weight in target.state_dict().items()}
        heads = MedusaHeads.for_target(target, num_heads=2)
        trainer = MedusaTrainer(heads, train_dataset=train, args=arguments(tmp_path, num_train_epochs=20))
        first = trainer.evaluate(train)
        trainer.train()
        last = trainer.evaluate(train)
        assert last["eval_loss"] < 0.8 * first["eval_loss"]
        for head in range(2):
            assert last[f"eval_head{head}_top1"] > first[f"eval_head{head}_top1"]
        assert not target.training
        assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())
        assert not any(weight.grad is not None for weight in target.parameters())

    def test_bf16(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = MedusaHeads.for_target(train.target, num_heads=2)
        trainer = MedusaTrainer(heads, train_dataset=train, args=arguments(tmp_path, bf16=True, num_train_epochs=8))
        trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        assert losses[-1] < losses[0]
        assert {weight.dtype for weight in heads.parameters()} == {torch.float32}

    @pytest.mark.parametrize("stop", [6, 8, 12], ids=["at the end of an epoch", "within one", "at the last save"])
    def test_a_killed_run_goes_on_as_if_nothing_had_happened(
        self, stop: int, train: TargetFeatures, held_out: TargetFeatures, tmp_path: Path
    ) -> None:
        settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}

        def make(folder: Path, *callbacks: TrainerCallback) -> MedusaTrainer:
            return MedusaTrainer(
                MedusaHeads.for_target(train.target, num_heads=2, own_output=True),
                train_dataset=train,
                eval_dataset=held_out,
                args=arguments(folder, **settings),
                callbacks=list(callbacks),
            )

        whole = make(tmp_path / "whole")
        whole.train()
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "killed", KillAt(stop + 1)).train()
        resumed = make(tmp_path / "killed")
        checkpoint = get_last_checkpoint(str(tmp_path / "killed"))
        assert checkpoint is not None
        assert checkpoint.endswith(f"-{stop}")
        resumed.train(resume_from_checkpoint=checkpoint)
        for one, other in zip(whole.heads.parameters(), resumed.heads.parameters(), strict=True):
            assert torch.equal(one, other)
        assert plain(whole.state.log_history) == plain(resumed.state.log_history)
        assert whole.state.global_step == resumed.state.global_step == 18

    def test_checkpoints_hold_heads_only(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = MedusaHeads.for_target(train.target, num_heads=2)
        trainer = MedusaTrainer(heads, train_dataset=train, args=arguments(tmp_path))
        trainer.save_model(str(tmp_path))
        assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 4 * 2 * 32 * 33 + 2000


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **further: Any) -> None:
        if state.global_step + 1 == self._step:
            raise KeyboardInterrupt


class TestNonFinite:
    def test_a_loss_stops_the_training(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = make_heads(train.target)
        next(heads.parameters()).data.fill_(math.nan)
        with pytest.raises(NonFiniteTrainingError, match=r"loss of step 1 is nan: .* lower learning_rate than 0\.01"):
            MedusaTrainer(heads, arguments(tmp_path), train_dataset=train).train()

    def test_weights_of_the_last_step_are_seen(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = make_heads(train.target)
        trainer = MedusaTrainer(heads, arguments(tmp_path), train_dataset=train, eval_dataset=train)
        trainer.check_weights()
        next(heads.parameters()).data.view(-1)[0] = math.inf
        with pytest.raises(NonFiniteTrainingError, match="left NaN or infinite weights in heads.blocks"):
            trainer.check_weights()
        next(heads.parameters()).data.fill_(math.nan)
        with pytest.raises(NonFiniteTrainingError, match="eval_.* after step 0 is nan"):
            trainer.evaluate()


class TestOrder:
    def test_every_epoch_has_all_texts_in_another_order(self) -> None:
        order = SimilarLengths(list(range(103)), batch_size=4, seed=0)
        first = list(order)
        assert first == list(order)
        order.epoch = 1
        second = list(order)
        assert sorted(first) == sorted(second) == list(range(103))
        assert first != second
        assert list(SimilarLengths(list(range(103)), batch_size=4, seed=1)) != first

    def test_neighbours_have_similar_lengths(self) -> None:
        lengths = [(7 * index) % 1000 for index in range(1000)]
        order = list(SimilarLengths(lengths, batch_size=8, seed=0))
        spans = [
            max(lengths[index] for index in order[start : start + 8])
            - min(lengths[index] for index in order[start : start + 8])
            for start in range(0, 1000, 8)
        ]
        assert max(spans) < 200
        # Long and short batches alternate: a whole epoch by length would bias the steps.
        assert [order[0], order[-1]] != [min(order), max(order)]


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"head_decay": 0.0}, "head_decay=0.0"),
            ({"head_decay": 1.5}, "head_decay=1.5"),
            ({"head_decay": math.nan}, "head_decay=nan"),
            ({"width": 98}, "width=98"),
            ({"train_dataset": None}, "nothing to train"),
            ({"train_dataset": [1, 2]}, "train_dataset must be TargetFeatures, not list"),
        ],
    )
    def test_of_settings(self, changes: dict[str, Any], message: str, train: TargetFeatures, tmp_path: Path) -> None:
        heads = MedusaHeads.for_target(train.target)
        with pytest.raises(ArgumentError, match=message):
            MedusaTrainer(heads, **{"train_dataset": train, "args": arguments(tmp_path)} | changes)

    def test_of_heads_for_another_model(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = MedusaHeads(hidden_size=48, vocab_size=zoo.VOCAB_SIZE)
        with pytest.raises(ArgumentError, match=r"48.*32"):
            MedusaTrainer(heads, train_dataset=train, args=arguments(tmp_path))

    def test_of_a_model_that_is_no_heads(self, train: TargetFeatures, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="MedusaHeads, not LlamaForCausalLM"):
            MedusaTrainer(train.target, train_dataset=train, args=arguments(tmp_path))

    def test_of_an_evaluation_without_texts(self, train: TargetFeatures, tmp_path: Path) -> None:
        heads = MedusaHeads.for_target(train.target)
        trainer = MedusaTrainer(heads, train_dataset=train, args=arguments(tmp_path))
        with pytest.raises(ArgumentError, match="must be TargetFeatures, not NoneType"):
            trainer.evaluate()
