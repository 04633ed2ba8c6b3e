"""The Trainer of distilled drafts: knowledge distillation on the target's own distribution (Zhou et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, TrainingArguments

from hf_specdec.errors import ArgumentError
from hf_specdec.training.divergence import Guesser, compare, divergence
from hf_specdec.training.features import Batch, TargetFeatures
from hf_specdec.training.student import Student
from hf_specdec.training.trainer import FeaturesTrainer

_SAME, _DIVERGENCE, _COUNTED, _POSITIONS = range(4)


class DistillTrainer(FeaturesTrainer):
    """Trains a draft to say what its target would say; everything else is the Trainer of transformers.

    The loss is the mean of KL(target, draft) over the positions of answers, with the target's distribution cut to its
    best tokens and to the draft's vocabulary. Each evaluation logs `eval_kl`, `eval_agreement` (how often both have
    the same best token), `eval_acceptance_1`, `_2`, ... (how often the first so many guesses of a chain are all right)
    and `eval_tokens` (tokens a round that a chain of `depth` guesses then brings).

    Args:
        model: the draft, from `make_draft` with `dtype=torch.float32`; its own parameters are trained in place.
        args: as for Trainer.
        train_dataset: texts with the target's best scores (`top_k`).
        eval_dataset: held-out texts, as the target writes them without sampling: there the next guess of a chain is
            the draft's guess behind the text.
        depth: guesses of a chain that evaluations look at.
        **arguments: everything else that Trainer takes.

    Raises:
        ArgumentError: no data set, one without scores, or one of another kind.
        DraftModelError: the draft makes its logits in an unknown way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        train_dataset: TargetFeatures | None = None,
        eval_dataset: TargetFeatures | None = None,
        depth: int = 5,
        **arguments: Any,
    ) -> None:
        self.check_datasets(train_dataset, eval_dataset)
        if depth < 1:
            raise ArgumentError(f"depth={depth!r} must be at least 1")
        super().__init__(
            model=Student(model),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **arguments,
        )
        self._guesser = Guesser(model)
        self._depth = depth

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch of `TargetFeatures.collator`; logits never exist whole, so none are returned."""
        states = model(inputs["input_ids"], inputs["positions"])
        loss = divergence(self._guesser, states, self._guesser.teacher(inputs["top_ids"], inputs["top_logits"]))
        return (loss, {"hidden_states": states}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Counts for each text, float32 `[B, 4]`, and how often d guesses are right of how many, `[B, depth, 2]`."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            states = model(inputs["input_ids"], inputs["positions"])
        teacher = self._guesser.teacher(inputs["top_ids"], inputs["top_logits"])
        values, same = compare(self._guesser, states, teacher)
        rows = inputs["positions"] // inputs["input_ids"].shape[1]
        counted = (teacher.probs.sum(-1) > 0).float()
        counts = torch.stack([same.float(), values * counted, counted, torch.ones_like(values)], -1)
        sums = counts.new_zeros(len(inputs["input_ids"]), counts.shape[-1]).index_add_(0, rows, counts)
        return None, sums, _chains(same, rows, len(sums), self._depth)

    @property
    def draft(self) -> PreTrainedModel:
        """The draft that is trained."""
        draft: PreTrainedModel = self.accelerator.unwrap_model(self.model).draft
        return draft

    @classmethod
    def check_dataset(cls, name: str, dataset: Any) -> TargetFeatures:
        """See `FeaturesTrainer`; the target's best scores must be among the features."""
        if isinstance(dataset, TargetFeatures) and dataset.top_k:
            return dataset
        kind = "TargetFeatures without top_k" if isinstance(dataset, TargetFeatures) else type(dataset).__name__
        raise ArgumentError(f"{name} must be TargetFeatures with top_k, such as 64, not {kind}")

    def collator(self, dataset: TargetFeatures) -> Callable[[list[dict[str, Any]]], Batch]:
        """Texts with the target's best scores."""
        return dataset.collator()

    def metrics_of(self, prediction: EvalPrediction) -> dict[str, float]:
        """Divergence, agreement, and how often guesses of a chain are right."""
        sums = torch.from_numpy(prediction.predictions).double().sum(0)
        right, tried = torch.from_numpy(prediction.label_ids).double().sum(0).unbind(-1)
        acceptance = (right / tried.clamp(min=1)).tolist()
        divergences = float(sums[_DIVERGENCE] / sums[_COUNTED].clamp(min=1))
        return {
            "kl": divergences,
            "agreement": float(sums[_SAME] / sums[_POSITIONS]),
            **{f"acceptance_{depth}": rate for depth, rate in enumerate(acceptance, 1)},
            "tokens": 1 + sum(acceptance),
        }


def _chains(same: Tensor, rows: Tensor, num_rows: int, depth: int) -> Tensor:
    """For d up to `depth`: at how many positions of each text d guesses in a row are right, and of how many.

    Args:
        same: bool `[N]`.
        rows: int64 `[N]`, rising.
        num_rows: B.
        depth: of the chain.

    Returns:
        float32 `[B, depth, 2]`.
    """
    counts = torch.zeros(num_rows, depth, 2, device=same.device)
    right = torch.ones_like(same)
    for d in range(min(depth, len(same))):
        # Chains of d + 1 guesses that begin at each position and do not run out of their text.
        length = len(same) - d
        inside = rows[:length] == rows[d:]
        right = right[:length] & same[d:]
        pairs = torch.stack([(right & inside).float(), inside.float()], -1)
        counts[:, d].index_add_(0, rows[:length], pairs)
    return counts
