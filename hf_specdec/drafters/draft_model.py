"""A small model as drafter: its cache kept in step with the text, its scores made comparable with the target's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.compat import forward_parameters, num_positions
from hf_specdec.drafters.base import DraftContext
from hf_specdec.runner import ModelRunner

_PREFILL_CHUNK = 512


class DraftModel:
    """Raw forwards of a draft model, one row of text for each row of the call.

    The draft's cache holds a prefix of each row's text. `catch_up` feeds what was emitted since; `grow` adds nodes of
    the tree that is being drafted; `keep` retains those of them that the target accepted.

    Args:
        model: any decoder-only model with the target's tokenizer, on any device.
        context: the call.
    """

    def __init__(self, model: PreTrainedModel, context: DraftContext) -> None:
        self._model = model
        self._vocab_size = context.vocab_size
        config = model.config.get_text_config(decoder=True)
        self._own_vocab_size: int = config.vocab_size
        self._max_length: int = num_positions(model) or sys.maxsize
        self._processors = context.score_processors
        self._device = context.prompt.device  # where the call's scores and noise live
        mask = context.prompt_mask
        padded = not bool(mask.all())
        self._runner = ModelRunner(
            model,
            TreeCache(),
            context.batch_size,
            mask if padded else None,
            torch.zeros(context.batch_size, dtype=torch.int64),
            self._max_length - 1,
        )
        self._fed = [0] * context.batch_size  # tokens of context.texts that the cache holds, padding not counted
        self._prefill(context.prompt[:, :-1], mask[:, :-1], padded)

    def budgets(self, context: DraftContext) -> list[int]:
        """The deepest useful node of each row that the draft can still reach: it has so many positions and no more."""
        return [
            max(min(budget, self._max_length - len(text)), 0)
            for budget, text in zip(context.budgets, context.texts, strict=True)
        ]

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Feed what each row's text has gained; returns processed scores for the next token, `[B, V]`."""
        missing = [list(text[fed : self._max_length]) for text, fed in zip(texts, self._fed, strict=True)]
        width = max(len(row) for row in missing)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in missing])
        depths = torch.arange(width).expand(len(missing), width)
        ancestors = torch.ones(width, width, dtype=torch.bool).tril().expand(len(missing), width, width)
        logits = self._runner.forward(self._known(tokens), depths, ancestors).logits
        self._runner.commit([range(len(row)) for row in missing])
        self._fed = [fed + len(row) for fed, row in zip(self._fed, missing, strict=True)]
        last = torch.tensor([len(row) - 1 for row in missing], device=logits.device)
        return self._scores(logits[torch.arange(len(missing), device=logits.device), last])

    def grow(self, tokens: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """Run one level of the tree.

        Args:
            tokens: int64 `[B, m]`.
            depth: of these nodes; the first guesses have depth 1.
            ancestors: bool `[B, m, tail + m]`.

        Returns:
            Processed scores for the token after each node, `[B, m, V]`.
        """
        depths = torch.full(tokens.shape, depth - 1)  # the pending token is committed here, so guesses start at 0
        logits = self._runner.forward(self._known(tokens), depths, ancestors).logits
        return self._scores(logits.flatten(0, 1)).view(*tokens.shape, -1)

    def keep(self, tail_slots: Sequence[Sequence[int]]) -> None:
        """The target accepted these of the grown nodes, in text order; forget the others."""
        self._runner.commit(tail_slots)
        self._fed = [fed + len(slots) for fed, slots in zip(self._fed, tail_slots, strict=True)]

    def _prefill(self, tokens: Tensor, mask: Tensor, padded: bool) -> None:
        """Read the prompt but its last token, in chunks, computing no logits that nobody reads."""
        if tokens.shape[1] == 0:
            return
        tokens, mask = tokens.to(self._model.device), mask.to(self._model.device)
        tokens = self._known(tokens)
        positions = (mask.long().cumsum(-1) - 1).clamp(0, self._max_length - 1)
        keep_one = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(self._model) else {}
        for start in range(0, tokens.shape[1], _PREFILL_CHUNK):
            end = min(start + _PREFILL_CHUNK, tokens.shape[1])
            attention = {"attention_mask": mask[:, :end].long()} if padded else {}
            inputs: dict[str, Any] = {"position_ids": positions[:, start:end], **attention, **keep_one}
            self._runner.prefill(tokens[:, start:end], **inputs)
        self._fed = mask.sum(-1).tolist()
        self._runner.set_next_positions(mask.sum(-1))

    def _known(self, tokens: Tensor) -> Tensor:
        """Ids that the draft has no embedding for stand in as its last one: worse guesses, same text."""
        return tokens.clamp(max=self._own_vocab_size - 1)

    def _scores(self, logits: Tensor) -> Tensor:
        """float32 scores over the target's vocabulary; ids that only one of the two models knows are impossible."""
        known = logits[:, : self._vocab_size].to(self._device)
        if known.shape[1] < self._vocab_size:
            known = torch.nn.functional.pad(known, (0, self._vocab_size - known.shape[1]), value=-torch.inf)
        return processed_scores(self._processors, known)


def processed_scores(processors: LogitsProcessorList, logits: Tensor) -> Tensor:
    """float32 scores as the call's processors that look at scores alone leave them, from `[N, V]` to the same."""
    no_prefix = logits.new_empty((logits.shape[0], 0), dtype=torch.int64)
    scores: Tensor = processors(no_prefix, logits.float())  # type: ignore[arg-type]
    return scores
