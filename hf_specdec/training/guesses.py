"""What heads should guess at which positions, and how good their guesses are, in pieces that bound the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from hf_specdec.heads import MedusaHeads
from hf_specdec.training.features import TargetFeatures

IGNORED = -100
"""No guess is asked for: the text has ended, or the token is the prompt's."""
OUTSIDE = -1
"""The token is none that the heads can guess: no part of the loss, and a miss in accuracies."""

# A processor is fastest while a piece stays in its caches.
_LOGITS_ON_CPU, _LOGITS_AT_ONCE = 1 << 21, 1 << 26


class HeadCollator:
    """Makes batches of what heads read and of what they should guess there.

    Head i reads the hidden state of position t and guesses the token at t + 2 + i: the target itself says the one at
    t + 1. Positions are read from the prompt's last token on, where drafts begin, so all guesses are of the answer.

    Args:
        features: the texts.
        heads: the heads; only their number and their draft vocabulary are read.
    """

    def __init__(self, features: TargetFeatures, heads: MedusaHeads) -> None:
        self._collate = features.collator(heads.num_heads + 1)
        vocab_size = int(features.target.config.get_text_config(decoder=True).vocab_size)
        # The last entry is for places behind the end of a text.
        self._columns = torch.arange(vocab_size + 1)
        if heads.token_map is not None:
            self._columns = torch.full((vocab_size + 1,), OUTSIDE)
            self._columns[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
        self._columns[-1] = IGNORED

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate.

        Args:
            items: of the data set.

        Returns:
            `hidden_states` `[N, H]`, `columns` int64 `[N, K]` (the logit that should be the largest, or `OUTSIDE` or
            `IGNORED`), `rows` int64 `[N]` (the item that a position is from) and `num_rows` int64 `[]`.
        """
        batch = self._collate(items)
        return {
            "hidden_states": batch["hidden_states"],
            "columns": self._columns[batch["targets"][:, 1:].clamp(min=-1)],
            "rows": batch["positions"] // batch["input_ids"].shape[1],
            "num_rows": torch.tensor(len(items)),
        }


def head_losses(
    heads: MedusaHeads, features: Tensor, columns: Tensor, output: Callable[[Tensor], Tensor], weights: Tensor
) -> Tensor:
    """The weighted sum over heads of their mean cross entropies.

    Logits exist for a few positions at a time, also for the gradient, which is computed together with the loss.

    Args:
        heads: the heads; own output matrices get their gradient too.
        features: `[K, N, H]`.
        columns: int64 `[N, K]`, as from `HeadCollator`.
        output: from `heads.output_of`.
        weights: float32 `[K]`.

    Returns:
        float32 `[]`.
    """
    labels = columns.T.masked_fill(columns.T < 0, IGNORED)
    scales = weights / (labels != IGNORED).sum(1).clamp(min=1)
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        features, labels, scales, output, *(matrix.weight for matrix in heads.outputs)
    )
    return loss


def rank_guesses(features: Tensor, columns: Tensor, output: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """At which rank of a head's guesses the right token stands, and what it costs in cross entropy.

    Args:
        features: `[K, N, H]`.
        columns: int64 `[N, K]`, as from `HeadCollator`.
        output: from `heads.output_of`.

    Returns:
        Ranks int64 `[N, K]` from 0 (`OUTSIDE` and `IGNORED` stay what they are; right tokens without a finite logit
        stand behind all others), and cross entropies float32 `[N, K]`, 0 where there is no rank.
    """
    ranks, losses = columns.clone(), torch.zeros(columns.shape, device=columns.device)
    for start, stop in _chunks(features, output):
        wanted = columns[start:stop].T
        logits = output(features[:, start:stop]).float()
        right = wanted.clamp(min=0).unsqueeze(-1)
        value = logits.gather(-1, right)
        # Equal logits are common in 16 bit: the smaller column goes first, so that a rank is taken by one token only.
        before = torch.arange(logits.shape[-1], device=logits.device) < right
        # NaN is neither larger nor smaller: what is not known to be at most as large stands before, and a right token
        # without a finite score behind all.
        rank = (~(logits <= value) | ((logits == value) & before)).sum(-1)
        rank = torch.where(value.squeeze(-1).isfinite(), rank, logits.shape[-1])
        loss = logits.logsumexp(-1) - value.squeeze(-1)
        ranks[start:stop] = torch.where(wanted >= 0, rank, wanted).T
        losses[start:stop] = torch.where(wanted >= 0, loss, 0.0).T
    return ranks, losses


def _chunks(features: Tensor, output: Callable[[Tensor], Tensor]) -> Iterator[tuple[int, int]]:
    """Pieces of the positions whose logits fit into the bound."""
    num_heads, num_positions, _ = features.shape
    if num_positions:
        with torch.no_grad():
            size = output(features[:, :1]).shape[-1]
        bound = _LOGITS_ON_CPU if features.device.type == "cpu" else _LOGITS_AT_ONCE
        step = max(bound // (num_heads * size), 1)
        for start in range(0, num_positions, step):
            yield start, min(start + step, num_positions)


def _own_logits(features: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    return torch.stack([nn.functional.linear(one, matrix) for one, matrix in zip(features, matrices, strict=True)])


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum of `scales[k] * cross entropy`; the gradient is made in the same pass as the loss."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        features: Tensor,
        labels: Tensor,
        scales: Tensor,
        output: Callable[[Tensor], Tensor],
        *matrices: Tensor,
    ) -> Tensor:
        total = torch.zeros((), device=features.device)
        gradients = [torch.zeros_like(tensor) for tensor in (features, *matrices)]
        # Other leaves than the parameters, whose hooks should run once, when the gradient is complete.
        leaves = [matrix.detach().requires_grad_() for matrix in matrices]
        for start, stop in _chunks(features, output):
            piece = features[:, start:stop].detach().requires_grad_()
            with torch.enable_grad():
                logits = output(piece) if not leaves else _own_logits(piece, leaves)
                logits = logits.float()
                losses = nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels[:, start:stop].flatten(), ignore_index=IGNORED, reduction="none"
                )
                loss = (losses.view(len(scales), -1).sum(1) * scales).sum()
                pieces = torch.autograd.grad(loss, (piece, *leaves))
            total += loss.detach()
            gradients[0][:, start:stop] = pieces[0]
            for gradient, addend in zip(gradients[1:], pieces[1:], strict=True):
                gradient += addend
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        features, *matrices = (gradient * upstream[0] for gradient in ctx.saved_tensors)
        return features, None, None, None, *matrices
