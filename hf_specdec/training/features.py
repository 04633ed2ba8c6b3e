"""What the target says about the texts to train on, computed for each batch or read from a cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_specdec.errors import ArgumentError
from hf_specdec.training.target_outputs import PaddedTexts, target_outputs
from hf_specdec.training.texts import Example

Batch = dict[str, Tensor]


class TargetFeatures(Dataset[dict[str, Any]]):
    """Texts with the target's hidden states, and its scores if asked for, at the positions that training reads.

    Position t of a text is read if token t + 1 is learned, so a text of T tokens has `T - max(num_prompt, 1)` of them.
    An item is `{"input_ids": int64 [T], "num_prompt": int}`, and what the cache holds of the text. `collator` makes
    batches of them and runs the target for all that the cache does not hold. For a Trainer: pass this as the data set
    and `features.collator()` as `data_collator`, with `remove_unused_columns=False`; give `lengths` to a
    `LengthGroupedSampler`.

    Args:
        target: the model, in evaluation mode.
        examples: the texts.
        top_k: k, how many of the target's best next tokens come with each position; 0 for none.

    Attributes:
        lengths: number of tokens of each text.
        num_positions: number of positions that are read in all texts.

    Raises:
        ArgumentError: no examples, tokens that the target does not have, longer texts than it takes, or a wrong
            `top_k`.
    """

    def __init__(self, target: PreTrainedModel, examples: Sequence[Example], *, top_k: int = 0) -> None:
        _check(target, examples, top_k)
        self.target = target
        self.examples = examples
        self.top_k = top_k
        self.lengths = [len(one.input_ids) for one in examples]
        self.num_positions = sum(one.num_learned for one in examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        return {"input_ids": torch.tensor(example.input_ids), "num_prompt": example.num_prompt}

    def collator(self, num_targets: int = 1) -> Callable[[list[dict[str, Any]]], Batch]:
        """A function that makes a batch of items.

        Its batches hold, for B texts padded on the right to T tokens, with N positions that are read:

        - `input_ids`, `attention_mask`: int64 `[B, T]`;
        - `positions`: int64 `[N]`, indices into B * T, row after row;
        - `targets`: int64 `[N, num_targets]`, the tokens behind each position; -100 beyond the end of the text;
        - `hidden_states`: `[N, H]`, what the target's output matrix reads, in the target's dtype;
        - with `top_k`: `top_ids` int32 `[N, k]`, `top_logits` `[N, k]`, `log_normaliser` float32 `[N]`, the target's
          scores for the first of the `targets` (see `target_outputs`).

        All are on the CPU.
        """

        def collate(items: list[dict[str, Any]]) -> Batch:
            texts = PaddedTexts.of([one["input_ids"] for one in items], [one["num_prompt"] for one in items])
            return {
                "input_ids": texts.input_ids,
                "attention_mask": texts.attention_mask,
                "positions": texts.rows * texts.input_ids.shape[1] + texts.columns,
                "targets": texts.targets(num_targets),
                **self._outputs(items, texts),
            }

        return collate

    def _outputs(self, items: list[dict[str, Any]], texts: PaddedTexts) -> Batch:
        return target_outputs(self.target, texts, self.top_k)


def _check(target: PreTrainedModel, examples: Sequence[Example], top_k: int) -> None:
    if not examples:
        raise ArgumentError("there are no examples to train on")
    for index, one in enumerate(examples):
        if one.num_learned < 1:
            raise ArgumentError(f"example {index} has no token to learn behind its prompt of {one.num_prompt} tokens")
    config = target.config.get_text_config(decoder=True)
    largest = max(max(one.input_ids) for one in examples)
    if largest >= config.vocab_size:
        raise ArgumentError(
            f"the data hold token {largest}, and the target's vocabulary has {config.vocab_size}: they were made for "
            "another model"
        )
    if not 0 <= top_k <= config.vocab_size:
        raise ArgumentError(f"top_k={top_k!r} must be between 0 and the target's {config.vocab_size} tokens")
    longest, room = max(len(one.input_ids) for one in examples), getattr(config, "max_position_embeddings", None)
    if room is not None and longest > room:
        raise ArgumentError(
            f"the data hold a text of {longest} tokens, and the target takes {room}: read them with max_length={room}"
        )
