"""Files that are whole at every moment, also after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

UNFINISHED = ".unfinished"
"""How the names of files end that are being written; a kill may leave one."""


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place and move it there, so that the place never holds half a file.

    Args:
        path: the place. Several processes may do this at once: the last one wins.
        write: writes the file whose path it is given.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        write(unfinished)
        unfinished.chmod(mode)  # safetensors leaves files that nobody else may read
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
