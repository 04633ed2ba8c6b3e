"""Locks between processes, which the system takes back from a process that dies."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class Locks:
    """Any number of named locks in one file: each is a lock on one byte, far behind the file's end.

    On Windows every lock is free: there one process at a time is all that works.

    Args:
        path: the file; made if it is not there. It stays empty.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait for a lock and keep it meanwhile."""
        self._lock(name, wait=True)
        try:
            yield
        finally:
            self._release(name)

    @contextmanager
    def attempt(self, name: str) -> Iterator[bool]:
        """Keep a lock meanwhile, if no other process has it; yields whether that is so."""
        mine = self._lock(name, wait=False)
        try:
            yield mine
        finally:
            if mine:
                self._release(name)

    def close(self) -> None:
        """Let go of all."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    if sys.platform == "win32":

        def _lock(self, name: str, wait: bool) -> bool:
            return True

        def _release(self, name: str) -> None:
            pass

    else:

        def _lock(self, name: str, wait: bool) -> bool:
            assert self._descriptor is not None
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, _byte(name))
            except (BlockingIOError, PermissionError):
                return False
            return True

        def _release(self, name: str) -> None:
            if self._descriptor is not None:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _byte(name))


def _byte(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
