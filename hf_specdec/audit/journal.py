"""The journal of finished pieces of work: a killed run goes on where it stopped, and several processes share one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_specdec.audit.locks import Locks
from hf_specdec.errors import ArgumentError

_FILE = "file"
_BEGINNING = b'{"audit": '


class Journal:
    """A file of JSON lines; the first says which audit it belongs to, each further one holds one finished piece.

    Processes that run the same audit may write into one journal at the same time. Each reads what the others wrote
    when it takes up a job, so work is shared and none is done twice.

    Args:
        path: the file; made if it is not there.
        identity: what all pieces depend on. A journal of another audit is refused.

    Raises:
        ArgumentError: the file belongs to another audit, or is no journal.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._records: dict[str, Any] = {}
        self._read_until = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._locks = Locks(path.with_suffix(".locks"))
        self._open(json.loads(json.dumps(identity)))

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def add(self, key: str, value: Any) -> Any:
        """Write a finished piece down, to the disk; returns it as it will be read back.

        If another process has written it meanwhile, that one's counts: all processes must say the same.
        """
        with self._locks.hold(_FILE):
            self._read()
            if key not in self._records:
                self._append({"key": key, "value": value})
                self._read()
        return self._records[key]

    @contextmanager
    def claim(self, job: str) -> Iterator[bool]:
        """Take up a job unless another process is at it; inside, all that others have finished is known.

        A process that dies lets go of its job.

        Args:
            job: the same name in every process.

        Yields:
            Whether this process may do it.
        """
        with self._locks.attempt(f"job {job}") as mine:
            if mine:
                with self._locks.hold(_FILE):
                    self._read()
            yield mine

    def _open(self, identity: dict[str, Any]) -> None:
        with self._locks.hold(_FILE):
            self._check_beginning()
            lines = self._new_lines()
            if lines:
                self._check_identity(lines[0], identity)
                self._take(lines[1:])
            else:
                self._append({"audit": identity})
                self._new_lines()

    def _read(self) -> None:
        self._take(self._new_lines())

    def _take(self, lines: list[str]) -> None:
        for line in lines:
            record = json.loads(line)
            self._records[record["key"]] = record["value"]

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _new_lines(self) -> list[str]:
        """What was written since the last time. Whoever holds the file may cut off what a kill left: half a line."""
        with self._path.open("rb+") as file:
            file.seek(self._read_until)
            text = file.read()
            complete = text[: text.rfind(b"\n") + 1]
            self._read_until += len(complete)
            if len(complete) < len(text):
                file.truncate(self._read_until)
        return complete.decode("utf-8").splitlines()

    def _check_beginning(self) -> None:
        """Before anything is cut off: a file of the user's stays as it is."""
        with self._path.open("rb") as file:
            if not _BEGINNING.startswith(file.read(len(_BEGINNING))):
                raise ArgumentError(f"{self._path} is no journal of an audit; choose another folder")

    def _check_identity(self, line: str, identity: dict[str, Any]) -> None:
        try:
            found = json.loads(line)["audit"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{self._path} is no journal of an audit; choose another folder") from error
        changed = sorted(name for name in found.keys() | identity.keys() if found.get(name) != identity.get(name))
        if changed:
            raise ArgumentError(
                f"{self._path.parent} holds an audit that differs in: {', '.join(changed)}; choose another folder, or "
                f"delete {self._path.name} to begin again"
            )
