"""What both Trainers have in common: their data are `TargetFeatures`, in an order that seed and epoch fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers import EvalPrediction, Trainer, TrainingArguments

from hf_specdec.errors import ArgumentError
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.order import NextOrder, SimilarLengths


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
