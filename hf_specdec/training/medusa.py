"""The Trainer of Medusa heads (Cai et al. 2024, "Medusa-1": the target stays as it is)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, TrainingArguments

from hf_specdec.checks import require_share
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.guesses import HeadCollator, head_losses, rank_guesses
from hf_specdec.training.rank_rates import RankCounts, check_width, count_ranks
from hf_specdec.training.trainer import FeaturesTrainer


class MedusaTrainer(FeaturesTrainer):
    """Trains heads to guess what the target will say; everything else is the Trainer of transformers.

    The loss is the sum over heads of `head_decay**i` times the mean cross entropy of head i with the token that comes
    i + 2 places behind the position, over all positions of answers; tokens outside the draft vocabulary are left out.
    At each evaluation it logs the loss and, for each head, how often its best guess and one of its five best came
    true (`eval_head0_top1`, `eval_head0_top5`, ...; tokens outside the draft vocabulary count as misses).

    Args:
        model: the heads, in float32.
        args: as for Trainer.
        train_dataset: texts with what the target says about them. The target is not changed, trained or saved.
        eval_dataset: held-out texts.
        head_decay: how much less each further head counts in the loss.
        width: ranks of guesses that evaluations tell apart.
        **arguments: everything else that Trainer takes.

    Raises:
        ArgumentError: heads and target do not fit, `head_decay` is not in (0, 1], `width` is too large, or there is no
            data set, or one of another kind.
    """

    def __init__(
        self,
        model: MedusaHeads,
        args: TrainingArguments,
        *,
        train_dataset: TargetFeatures | None = None,
        eval_dataset: TargetFeatures | None = None,
        head_decay: float = 0.8,
        width: int = 10,
        **arguments: Any,
    ) -> None:
        if not isinstance(model, MedusaHeads):
            raise ArgumentError(f"model must be MedusaHeads, not {type(model).__name__}")
        features = self.check_datasets(train_dataset, eval_dataset)
        require_share(head_decay=head_decay)
        model.check(features.target)
        check_width(model, width)
        super().__init__(
            model=_Trained(model),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **arguments,
        )
        self.rank_counts: RankCounts | None = None
        """What the latest evaluation counted."""
        self._output = model.output_of(features.target)
        self._weights = torch.tensor([head_decay**head for head in range(model.num_heads)], device=self.args.device)
        self._width = width

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch from `HeadCollator`; of no use with `return_outputs`, since logits never exist whole."""
        features = model(inputs["hidden_states"])
        loss = head_losses(self.heads, features, inputs["columns"], self._output, self._weights)
        return (loss, {"features": features}) if return_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Tensor, Tensor]:
        """Counts of ranks `[B, K, R + 1]`, and sums and numbers of cross entropies `[B, K, 2]`, for each text."""
        inputs = self._prepare_inputs(inputs)
        num_rows = int(inputs["num_rows"])
        with torch.no_grad(), self.compute_loss_context_manager():
            ranks, losses = rank_guesses(model(inputs["hidden_states"]), inputs["columns"], self._output)
        sums = torch.zeros(num_rows, *losses.shape[1:], 2, device=losses.device)
        sums.index_add_(0, inputs["rows"], torch.stack([losses, (ranks >= 0).float()], -1))
        return None, count_ranks(ranks, inputs["rows"], num_rows, self._width), sums

    @property
    def heads(self) -> MedusaHeads:
        """The heads that are trained."""
        heads: MedusaHeads = self.accelerator.unwrap_model(self.model).heads
        return heads

    def collator(self, dataset: TargetFeatures) -> HeadCollator:
        """What heads read, and what they should guess."""
        return HeadCollator(dataset, self.heads)

    def metrics_of(self, prediction: EvalPrediction) -> dict[str, float]:
        """The loss, and how often each head was right."""
        self.rank_counts = counts = RankCounts.of_rows(torch.from_numpy(prediction.predictions))
        sums = torch.from_numpy(prediction.label_ids).double().sum(0)
        losses = sums[:, 0] / sums[:, 1].clamp(min=1)
        metrics = {"loss": float((losses * self._weights.cpu()).sum())}
        for head, (top1, top5, loss) in enumerate(zip(counts.top1, counts.top5, losses.tolist(), strict=True)):
            metrics |= {f"head{head}_top1": top1, f"head{head}_top5": top5, f"head{head}_loss": loss}
        return metrics


class _Trained(nn.Module):
    """The heads as the Trainer wants its model: with a forward, and without a `config` that it would write to."""

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.heads.features(hidden_states)
