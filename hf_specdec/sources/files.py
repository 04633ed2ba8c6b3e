"""Safetensors files that say what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_specdec.errors import ArgumentError


def write_tensors(path: str | PathLike[str], tensors: Mapping[str, Tensor], content: str) -> None:
    """Write tensors with a note of what they are."""
    save_file(dict(tensors), path, {"format": content})


def read_tensors(path: str | PathLike[str], names: Sequence[str], content: str) -> dict[str, Tensor]:
    """Read what `write_tensors` wrote.

    Args:
        path: the file.
        names: tensors that it must hold.
        content: what it must say that it holds.

    Raises:
        ArgumentError: the file is missing or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("format")
            if found != content or not set(names) <= set(file.keys()):
                raise ArgumentError(f"{str(path)!r} is no file of the format {content!r}, but {found or 'another'!r}")
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise ArgumentError(f"cannot read {str(path)!r} as {content!r}: {error}") from error
