"""What the target computes for texts: hidden states, and its best-scored next tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import get_worker_info
from transformers import PreTrainedModel

from hf_specdec.compat import forward_parameters
from hf_specdec.errors import ArgumentError

PAD_TOKEN = 0  # behind the text and masked, so any token does
_CHUNK_SCORES = 2**25  # scores that are in float32 at a time


class PaddedTexts(NamedTuple):
    """A batch of texts, padded on the right.

    The n-th position that is read stands in row `rows[n]` and column `columns[n]`: the token there is the last one
    before a token that is learned.
    """

    input_ids: Tensor
    """int64 `[B, T]`."""
    attention_mask: Tensor
    """int64 `[B, T]`."""
    lengths: Tensor
    """int64 `[B]`."""
    rows: Tensor
    """int64 `[N]`."""
    columns: Tensor
    """int64 `[N]`."""

    @classmethod
    def of(cls, texts: list[Tensor], num_prompts: list[int]) -> PaddedTexts:
        """Pad int64 `[T]` texts; `num_prompts` as in `Example`."""
        lengths = torch.tensor([len(text) for text in texts])
        input_ids = pad_sequence(texts, batch_first=True, padding_value=PAD_TOKEN)
        starts = [max(one, 1) - 1 for one in num_prompts]
        spans = [torch.arange(start, len(text) - 1) for start, text in zip(starts, texts, strict=True)]
        rows = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(span) for span in spans]))
        mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
        return cls(input_ids, mask, lengths, rows, torch.cat(spans))

    def targets(self, count: int) -> Tensor:
        """The `count` tokens behind each position, int64 `[N, count]`; -100 beyond the end of the text."""
        columns = self.columns[:, None] + torch.arange(1, count + 1)
        tokens = self.input_ids[self.rows[:, None], columns.clamp(max=self.input_ids.shape[1] - 1)]
        return tokens.masked_fill(columns >= self.lengths[self.rows][:, None], -100)


def check_process() -> None:
    """Check that a model can run in this process.

    Raises:
        ArgumentError: this is a worker of a data loader.
    """
    if get_worker_info() is not None:
        raise ArgumentError(
            "the target cannot run in workers of a data loader: use dataloader_num_workers=0, or cache all features"
        )


@torch.no_grad()
def target_outputs(
    target: PreTrainedModel, texts: PaddedTexts, top_k: int = 0, hidden_states: bool = True
) -> dict[str, Tensor]:
    """Run the target once and keep what is read.

    Args:
        target: a model in evaluation mode.
        texts: N positions of them are read.
        top_k: k, how many of the best next tokens to keep; 0 for none.
        hidden_states: whether to keep these.

    Returns:
        On the CPU: `hidden_states` `[N, H]`, behind the final norm, in the target's dtype; with `top_k` `top_ids`
        int32 `[N, k]`, best first, their `top_logits` `[N, k]` in the target's dtype, and `log_normaliser` float32
        `[N]`, the log-sum-exp of all logits: `exp(top_logits - log_normaliser)` are probabilities.

    Raises:
        ArgumentError: the model is in training mode.
    """
    if target.training:
        raise ArgumentError("the target is in training mode, where dropout changes what it says; call target.eval()")
    device = target.device
    # Logits cost as much as several layers; only columns that someone reads get them.
    first = int(texts.columns.min()) if top_k else texts.input_ids.shape[1] - 1
    inputs: dict[str, Any] = {"use_cache": False, "output_hidden_states": hidden_states, "return_dict": True}
    if "logits_to_keep" in forward_parameters(target):
        inputs["logits_to_keep"] = texts.input_ids.shape[1] - first
    else:
        first = 0
    output = target(input_ids=texts.input_ids.to(device), attention_mask=texts.attention_mask.to(device), **inputs)
    # A model in several places ends in another one than it begins.
    last = output.hidden_states[-1] if hidden_states else output.logits
    rows, columns = texts.rows.to(last.device), texts.columns.to(last.device)
    found: dict[str, Tensor] = {}
    if hidden_states:
        found["hidden_states"] = last[rows, columns].to(target.dtype).cpu()
    if top_k:
        found |= _best(output.logits.to(last.device), rows, columns - first, top_k)
    return found


def _best(logits: Tensor, rows: Tensor, columns: Tensor, top_k: int) -> dict[str, Tensor]:
    parts = []
    step = max(_CHUNK_SCORES // logits.shape[-1], 1)
    for start in range(0, len(rows), step):
        chunk = logits[rows[start : start + step], columns[start : start + step]]
        values, ids = chunk.topk(top_k)
        parts.append((ids.int().cpu(), values.cpu(), chunk.float().logsumexp(-1).cpu()))
    ids, values, normalisers = (torch.cat(column) for column in zip(*parts, strict=True))
    return {"top_ids": ids, "top_logits": values, "log_normaliser": normalisers}
