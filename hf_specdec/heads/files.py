"""Where a checkpoint's tensors lie: in one file or in shards, in a folder or on the Hub, as safetensors or pickled."""

from __future__ import annotations

import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, is_offline_mode
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_specdec.errors import ArgumentError

CONFIG = "config.json"
TREE = "medusa_choices.json"
# In the order in which they are looked for: a file of heads alone before one of a whole model, safe before pickled.
_NAMES = (
    ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin"),
)


@dataclass(frozen=True)
class Place:
    """A folder, or a repository of the Hub whose files are fetched when they are asked for.

    Args:
        source: folder or name of the repository.
        hub_options: what `hf_hub_download` takes, such as `revision` and `token`.
    """

    source: str | PathLike[str]
    hub_options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder."""
        return Path(self.source).is_dir()

    def find(self, name: str) -> Path | None:
        """The file of this name, if there is one.

        Raises:
            ArgumentError: there is neither such a folder nor such a repository, or the Hub does not answer.
        """
        if self.is_local:
            path = Path(self.source) / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(str(self.source), name, **self.hub_options))
        except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
            raise ArgumentError(
                f"{str(self.source)!r} is no folder here and no repository on the Hub that you may read: {error}"
            ) from error
        except LocalEntryNotFoundError as error:
            if self.hub_options.get("local_files_only") or is_offline_mode():
                return None
            raise ArgumentError(f"{str(self.source)!r}: the Hub did not answer for {name}: {error}") from error
        except EntryNotFoundError:
            return None

    def read_json(self, name: str) -> Any:
        """What a JSON file holds, or None if there is no such file.

        Raises:
            ArgumentError: it holds something else.
        """
        path = self.find(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(f"{name} of {str(self.source)!r} is no JSON file: {error}") from error

    def tensor_file(self, name: str) -> TensorFiles:
        """One checkpoint by the name of its file or its index."""
        is_index = name.endswith(".index.json")
        return TensorFiles(self, name, _weight_map(self.read_json(name), name) if is_index else None)

    def tensor_files(self) -> Iterator[TensorFiles]:
        """The checkpoints that it holds: one of heads alone, one of a whole model; safe ones before pickled ones."""
        for names in _NAMES:
            name = next((name for name in names if self.find(name) is not None), None)
            if name is not None:
                yield self.tensor_file(name)


@dataclass(frozen=True)
class TensorFiles:
    """One checkpoint: a file, or shards with an index.

    Args:
        place: where it is.
        name: of the file or the index.
        weight_map: shard of each tensor, or None for a single file.
    """

    place: Place
    name: str
    weight_map: dict[str, str] | None

    def names(self) -> list[str]:
        """Names of its tensors; of shards, the index alone is read."""
        if self.weight_map is not None:
            return list(self.weight_map)
        return tensor_names(self._path(self.name))

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read some tensors, and of shards only those that hold them.

        Raises:
            ArgumentError: a shard is missing, lacks a tensor or cannot be read.
        """
        tensors: dict[str, Tensor] = {}
        shards: dict[str, list[str]] = {}
        for name in names:
            shards.setdefault(self.name if self.weight_map is None else self.weight_map[name], []).append(name)
        for shard, members in shards.items():
            tensors |= read_tensors(self._path(shard), members)
        return tensors

    def _path(self, name: str) -> Path:
        path = self.place.find(name)
        if path is None:
            raise ArgumentError(f"{self.name} of {str(self.place.source)!r} names {name}, which is missing")
        return path


def is_tensor_file(path: Path) -> bool:
    """Whether a file looks like tensors or the index of their shards: by its name, or as something pickled."""
    if path.suffix == ".safetensors" or path.name.endswith(".index.json"):
        return True
    with path.open("rb") as file:
        return file.read(2) in (b"PK", *(bytes([0x80, protocol]) for protocol in range(2, 6)))


def tensor_names(path: Path) -> list[str]:
    """Names of the tensors of a file.

    Raises:
        ArgumentError: it cannot be read, or not without running code that it holds.
    """
    if path.suffix != ".safetensors":
        return list(_unpickle(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ArgumentError(f"{path.name} is no safetensors file: {error}") from error


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Some tensors of a file, each with memory of its own.

    Raises:
        ArgumentError: it cannot be read, or not without running code that it holds, or it lacks a tensor.
    """
    if path.suffix != ".safetensors":
        tensors = _unpickle(path)
        if missing := sorted(set(names) - set(tensors)):
            raise ArgumentError(f"{path.name} lacks the tensor {missing[0]!r}")
        return {name: tensors[name].clone() for name in names}  # pickled tensors may share memory, or be mapped
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}") from error


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            # What torch reads of another pickle protocol than its own is right, and else it fails.
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            # Mapped files are read only as far as they are used, but only the newer format can be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise ArgumentError(f"{path.name} cannot be read: {error}") from error
    except Exception as error:  # whatever damaged bytes make the unpickler do
        # Torch's own words advise to switch its protection off: only what it found is passed on.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        newer = "Unsupported operand" in str(error)
        detail = (
            f" (it names {found[1]})" if found else " (it is perhaps of pickle protocol 4 or above)" if newer else ""
        )
        raise ArgumentError(
            f"{path.name} was not read: it is damaged, or a pickle that holds more than tensors and could run code"
            f"{detail}; convert it to safetensors where you trust it"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ArgumentError(f"{path.name} holds no dictionary of tensors")
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _weight_map(index: Any, name: str) -> dict[str, str]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ArgumentError(f"{name} has no weight_map from tensors to shards")
    if outside := next((shard for shard in weight_map.values() if Path(shard).name != shard), None):
        raise ArgumentError(f"{name} names a shard outside its folder: {outside!r}")
    return weight_map
