"""What both Trainers have in common: their data are `TargetFeatures`, in an order that seed and epoch fix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import EvalPrediction, Trainer, TrainingArguments

from hf_specdec.errors import ArgumentError
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.order import NextOrder, SimilarLengths
from hf_specdec.training.weights import NonFiniteTrainingError, non_finite_weight


class FeaturesTrainer(Trainer):
    """A Trainer on texts with what the target says about them.

    Args:
        model: what is trained.
        args: as for Trainer.
        train_dataset, eval_dataset: the texts; see `check_datasets`.
        **arguments: everything else that Trainer takes.

    Raises:
        ArgumentError: this process would spread batches over several GPUs.
    """

    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: TargetFeatures | None,
        eval_dataset: TargetFeatures | None,
        **arguments: Any,
    ) -> None:
        if args.n_gpu > 1:
            raise ArgumentError(
                f"args: this process sees {args.n_gpu} GPUs and can use one; start one process for each with "
                "accelerate launch, or name one in CUDA_VISIBLE_DEVICES"
            )
        if args.ddp_find_unused_parameters is None:
            # All are used, output matrices behind the forward, where DistributedDataParallel would not look.
            args.ddp_find_unused_parameters = False
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self.metrics_of,
            **arguments,
        )
        self._order = SimilarLengths(
            train_dataset.lengths if train_dataset is not None else [],
            self.args.train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps,
            self.args.seed if self.args.data_seed is None else self.args.data_seed,
        )
        self.add_callback(NextOrder(self._order))
        self.measured: dict[str, float] | None = None
        """What the latest evaluation measured."""

    def collator(self, dataset: TargetFeatures) -> Callable[[list[dict[str, Any]]], Any]:
        """What makes batches of the items of a data set."""
        raise NotImplementedError

    def metrics_of(self, prediction: EvalPrediction) -> dict[str, float]:
        """What an evaluation logs, from all that `prediction_step` returned."""
        raise NotImplementedError

    @classmethod
    def check_dataset(cls, name: str, dataset: Any) -> TargetFeatures:
        """The data set, if this Trainer can train on it.

        Raises:
            ArgumentError: it cannot.
        """
        if not isinstance(dataset, TargetFeatures):
            raise ArgumentError(f"{name} must be TargetFeatures, not {type(dataset).__name__}")
        return dataset

    @classmethod
    def check_datasets(cls, train_dataset: Any, eval_dataset: Any) -> TargetFeatures:
        """One of the data sets, if all that there are will do.

        Raises:
            ArgumentError: they will not, or there are none.
        """
        named = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        given = [cls.check_dataset(name, dataset) for name, dataset in named.items() if dataset is not None]
        if not given:
            raise ArgumentError(
                "train_dataset=None and eval_dataset=None: there is nothing to train or to evaluate on"
            )
        return given[0]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """A step of the Trainer, which would log the mean of earlier losses for one that is not finite, and go on.

        Raises:
            NonFiniteTrainingError: the loss is not finite.
        """
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not loss.isfinite():
            raise NonFiniteTrainingError(
                f"the loss of step {self.state.global_step + 1} is {float(loss)}: {self._cure}"
            )
        return loss

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """An evaluation of the Trainer; it comes before a checkpoint, which then is not written if this raises.

        Raises:
            NonFiniteTrainingError: something that is measured is not finite.
        """
        metrics: dict[str, float] = super().evaluate(*arguments, **named)
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NonFiniteTrainingError(f"{name} after step {self.state.global_step} is {value}: {self._cure}")
        self.measured = metrics
        return metrics

    def check_weights(self) -> None:
        """See that what was trained is of use.

        Raises:
            NonFiniteTrainingError: a weight is not finite.
        """
        name = non_finite_weight(self.accelerator.unwrap_model(self.model))
        if name is not None:
            raise NonFiniteTrainingError(f"the training left NaN or infinite weights in {name}: {self._cure}")

    @property
    def _cure(self) -> str:
        return (
            f"the training is lost; begin again in a new folder with a lower learning_rate than "
            f"{self.args.learning_rate:g}, or in another number format"
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of texts of similar lengths, in another order in each epoch."""
        return self._loader(self.train_dataset, self.args.train_batch_size, self._order)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Texts in their order."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._loader(dataset, self.args.eval_batch_size, None)

    def _loader(self, dataset: Any, batch_size: int, sampler: Sampler[int] | None) -> DataLoader[Any]:
        features = self.check_dataset("the data set", dataset)
        loader = DataLoader(
            features,
            batch_size,
            sampler=sampler,
            collate_fn=self.collator(features),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared
