"""How far a draft's guesses are from what the target would say, in pieces that bound the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from hf_specdec.drafts import ReducedOutput
from hf_specdec.errors import DraftModelError

_LOGITS_AT_ONCE = 1 << 23
_PROBE_TOKENS = 8


class Teacher(NamedTuple):
    """The target's distribution at N positions, among k tokens that the draft can guess.

    A distribution is that of the target, cut to its best tokens and to the draft's vocabulary and then scaled to 1.
    """

    columns: Tensor
    """int64 `[N, k]`, places in the draft's vocabulary; 0 where there is none."""
    probs: Tensor
    """float32 `[N, k]`; a row of zeros where the draft can guess none of them."""
    best: Tensor
    """int64 `[N]`, the target's best token, whether or not the draft can guess it."""


class Guesser:
    """What a draft guesses from its last hidden states, without the tokens that it cannot guess.

    Args:
        draft: a distilled draft.

    Raises:
        DraftModelError: logits that are not what its head, scale and cap make of the last hidden states.
    """

    def __init__(self, draft: PreTrainedModel) -> None:
        config = draft.config
        self.head = draft.get_output_embeddings()
        # Cohere multiplies, Granite divides, Gemma 2 caps.
        self._scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._token_map = self.head.token_map if isinstance(self.head, ReducedOutput) else None
        columns = torch.full((config.vocab_size,), -1, device=self.head.weight.device)
        known = torch.arange(config.vocab_size) if self._token_map is None else self._token_map
        self._columns = columns.index_copy_(
            0, known.to(columns.device), torch.arange(len(known), device=columns.device)
        )
        self._check(draft)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """float32 `[N, D]` from `[N, H]`."""
        weight, bias = self.head.weight, self.head.bias
        scores = nn.functional.linear(hidden_states.to(weight.dtype), weight, bias).float() * self._scale
        return scores if self._cap is None else self._cap * torch.tanh(scores / self._cap)

    def tokens(self, columns: Tensor) -> Tensor:
        """Ids of places in the draft's vocabulary."""
        return columns if self._token_map is None else self._token_map[columns]

    def teacher(self, top_ids: Tensor, top_logits: Tensor) -> Teacher:
        """From the target's best tokens `[N, k]`, best first, and their logits `[N, k]`."""
        columns = self._columns[top_ids.long()]
        known = columns >= 0
        probs = top_logits.float().masked_fill(~known, -torch.inf).softmax(-1).nan_to_num(0.0)
        return Teacher(columns.clamp(min=0), probs, top_ids[:, 0].long())

    @torch.no_grad()
    def _check(self, draft: PreTrainedModel) -> None:
        tokens = torch.arange(_PROBE_TOKENS, device=draft.device)[None] % draft.config.vocab_size
        training = draft.training
        draft.eval()
        kind = self.head.weight.dtype
        # Own parameters are in float32 for training, what is shared may be in 16 bit.
        with torch.autocast(draft.device.type, kind, enabled=kind.itemsize == 2):
            whole = draft(input_ids=tokens, use_cache=False).logits[0].float()
            ours = self.logits(draft.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0])
        draft.train(training)
        theirs = whole[:, self.tokens(torch.arange(ours.shape[-1], device=whole.device))]
        if not torch.allclose(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.std())):
            raise DraftModelError(
                f"{type(draft).__name__} makes its logits in a way that this training does not know: they are not "
                "what its head makes of its last hidden state"
            )


def divergence(guesser: Guesser, hidden_states: Tensor, teacher: Teacher) -> Tensor:
    """The mean Kullback-Leibler divergence KL(target, draft), float32 `[]`.

    Logits exist for a few positions at a time, also for the gradient, which is computed together with the value.
    Positions at which the draft can guess nothing right do not count.

    Args:
        guesser: the draft's head.
        hidden_states: `[N, H]`.
        teacher: for the same positions.
    """
    trained = [weight for weight in guesser.head.parameters() if weight.requires_grad]
    value: Tensor = _ChunkedDivergence.apply(hidden_states, guesser, teacher, *trained)  # type: ignore[no-untyped-call]
    return value


@torch.no_grad()
def compare(guesser: Guesser, hidden_states: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """For each position the divergence, float32 `[N]`, and whether both have the same best token, bool `[N]`."""
    values, same = [], []
    for piece in _pieces(guesser, len(hidden_states)):
        logits = guesser.logits(hidden_states[piece])
        values.append(_divergences(logits, teacher.columns[piece], teacher.probs[piece]))
        # The largest of scores with NaN among them is no guess.
        same.append((guesser.tokens(logits.argmax(-1)) == teacher.best[piece]) & logits.isfinite().all(-1))
    return torch.cat(values), torch.cat(same)


def _divergences(logits: Tensor, columns: Tensor, probs: Tensor) -> Tensor:
    guessed = logits.gather(-1, columns) - logits.logsumexp(-1, keepdim=True)
    return (torch.xlogy(probs, probs) - probs * guessed).sum(-1)


def _pieces(guesser: Guesser, num_positions: int) -> Iterator[slice]:
    step = max(_LOGITS_AT_ONCE // len(guesser.head.weight), 1)
    return (slice(start, start + step) for start in range(0, num_positions, step))


class _ChunkedDivergence(torch.autograd.Function):
    """The mean over positions; the gradient is made in the same pass as the value."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_states: Tensor, guesser: Guesser, teacher: Teacher, *trained: Tensor
    ) -> Tensor:
        counted = (teacher.probs.sum(-1) > 0).float()
        weights = counted / counted.sum().clamp(min=1)
        total = torch.zeros((), device=hidden_states.device)
        gradients = [torch.zeros_like(tensor) for tensor in (hidden_states, *trained)]
        for part in _pieces(guesser, len(hidden_states)):
            piece = hidden_states[part].detach().requires_grad_()
            with torch.enable_grad():
                values = _divergences(guesser.logits(piece), teacher.columns[part], teacher.probs[part])
                value = (values * weights[part]).sum()
                found = torch.autograd.grad(value, (piece, *trained))
            total += value.detach()
            gradients[0][part] = found[0]
            for gradient, addend in zip(gradients[1:], found[1:], strict=True):
                gradient += addend
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, *trained = (gradient * upstream[0] for gradient in ctx.saved_tensors)
        return hidden_states, None, None, *trained
