"""Features on disk: bounded, memory-mapped when read, and no finished part is computed twice."""

from __future__ import annotations

import bisect
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.atomic import UNFINISHED, replace_file
from hf_specdec.errors import ArgumentError

_LOGGER = logging.getLogger(__name__)
_IDENTITY = "identity.json"
_HEADER_BYTES = 1024  # more than a part needs beside its values
PART_BYTES = 2**26

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class FeatureCache:
    """A folder of safetensors files, each with the features of some consecutive texts.

    Which texts a file holds depends on the texts alone, so files of a stopped run are used as they are, and several
    processes can fill one folder. Files are memory-mapped: reading a text brings no more than its own rows into
    memory.

    Args:
        folder: made when it is first filled.
        counts: number of positions of each text.
        layout: for each kind of feature the shape of one position, and the number format in which it is kept.
        identity: what the features are made from. A folder made from something else is refused.
        max_bytes: files that would take more are not written, and their texts are not in the cache; None for no bound.
        part_bytes: size of a file, about; a kill loses the work on one.

    Attributes:
        num_cached: how many texts, the first ones, have a place here.

    Raises:
        ArgumentError: the folder belongs to other features, or is none of a cache.
    """

    def __init__(
        self,
        folder: Path,
        counts: Sequence[int],
        layout: Layout,
        identity: dict[str, Any],
        max_bytes: int | None = None,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.folder = folder
        self._layout = layout
        self._identity = json.loads(json.dumps({**identity, "part_bytes": part_bytes}))
        self._check_folder()
        self._position_bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())
        self._offsets = [0]
        for count in counts:
            self._offsets.append(self._offsets[-1] + count)
        self._starts = self._plan(part_bytes, max_bytes)
        self._open: dict[int, Any] = {}

    @property
    def num_cached(self) -> int:
        """How many texts, the first ones, have a place here."""
        return self._starts[-1]

    @property
    def num_bytes(self) -> int:
        """Size of the files when all are written, headers counted generously."""
        positions = self._offsets[self.num_cached]
        return positions * self._position_bytes + (len(self._starts) - 1) * _HEADER_BYTES

    def count(self, index: int) -> int:
        """Number of positions of a text."""
        return self._offsets[index + 1] - self._offsets[index]

    def missing_parts(self, rank: int = 0, num_ranks: int = 1) -> list[range]:
        """The texts of each file that is still to be written, by the process `rank` of `num_ranks`."""
        parts = range(rank, len(self._starts) - 1, num_ranks)
        return [range(self._starts[part], self._starts[part + 1]) for part in parts if self._part(part) is None]

    def claim(self) -> None:
        """Write down what the folder is for, before its first file.

        Raises:
            ArgumentError: the disk has no room for what is still to be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        written = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        missing, free = self.num_bytes - written, shutil.disk_usage(self.folder).free
        if missing > free:
            raise ArgumentError(
                f"the cache needs {missing / 1e9:.1f} GB more and the disk of {self.folder} has {free / 1e9:.1f} GB: "
                "set a smaller cache_max_gb"
            )
        if not (self.folder / _IDENTITY).exists():
            # All processes that share the work do this.
            text = json.dumps(self._identity, indent=1)
            replace_file(self.folder / _IDENTITY, lambda path: path.write_text(text, encoding="utf-8"))

    def drop_rest(self) -> None:
        """Delete files that an earlier, larger bound had room for."""
        planned = {self._path(part) for part in range(len(self._starts) - 1)}
        for path in set(self.folder.glob("features-*.safetensors")) - planned:
            path.unlink(missing_ok=True)

    def write(self, texts: range, features: dict[str, Tensor]) -> None:
        """Write the file of `texts`, one of `missing_parts`, whole or not at all."""
        part = self._starts.index(texts.start)
        kept = {name: features[name].to(dtype).contiguous() for name, (_, dtype) in self._layout.items()}
        replace_file(self._path(part), lambda path: save_file(kept, path))

    def read(self, index: int) -> dict[str, Tensor] | None:
        """The features of a text, each `[n, ...]`; None while they are not here."""
        if index >= self.num_cached:
            return None
        part = bisect.bisect_right(self._starts, index) - 1
        file = self._part(part)
        if file is None:
            return None
        offset = self._offsets[self._starts[part]]
        first, last = self._offsets[index] - offset, self._offsets[index + 1] - offset
        return {name: file.get_slice(name)[first:last] for name in self._layout}

    def __getstate__(self) -> dict[str, Any]:
        """Open files stay in their process."""
        return {**vars(self), "_open": {}}

    def _plan(self, part_bytes: int, max_bytes: int | None) -> list[int]:
        """The first text of each file, and the one behind the last file."""
        starts, total, num_texts = [0], 0, len(self._offsets) - 1
        for index in range(num_texts):
            size = (self._offsets[index + 1] - self._offsets[starts[-1]]) * self._position_bytes + _HEADER_BYTES
            if max_bytes is not None and total + size > max_bytes:
                return starts if index == starts[-1] else [*starts, index]
            if size >= part_bytes or index == num_texts - 1:
                total += size
                starts.append(index + 1)
        return starts

    def _part(self, part: int) -> Any:
        """The opened file, or None if it is not there or not whole."""
        if part not in self._open and self._path(part).exists():
            try:
                file = safe_open(self._path(part), framework="pt")
                self._check_part(part, file)
            except (SafetensorError, OSError, ValueError) as error:
                _LOGGER.warning("%s is not as it should be and will be written anew: %s", self._path(part), error)
                return None
            self._open[part] = file
        return self._open.get(part)

    def _check_part(self, part: int, file: Any) -> None:
        rows = self._offsets[self._starts[part + 1]] - self._offsets[self._starts[part]]
        for name, (shape, _) in self._layout.items():
            if list(file.get_slice(name).get_shape()) != [rows, *shape]:
                raise ValueError(f"{name} should be {[rows, *shape]}")

    def _path(self, part: int) -> Path:
        return self.folder / f"features-{part:05d}.safetensors"

    def _check_folder(self) -> None:
        path = self.folder / _IDENTITY
        if not path.exists():
            strange = self.folder.exists() and not self.folder.is_dir()
            if strange or any(one.suffix != UNFINISHED for one in self.folder.glob("*")):
                raise ArgumentError(f"cache_dir: {self.folder} holds something else than cached features")
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            names = found.keys() | self._identity.keys()
        except (ValueError, AttributeError) as error:
            raise ArgumentError(f"cache_dir: {path} does not say what the cached features were made from") from error
        changed = sorted(name for name in names if found.get(name) != self._identity.get(name))
        if changed:
            raise ArgumentError(
                f"cache_dir: {self.folder} holds features that differ in: {', '.join(changed)}; choose another "
                "folder, or delete this one"
            )


def fill(
    cache: FeatureCache,
    lengths: Sequence[int],
    compute: Callable[[list[int]], dict[str, Tensor]],
    *,
    max_tokens: int,
    progress: Callable[[int, int], None],
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Write what is missing.

    Args:
        cache: where to.
        lengths: number of tokens of each text.
        compute: features of the texts with these indices, one behind the other.
        max_tokens: of a batch, padding included; a longer text runs alone.
        progress: told how many of the missing texts are done, and how many there are.
        rank, num_ranks: this process and how many share the work.
    """
    cache.drop_rest()
    parts = cache.missing_parts(rank, num_ranks)
    total, done = sum(map(len, parts)), 0
    if parts:
        cache.claim()
    for texts in parts:
        found: dict[int, dict[str, Tensor]] = {}
        for batch in _batches(texts, lengths, max_tokens):
            for index, features in zip(batch, _split(cache, batch, compute(batch)), strict=True):
                found[index] = features
            done += len(batch)
            progress(done, total)
        cache.write(texts, {name: torch.cat([found[index][name] for index in texts]) for name in found[texts.start]})


def _batches(texts: range, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Texts of similar lengths together."""
    batches: list[list[int]] = []
    for index in sorted(texts, key=lambda one: -lengths[one]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _split(cache: FeatureCache, batch: list[int], features: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    counts = [cache.count(index) for index in batch]
    pieces = {name: torch.split(value, counts) for name, value in features.items()}
    return [{name: pieces[name][row] for name in pieces} for row in range(len(batch))]
