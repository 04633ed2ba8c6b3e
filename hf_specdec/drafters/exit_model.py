"""The target's own first layers as a draft: no cache of their own, and nothing that is run twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdec.compat import pad_token
from hf_specdec.drafters.base import DraftContext, LowerLayers
from hf_specdec.drafters.draft_model import processed_scores


class ExitModel:
    """Drives the first layers of the target for `draft_chains`.

    Args:
        run: `context.lower_layers`.
        context: the call.
    """

    def __init__(self, run: LowerLayers, context: DraftContext) -> None:
        self._run = run
        self._context = context
        self._pad_token = pad_token(context.config) or 0

    def budgets(self, context: DraftContext) -> list[int]:
        """The rows' own: the draft reaches as far as the target."""
        return context.budgets

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Run the pending token of each row; processed scores for the next one, `[B, V]`."""
        pending = torch.tensor([[text[-1]] for text in texts])
        return self._scores(pending, torch.zeros_like(pending), torch.ones(*pending.shape, 1, dtype=torch.bool))[:, 0]

    def grow(self, tokens: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Run guesses `[B, m]` of one level, which see the pending token and the `ancestors` among the guesses."""
        budgets, generated = (
            torch.tensor(one)[:, None] for one in (self._context.budgets, self._context.num_generated)
        )
        # Rows that wait for others run the padding with which a batch in lock-step verifies them, so that it need not
        # be run again. Else nobody reads it, and it must not stand behind the last position that the model has.
        room = (generated + budgets).max() - generated
        depths = room.clamp(max=depth).expand(tokens.shape)
        tokens = torch.where(budgets > 0, tokens, self._pad_token)
        return self._scores(tokens, depths, torch.nn.functional.pad(ancestors, (1, 0), value=True))

    def keep(self, tail_slots: Sequence[Sequence[int]]) -> None:
        """The target's cache is the draft's, and the target has seen to it."""

    def _scores(self, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        logits = self._run(tokens, depths, ancestors)[..., : self._context.vocab_size].to(self._context.prompt.device)
        return processed_scores(self._context.score_processors, logits.flatten(0, 1)).view(*tokens.shape, -1)
