"""Locks between processes, which the system takes back from a process that dies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class Locks:
    """Any number of named locks, each a file that stays empty.

    Args:
        folder: holds the files; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait for a lock and keep it meanwhile."""
        with self._lock(name):
            yield

    @contextmanager
    def attempt(self, name: str) -> Iterator[bool]:
        """Keep a lock meanwhile, if nobody has it; yields whether that is so."""
        lock = self._lock(name)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _lock(self, name: str) -> FileLock:
        return FileLock(self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock")
