"""The Trainer of distilled drafts: knowledge distillation on the target's own distribution (Zhou et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import EvalPrediction, PreTrainedModel, Trainer

from hf_specdec.errors import ArgumentError
from hf_specdec.training.divergence import Guesser, compare, divergence
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.medusa import SimilarLengths, _NextOrder
from hf_specdec.training.student import Student

_SAME, _DIVERGENCE, _COUNTED, _POSITIONS = range(4)


class DistillTrainer(Trainer):
    """Trains a draft to say what its target would say; everything else is the Trainer of transformers.

    The loss is the mean of KL(target, draft) over the positions of answers, with the target's distribution cut to its
    best tokens and to the draft's vocabulary. Each evaluation logs `eval_kl`, `eval_agreement` (how often both have
    the same best token), `eval_acceptance_1`, `_2`, ... (how often the first so many guesses of a chain are all right)
    and `eval_tokens` (tokens a round that a chain of `depth` guesses then brings).

    Args:
        model: the draft, from `make_draft` with `dtype=torch.float32`; its own parameters are trained in place.
        train_dataset: texts with the target's best scores (`top_k`).
        eval_dataset: held-out texts, as the target writes them without sampling: there the next guess of a chain is
            the draft's guess behind the text.
        depth: guesses of a chain that evaluations look at.
        **arguments: everything else that Trainer takes.

    Raises:
        ArgumentError: no data set, one without scores, or one of another kind.
        DraftModelError: the draft makes its logits in an unknown way.
    """

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        train_dataset: TargetFeatures | None = None,
        eval_dataset: TargetFeatures | None = None,
        depth: int = 5,
        **arguments: Any,
    ) -> None:
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is not None:
                _check_features(name, dataset)
        if depth < 1:
            raise ArgumentError(f"depth={depth!r} must be at least 1")
        super().__init__(
            model=Student(model),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._metrics,
            **arguments,
        )
        self._guesser = Guesser(model)
        self._depth = depth
        self._order = SimilarLengths(
            train_dataset.lengths if train_dataset is not None else [],
            self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps,
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        self.add_callback(_NextOrder(self._order))

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

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of texts of similar lengths, in another order in each epoch."""
        return self._loader(self.train_dataset, self.args.train_batch_size, self._order)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Texts in their order."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(dataset, self.args.eval_batch_size, None)

    def _loader(self, dataset: Any, batch_size: int, sampler: Sampler[int] | None) -> DataLoader[Any]:
        _check_features("the data set", dataset)
        loader = DataLoader(
            dataset,
            batch_size,
            sampler=sampler,
            collate_fn=dataset.collator(),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared

    def _metrics(self, prediction: EvalPrediction) -> dict[str, float]:
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


def _check_features(name: str, dataset: Any) -> None:
    if not isinstance(dataset, TargetFeatures) or not dataset.top_k:
        kind = "TargetFeatures without top_k" if isinstance(dataset, TargetFeatures) else type(dataset).__name__
        raise ArgumentError(f"{name} must be TargetFeatures with top_k, such as 64, not {kind}")
