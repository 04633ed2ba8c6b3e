"""What finished pieces of work depend on and no name tells: weights and code."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import torch

import hf_specdec

_DIGITS = 16


def weights_fingerprint(module: torch.nn.Module, settings: object) -> str:
    """Other weights or settings, another fingerprint; of weights that were offloaded only the names count."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        if not tensor.is_meta:
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:_DIGITS]


def package_fingerprint() -> str:
    """Of the source of this package."""
    root = Path(hf_specdec.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]


def class_fingerprint(kind: type) -> str | None:
    """Of the file that a class comes from; None for classes of this package, and for those that come from no file."""
    if kind.__module__.partition(".")[0] == hf_specdec.__name__:
        return None
    try:
        path = inspect.getsourcefile(kind)
        return path and hashlib.sha256(Path(path).read_bytes()).hexdigest()[:_DIGITS]
    except (OSError, TypeError):
        return None
