"""What the target says about the texts to train on, computed for each batch or read from a cache on disk."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_specdec.checks import require_positive
from hf_specdec.compat import num_positions
from hf_specdec.errors import ArgumentError
from hf_specdec.training.feature_cache import PART_BYTES, FeatureCache, Layout, fill
from hf_specdec.training.fingerprints import examples_fingerprint, model_fingerprint
from hf_specdec.training.target_outputs import PaddedTexts, check_process, target_outputs
from hf_specdec.training.texts import Example

_LOGGER = logging.getLogger(__name__)
_FILLING_TOKENS = 4096
_STATES = "hidden_states"

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
        hidden_states: whether hidden states come with each position; without them there must be a `top_k`.
        cache_dir: folder for computed features; `fill_cache` fills it. One folder serves one model and one list of
            texts. Hidden states in float32 are kept as bfloat16.
        cache_max_gb: bound of the cache, in 10^9 bytes. What does not fit is computed for each batch, every time; the
            log says how much that is.

    Attributes:
        lengths: number of tokens of each text.
        num_positions: number of positions that are read in all texts.

    Raises:
        ArgumentError: no examples, tokens that the target does not have, longer texts than it takes, a wrong `top_k`
            or bound, or a folder with the features of another model or other texts.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        examples: Sequence[Example],
        *,
        top_k: int = 0,
        hidden_states: bool = True,
        cache_dir: str | Path | None = None,
        cache_max_gb: float | None = None,
    ) -> None:
        _check(target, examples, top_k)
        if not hidden_states and not top_k:
            raise ArgumentError("hidden_states=False needs top_k: there would be no features")
        if cache_max_gb is not None:
            require_positive(cache_max_gb=cache_max_gb)
            if cache_dir is None:
                raise ArgumentError(f"cache_max_gb={cache_max_gb!r} needs cache_dir")
        self.target = target
        self.examples = examples
        self.top_k = top_k
        self.hidden_states = hidden_states
        self._dtype = target.dtype
        self.lengths = [len(one.input_ids) for one in examples]
        self.num_positions = sum(one.num_learned for one in examples)
        self._cache = None if cache_dir is None else self._open_cache(Path(cache_dir), cache_max_gb)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        item = {"input_ids": torch.tensor(example.input_ids), "num_prompt": example.num_prompt}
        kept = None if self._cache is None else self._cache.read(index)
        return item if kept is None else {**item, **kept}

    def fill_cache(
        self, progress: Callable[[int, int], None] = lambda done, total: None, rank: int = 0, num_ranks: int = 1
    ) -> None:
        """Compute what the cache has room for and does not hold yet; does nothing without a cache.

        Args:
            progress: told how many of the missing texts are done, and how many there are.
            rank, num_ranks: the number of this process, and how many processes share the work.

        Raises:
            ArgumentError: the disk is too small.
        """
        if self._cache is not None:
            fill(
                self._cache,
                self.lengths,
                self._compute,
                max_tokens=_FILLING_TOKENS,
                progress=progress,
                rank=rank,
                num_ranks=num_ranks,
            )

    def collator(self, num_targets: int = 1) -> Callable[[list[dict[str, Any]]], Batch]:
        """A function that makes a batch of items.

        Its batches hold, for B texts padded on the right to T tokens, with N positions that are read:

        - `input_ids`, `attention_mask`: int64 `[B, T]`;
        - `positions`: int64 `[N]`, indices into B * T, row after row;
        - `targets`: int64 `[N, num_targets]`, the tokens behind each position; -100 beyond the end of the text;
        - with `hidden_states`: `hidden_states` `[N, H]`, what the target's output matrix reads, in the target's dtype;
        - with `top_k`: `top_ids` int32 `[N, k]`, `top_logits` `[N, k]`, `log_normaliser` float32 `[N]`, the target's
          scores for the first of the `targets` (see `target_outputs`).

        All are on the CPU.
        """

        return functools.partial(self._collate, num_targets)

    def __getstate__(self) -> dict[str, Any]:
        """Workers of a data loader read the cache; the target stays where it can run."""
        return {name: value for name, value in vars(self).items() if name != "target"}

    def _collate(self, num_targets: int, items: list[dict[str, Any]]) -> Batch:
        texts = _padded(items)
        return {
            "input_ids": texts.input_ids,
            "attention_mask": texts.attention_mask,
            "positions": texts.rows * texts.input_ids.shape[1] + texts.columns,
            "targets": texts.targets(num_targets),
            **self._outputs(items, texts),
        }

    def _outputs(self, items: list[dict[str, Any]], texts: PaddedTexts) -> Batch:
        """Features of all items, one behind the other; the target runs for those that bring none."""
        names = self._names()
        missing = [one for one in items if names[0] not in one]
        if len(missing) == len(items):
            return self._run(texts)
        pieces = items
        if missing:
            computed = self._run(_padded(missing))
            counts = [len(one["input_ids"]) - max(one["num_prompt"], 1) for one in missing]
            rows = zip(*(torch.split(value, counts) for value in computed.values()), strict=True)
            found = iter([dict(zip(computed, row, strict=True)) for row in rows])
            pieces = [one if names[0] in one else next(found) for one in items]
        joined = {name: torch.cat([one[name] for one in pieces]) for name in names}
        if self.hidden_states:
            joined[_STATES] = joined[_STATES].to(self._dtype)
        return joined

    def _names(self) -> list[str]:
        """What there is at each position."""
        scores = ["top_ids", "top_logits", "log_normaliser"] if self.top_k else []
        return [_STATES, *scores] if self.hidden_states else scores

    def _run(self, texts: PaddedTexts) -> Batch:
        check_process()
        return target_outputs(self.target, texts, self.top_k, self.hidden_states)

    def _compute(self, indices: list[int]) -> Batch:
        examples = [self.examples[index] for index in indices]
        return self._run(
            _padded([{"input_ids": torch.tensor(x.input_ids), "num_prompt": x.num_prompt} for x in examples])
        )

    def _open_cache(self, folder: Path, max_gb: float | None) -> FeatureCache:
        identity: dict[str, Any] = {
            "model": model_fingerprint(self.target),
            "texts": examples_fingerprint(self.examples),
            "top_k": self.top_k,
        }
        if not self.hidden_states:
            identity["hidden_states"] = False
        counts = [one.num_learned for one in self.examples]
        max_bytes = None if max_gb is None else int(max_gb * 1e9)
        cache = FeatureCache(folder, counts, self._layout(), identity, max_bytes, PART_BYTES)
        if cache.num_cached < len(self):
            _LOGGER.warning(
                "cache_max_gb=%s has room for %d of %d texts; the target runs again for the others in each epoch",
                max_gb,
                cache.num_cached,
                len(self),
            )
        return cache

    def _layout(self) -> Layout:
        """Shapes and formats of one position, as a tiny text shows them."""
        probe = self._run(PaddedTexts.of([torch.zeros(2, dtype=torch.long)], [1]))
        layout = {name: (tuple(value.shape[1:]), value.dtype) for name, value in probe.items()}
        if self.hidden_states:
            shape, dtype = layout[_STATES]
            layout[_STATES] = (shape, dtype if dtype.itemsize == 2 else torch.bfloat16)
        return layout


def _padded(items: list[dict[str, Any]]) -> PaddedTexts:
    return PaddedTexts.of([one["input_ids"] for one in items], [one["num_prompt"] for one in items])


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
    longest, room = max(len(one.input_ids) for one in examples), num_positions(target)
    if room is not None and longest > room:
        raise ArgumentError(
            f"the data hold a text of {longest} tokens, and the target takes {room}: read them with max_length={room}"
        )
