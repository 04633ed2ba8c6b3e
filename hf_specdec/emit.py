"""The text so far and every rule that ends it, looked at after every single token, as plain generation does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

_MIN_GROWTH = 64  # columns


class StopRules:
    """The call's stopping criteria: EOS and length are known per row, the rest are asked with the whole batch.

    Args:
        criteria: what `generate` prepared.

    Attributes:
        eos_tokens: ids that end a row.
        max_length: number of columns at which every row ends.
        pads_finished: whether a finished row is filled with padding while others go on (as in plain generation, that
            needs an EOS rule; without one every row goes on until all are finished).
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.eos_tokens: frozenset[int] = frozenset(
            token for one in criteria if type(one) is EosTokenCriteria for token in one.eos_token_id.tolist()
        )
        self.max_length: int = min(one.max_length for one in criteria if type(one) is MaxLengthCriteria)
        self.pads_finished = any(hasattr(one, "eos_token_id") for one in criteria)
        self._others: list[StoppingCriteria] = [
            one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)
        ]

    def finished(self, text: Tensor, last_tokens: Sequence[int], scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Which rows end at this column; `text` is int64 `[B, columns]`, `last_tokens` its last column."""
        ends = text.shape[1] >= self.max_length
        done = [ends or token in self.eos_tokens for token in last_tokens]
        for one in self._others:
            # As transformers combines them: a bool or a single number speaks for all rows.
            new = torch.zeros(text.shape[0], dtype=torch.bool, device=text.device) | one(text, scores)
            done = [old or stops for old, stops in zip(done, new.tolist(), strict=True)]
        return done


class Emitter:
    """Text of all rows. Tokens are appended row by row and released column by column.

    Rows of a batch may run ahead of each other. A column is released once every open row has a token for it; then the
    streamer gets it and the stop rules are asked, exactly as often and with the same arguments as in plain generation.
    A row that is found to have stopped loses what it had run ahead.

    Args:
        input_ids: the prompt, int64 `[B, columns]`.
        rules: when rows end.
        pad_token: filler behind finished rows.
        streamer: gets each released column.
        lockstep: all rows always have the same length; finished rows are given padding as their next tokens.
    """

    def __init__(
        self, input_ids: Tensor, rules: StopRules, pad_token: int | None, streamer: BaseStreamer | None, lockstep: bool
    ) -> None:
        self.rules = rules
        self.lockstep = lockstep
        self.batch_size, self.prompt_length = input_ids.shape
        self.generated: list[list[int]] = [[] for _ in range(self.batch_size)]
        self.num_released = 0
        self.done = False
        self.scores: tuple[Tensor, ...] | None = None
        self.pad_token = 0 if pad_token is None else pad_token
        self.max_new_tokens = max(rules.max_length - self.prompt_length, 1)
        self._finished_at: list[int | None] = [None] * self.batch_size
        self._streamer = streamer
        self._text = input_ids.clone()  # grows in steps: max_new_tokens may be a number that nobody means

    def open_rows(self) -> list[int]:
        """Rows that take part in the next round."""
        if self.done:
            return []
        return [row for row in range(self.batch_size) if self.lockstep or self.is_open(row)]

    def is_open(self, row: int) -> bool:
        """Whether the row's text still grows."""
        tokens = self.generated[row]
        if self.done or self.is_finished(row) or len(tokens) >= self.max_new_tokens:
            return False
        return not (tokens and self.rules.pads_finished and tokens[-1] in self.rules.eos_tokens)

    def is_finished(self, row: int) -> bool:
        """Whether the row only waits, padded, for the others."""
        return self._finished_at[row] is not None and self.rules.pads_finished

    def draft_budget(self, row: int) -> int:
        """The deepest useful guess: as many tokens as the row may still get, but for the one that ends a round."""
        return max(self.max_new_tokens - len(self.generated[row]) - 1, 0) if self.is_open(row) else 0

    def prefix(self, row: int) -> Tensor:
        """The row's text so far, padding included, int64 `[columns]`."""
        return self._text[row, : self.prompt_length + len(self.generated[row])]

    def append(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Give some rows one more token each, then release what is complete."""
        for row, token in zip(rows, tokens, strict=True):
            if self.is_finished(row):
                token = self.pad_token
            self._write(row, self.prompt_length + len(self.generated[row]), token)
            self.generated[row].append(token)
        while not self.done and self._next_column_is_complete():
            self._release_column()

    def num_own(self, row: int) -> int:
        """Tokens of the row's own text: what stands behind its end is padding."""
        end = self._finished_at[row]
        return len(self.generated[row]) if end is None or not self.rules.pads_finished else end

    @property
    def sequences(self) -> Tensor:
        """Prompt and released text of all rows, int64 `[B, columns]`."""
        return self._text[:, : self.prompt_length + self.num_released].clone()

    def _write(self, row: int, column: int, token: int) -> None:
        if column >= self._text.shape[1]:
            columns = min(max(column // 2, _MIN_GROWTH), self.prompt_length + self.max_new_tokens - column)
            self._text = torch.cat(
                [self._text, self._text.new_full((self.batch_size, columns), self.pad_token)], dim=1
            )
        self._text[row, column] = token

    def _next_column_is_complete(self) -> bool:
        return all(
            len(self.generated[row]) > self.num_released or (self.is_finished(row) and not self.lockstep)
            for row in range(self.batch_size)
        )

    def _release_column(self) -> None:
        step = self.num_released
        self.num_released += 1
        column = [tokens[step] if step < len(tokens) else self.pad_token for tokens in self.generated]
        if self._streamer is not None:
            self._streamer.put(torch.tensor(column))
        text = self._text[:, : self.prompt_length + self.num_released]
        for row, stops in enumerate(self.rules.finished(text, column, self.scores)):
            if stops and self._finished_at[row] is None:
                self._finished_at[row] = self.num_released
                if self.rules.pads_finished:
                    self._cut(row)
        self.done = None not in self._finished_at
        if self.done:
            for row in range(self.batch_size):
                self._cut(row)

    def _cut(self, row: int) -> None:
        """Drop what the row had run ahead of the released text."""
        del self.generated[row][self.num_released :]
        self._text[row, self.prompt_length + len(self.generated[row]) :] = self.pad_token
