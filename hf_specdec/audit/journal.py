"""The journal of finished pieces of work: a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hf_specdec.errors import ArgumentError


class Journal:
    """A file of JSON lines; the first says which audit it belongs to, each further one holds one finished piece.

    Args:
        path: the file; made if it is not there.
        identity: what makes this audit this audit. A journal of another one is refused.

    Raises:
        ArgumentError: the file belongs to another audit, or is no journal.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._records: dict[str, Any] = {}
        identity = json.loads(json.dumps(identity))
        lines = self._complete_lines()
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("", encoding="utf-8")
            self._append({"audit": identity})
            return
        self._check_identity(lines[0], identity)
        for line in lines[1:]:
            record = json.loads(line)
            self._records[record["key"]] = record["value"]

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Any:
        return self._records[key]

    def add(self, key: str, value: Any) -> Any:
        """Write a finished piece down, to the disk; returns it as it will be read back."""
        self._append({"key": key, "value": value})
        self._records[key] = json.loads(json.dumps(value))
        return self._records[key]

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _complete_lines(self) -> list[str]:
        """What a kill left: a last line without its end was being written, and is cut off."""
        if not self._path.exists():
            return []
        text = self._path.read_bytes()
        complete = text[: text.rfind(b"\n") + 1]
        if len(complete) < len(text):
            self._path.write_bytes(complete)
        return complete.decode("utf-8").splitlines()

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
