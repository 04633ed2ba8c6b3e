"""Names of models, data and commands for what may be published: they do not tell where files lay."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def public_name(path: str) -> str:
    """A name without the folders above it."""
    return Path(path).resolve().name if Path(path).exists() else path


def command_line() -> str:
    """The words of this process's call, absolute paths without the folders above them."""
    return shlex.join(["hf-specdec", *map(without_folders, sys.argv[1:])])


def without_folders(word: str) -> str:
    """A word of a command line; an absolute path in it keeps its last part."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)
