"""Texts that outlive a call: a store that the user owns and fills, and the source that copies from it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_specdec.checks import is_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.sources.automaton import ROOT, SuffixAutomaton
from hf_specdec.sources.base import Guess, Source
from hf_specdec.sources.files import read_tensors, write_tensors
from hf_specdec.sources.matches import Match, continuations

_FORMAT = "hf_specdec suffix store 1"
_LARGEST_ID = 2**31 - 1
_SEPARATOR = -1  # stands between texts; no text contains it, so no match crosses it


class _Shelf:
    """Some texts and their automaton."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.tokens = array("i")

    def add(self, tokens: Sequence[int] | Tensor) -> None:
        self.tokens.extend([*tokens, _SEPARATOR])
        self.automaton.extend([*tokens, _SEPARATOR])


class SuffixStore:
    """Earlier texts that `Suffix(store=...)` and `Auto` copy from; every call adds its outputs.

    Holds between `max_tokens / 2` and `max_tokens` of the latest tokens: they stand on two shelves, and when the newer
    one is full the older one is thrown away. Memory is at most about 0.65 KB a token, 65 MB at the default size; with
    ordinary texts 0.41 KB.

    One store may serve several threads and models, as long as they share one tokenizer.

    Args:
        max_tokens: number of tokens that are kept at most, one more for each text included.
        learn: whether outputs of calls that use the store are added to it.

    Raises:
        ArgumentError: `max_tokens` is not a whole number of at least 4: two shelves, one token and its end on each.
    """

    def __init__(self, max_tokens: int = 100_000, *, learn: bool = True) -> None:
        if not is_whole(max_tokens) or max_tokens < 4:
            raise ArgumentError(f"SuffixStore(max_tokens={max_tokens!r}) must be a whole number of at least 4")
        self.max_tokens = max_tokens
        self.learn = learn
        self.largest_token = _SEPARATOR
        """The largest id in the store, -1 if it is empty."""
        self._lock = threading.RLock()
        self._old, self._new = _Shelf(), _Shelf()

    def __len__(self) -> int:
        """Number of tokens held, one more for each text included."""
        return len(self._old.tokens) + len(self._new.tokens)

    @contextmanager
    def locked(self) -> Iterator[list[SuffixAutomaton]]:
        """The automata, newest last; nobody adds to them meanwhile."""
        with self._lock:
            yield [self._old.automaton, self._new.automaton]

    def add(self, tokens: Sequence[int]) -> None:
        """Add one text. Of a text longer than half the store the end is kept.

        Args:
            tokens: its token ids; a tensor must have one dimension.

        Raises:
            ArgumentError: something else than ids of tokens.
        """
        ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        for token in ids:
            if not isinstance(token, int) or not 0 <= token <= _LARGEST_ID:
                raise ArgumentError(f"SuffixStore.add takes token ids, ints from 0 to {_LARGEST_ID}, not {token!r}")
        half = self.max_tokens // 2
        kept = ids[-(half - 1) :]
        if not kept:
            return
        with self._lock:
            if self._new.tokens and len(self._new.tokens) + len(kept) + 1 > half:
                self._old, self._new = self._new, _Shelf()
            self._new.add(kept)
            self.largest_token = max(self.largest_token, *kept)

    def add_texts(self, texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add texts, encoded without special tokens.

        Raises:
            ArgumentError: one string instead of several.
        """
        _refuse_string("texts", texts)
        for text in texts:
            self.add(tokenizer.encode(text, add_special_tokens=False))

    def add_files(self, paths: Iterable[str | PathLike[str]], tokenizer: PreTrainedTokenizerBase) -> None:
        """Add text files in UTF-8, one text each.

        Raises:
            ArgumentError: a file that cannot be read as text, or one path instead of several.
        """
        _refuse_string("paths", paths)
        for path in paths:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ArgumentError(f"SuffixStore.add_files cannot read {str(path)!r}: {error}") from error
            self.add_texts([text], tokenizer)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the texts as a safetensors file; the automata are rebuilt when it is loaded."""
        with self._lock:
            tensors = {
                name: torch.tensor(shelf.tokens, dtype=torch.int32)
                for name, shelf in (("old", self._old), ("new", self._new))
            }
        tensors["max_tokens"] = torch.tensor(self.max_tokens)
        write_tensors(path, tensors, _FORMAT)

    @classmethod
    def load(cls, path: str | PathLike[str], *, learn: bool = True) -> SuffixStore:
        """Read what `save` wrote.

        Raises:
            ArgumentError: the file is missing or holds something else.
        """
        tensors = read_tensors(path, ("old", "new", "max_tokens"), _FORMAT)
        texts = torch.cat([tensors["old"].flatten(), tensors["new"].flatten()])
        max_tokens = tensors["max_tokens"]
        if (
            max_tokens.numel() != 1
            or texts.dtype != torch.int32
            or len(texts) > int(max_tokens)
            or bool((texts < _SEPARATOR).any())
        ):
            raise ArgumentError(f"the parts of the suffix store {str(path)!r} do not fit each other")
        store = cls(int(max_tokens), learn=learn)
        for name, shelf in (("old", store._old), ("new", store._new)):
            tokens = tensors[name].flatten().tolist()
            shelf.tokens.extend(tokens)
            shelf.automaton.extend(tokens)
            store.largest_token = max([store.largest_token, *tokens])
        return store


class StoredTexts(Source):
    """Continuations from a store."""

    def __init__(self, store: SuffixStore, batch_size: int) -> None:
        self._store = store
        self._read = [0] * batch_size
        self._matches: list[list[Match]] = [[] for _ in range(batch_size)]

    def start(self, row: int, text: Sequence[int]) -> Match | None:
        """The longest end of the text that occurs in the store; of equally long ones the latest."""
        with self._store.locked() as automata:
            known = {id(match.automaton): match for match in self._matches[row]}
            matches = []
            for automaton in automata:
                match = known.get(id(automaton))
                tokens = text[self._read[row] :] if match is not None else text
                matches.append(_advance(match or Match(automaton, ROOT, 0), tokens))
        self._matches[row], self._read[row] = matches, len(text)
        best = max(reversed(matches), key=lambda match: match.length)
        return best if best.length else None

    def guesses(self, state: Match) -> list[Guess]:
        """The continuations that occurred most often."""
        with self._store.locked():
            return [guess for guess in continuations(state, "store") if guess.token != _SEPARATOR]

    def finish(self, outputs: Sequence[Sequence[int]]) -> None:
        """Put the outputs on the shelf."""
        if self._store.learn:
            for output in outputs:
                self._store.add(output)


def _refuse_string(name: str, value: object) -> None:
    if isinstance(value, str):
        raise ArgumentError(f"{name}={value!r} must be a list; a string would be taken letter by letter")


def _advance(match: Match, tokens: Iterable[int]) -> Match:
    automaton, state, length = match
    for token in tokens:
        state, length = automaton.step(state, length, token)
    return Match(automaton, state, length)
