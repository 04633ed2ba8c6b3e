"""What the target said after each token, whatever stood in front: a table that recycles the scores of every node.

After Token Recycling (Luo et al. 2024), which keeps the latest successors of a token; here they are averaged.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from os import PathLike

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from hf_specdec.cache import TreeCache
from hf_specdec.checks import is_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.runner import ModelRunner, check_attention, check_runnable
from hf_specdec.sources.base import Guess, Source
from hf_specdec.sources.files import read_tensors, write_tensors

_FORMAT = "hf_specdec successor table 1"
_PARTS = ("tokens", "weights", "seen")
_LEAST_STEP = 0.1  # of an average that has seen much
# Guesses are told apart by their weight, in these classes; lighter ones are not worth a look.
_WEIGHT_CLASSES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
# How far the weights of a row can be believed beforehand that was seen once, up to four times, and more often.
_OFTEN = (1, 4)
_BELIEFS = (0.4, 0.65, 0.9)


class SuccessorTable:
    """For each token the tokens that the target found likeliest to follow it, with their average share.

    Lives as long as its owner: give one table to several calls (`Recycling(table=...)`, `Auto`) and it goes on
    learning. `fill` asks the model about every token once, so that nothing is unknown in the first call.

    Memory: 8 bytes for each token of the vocabulary and successor, 3 MB for 49,152 tokens.

    Args:
        vocab_size: V, that of the target.
        num_successors: successors kept for each token.

    Raises:
        ArgumentError: a number below 1, or more successors than tokens.
    """

    def __init__(self, vocab_size: int, num_successors: int = 8) -> None:
        for name, value in (("vocab_size", vocab_size), ("num_successors", num_successors)):
            if not is_whole(value) or value < 1:
                raise ArgumentError(f"SuccessorTable({name}={value!r}) must be a whole number of at least 1")
        if num_successors > vocab_size:
            raise ArgumentError(
                f"SuccessorTable(num_successors={num_successors}) must not exceed vocab_size={vocab_size}"
            )
        self.vocab_size = vocab_size
        self.num_successors = num_successors
        self._lock = threading.Lock()
        self._tokens = np.zeros((vocab_size, num_successors), dtype=np.int32)
        self._weights = np.zeros((vocab_size, num_successors), dtype=np.float32)
        self._seen = np.zeros(vocab_size, dtype=np.int32)

    def __len__(self) -> int:
        """Number of tokens whose successors are known."""
        return int((self._seen > 0).sum())

    def successors(self, token: int) -> tuple[int, list[tuple[int, float]]]:
        """How often a token was seen, and its successors with their average share, likeliest first."""
        with self._lock:
            pairs = zip(self._tokens[token].tolist(), self._weights[token].tolist(), strict=True)
            return int(self._seen[token]), [pair for pair in pairs if pair[1] > 0]

    def observe(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Average in what the target said after some tokens.

        Args:
            tokens: m ids. Of equal ones the first counts: in a tree that is the likelier place.
            logits: its raw logits for the tokens that follow, `[m, V]`. Rows that are not finite are left out.
        """
        top = logits[:, : self.vocab_size].topk(self.num_successors, dim=-1)
        # A share among the likeliest alone: as good a measure as a probability, and no pass over V.
        weights = top.values.float().softmax(-1).cpu().numpy()
        ids, firsts = np.unique(np.asarray(tokens), return_index=True)
        usable = np.isfinite(weights[firsts]).all(axis=1)
        ids, firsts = ids[usable], firsts[usable]
        self._average(ids, top.indices.cpu().numpy().astype(np.int32)[firsts], weights[firsts])

    def _average(
        self, tokens: NDArray[np.int64], new_tokens: NDArray[np.int32], new_weights: NDArray[np.float32]
    ) -> None:
        with self._lock:
            step = np.maximum(1.0 / (self._seen[tokens] + 1.0), _LEAST_STEP)[:, None].astype(np.float32)
            old_tokens, old_weights = self._tokens[tokens], self._weights[tokens] * (1.0 - step)
            new_weights = (new_weights * step).astype(np.float32)
            same = (old_tokens[:, :, None] == new_tokens[:, None, :]) & (old_weights[:, :, None] > 0)
            old_weights = old_weights + (same * new_weights[:, None, :]).sum(-1)
            new_weights = np.where(same.any(1), 0.0, new_weights)
            both_tokens = np.concatenate([old_tokens, new_tokens], axis=1)
            both_weights = np.concatenate([old_weights, new_weights], axis=1)
            order = np.argsort(-both_weights, axis=1, kind="stable")[:, : self.num_successors]
            rows = np.arange(len(tokens))[:, None]
            self._tokens[tokens] = both_tokens[rows, order]
            self._weights[tokens] = both_weights[rows, order]
            self._seen[tokens] += 1

    @torch.no_grad()
    def fill(
        self, model: PreTrainedModel, prefix: Sequence[int] | Tensor | None = None, batch_size: int = 256
    ) -> None:
        """Ask a model what follows each token that was never seen, so that nothing is unknown in the first call.

        One node of a forward for each entry of the vocabulary: about half a minute for SmolLM2-135M on two cores.

        Args:
            model: the target.
            prefix: token ids in front of each token; those that open an answer in a chat are worth most. By default
                the token that begins a text, if the model has one.
            batch_size: tokens asked about in one forward.

        Raises:
            ArgumentError: the model's vocabulary has another size or knows no such prefix; a bad `batch_size`.
            UnsupportedError: its attention takes no dense mask, or it cannot be driven at all.
        """
        check_vocab_size(self, model)
        check_runnable(model)
        check_attention(model, chains_only=False, single_row=True)
        if not is_whole(batch_size) or batch_size < 1:
            raise ArgumentError(f"fill(batch_size={batch_size!r}) must be a whole number of at least 1")
        begin = model.config.get_text_config(decoder=True).bos_token_id
        start = [] if begin is None else [begin]
        prefix = prefix.tolist() if isinstance(prefix, Tensor) else start if prefix is None else list(prefix)
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in prefix):
            raise ArgumentError(f"fill(prefix={prefix!r}) must hold token ids below {self.vocab_size}")
        runner = ModelRunner(model, TreeCache(), 1, None, torch.zeros(1, dtype=torch.int64))
        if prefix:
            runner.prefill(torch.tensor([prefix]))
        unseen = torch.from_numpy(np.flatnonzero(self._seen == 0))
        for tokens in torch.split(unseen, batch_size):
            siblings = torch.eye(len(tokens), dtype=torch.bool)[None]  # none of which sees another
            logits = runner.forward(tokens[None], torch.zeros_like(tokens)[None], siblings).logits[0]
            runner.view.drop_tail()
            self.observe(tokens.tolist(), logits)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as a safetensors file."""
        with self._lock:
            arrays = zip(_PARTS, (self._tokens, self._weights, self._seen), strict=True)
            tensors = {name: torch.from_numpy(one.copy()) for name, one in arrays}
        write_tensors(path, tensors, _FORMAT)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> SuccessorTable:
        """Read what `save` wrote.

        Raises:
            ArgumentError: the file is missing or holds something else.
        """
        tensors = read_tensors(path, _PARTS, _FORMAT)
        tokens, weights, seen = (tensors[name].numpy() for name in _PARTS)
        table = cls(*tokens.shape)
        if weights.shape != tokens.shape or seen.shape != tokens.shape[:1] or not _are_below(tokens, tokens.shape[0]):
            raise ArgumentError(f"the parts of the successor table {str(path)!r} do not fit each other")
        table._tokens[:], table._weights[:], table._seen[:] = tokens, weights, seen
        return table


def _are_below(tokens: NDArray[np.int32], limit: int) -> bool:
    return bool((tokens >= 0).all() and (tokens < limit).all())


def check_vocab_size(table: SuccessorTable, target: PreTrainedModel) -> None:
    """Check that a table was made for a target.

    Raises:
        ArgumentError: with both sizes.
    """
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if table.vocab_size != vocab_size:
        raise ArgumentError(
            f"the successor table was made for {table.vocab_size} tokens, but the target has {vocab_size}; "
            f"use SuccessorTable(vocab_size={vocab_size})"
        )


class Successors(Source):
    """The table as a source: it stands at a token and looks at nothing else."""

    def __init__(self, table: SuccessorTable) -> None:
        self._table = table

    def start(self, row: int, text: Sequence[int]) -> int:
        """The last token."""
        return text[-1]

    def guesses(self, state: int) -> list[Guess]:
        """Its successors."""
        seen, successors = self._table.successors(state)
        age = bisect_left(_OFTEN, seen)
        guesses = []
        for token, weight in successors:
            weight_class = bisect_right(_WEIGHT_CLASSES, weight)
            if weight_class:
                guesses.append(Guess(token, ("successors", age, weight_class), _BELIEFS[age] * weight, token))
        return guesses

    def observe(self, tokens: Sequence[int], logits: Tensor) -> None:
        """Learn from all nodes, accepted or not."""
        self._table.observe(tokens, logits)
