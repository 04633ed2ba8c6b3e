"""The file of answers: lines are only ever added, and whatever a kill left is read back right."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_specdec.atomic import replace_file
from hf_specdec.errors import ArgumentError


class AnswerFile:
    """Answers as JSON lines, and what they were made with in a second file beside it.

    Args:
        path: the file of answers.
        settings: what the answers depend on, except the prompts.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings_path = path.with_name(f"{path.name}.settings")
        self._begun = False
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))

    def open_for(self, prompts: Mapping[int, list[int]]) -> set[int]:
        """Go on with the file, if there is one: cut off a half-written line and say which prompts have their answers.

        Args:
            prompts: the token ids of each prompt, by index.

        Raises:
            ArgumentError: the file was made with other settings, from other prompts, or by something else.
        """
        if self.path.is_dir():
            raise ArgumentError(f"output: {self.path} is a folder; give a file, such as answers.jsonl")
        lines = self._whole_lines()
        if lines:
            self._check_settings()
        self._begun = bool(lines)
        return {self._index(number, line, prompts) for number, line in enumerate(lines, start=1)}

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add lines, to the disk; the first ones make the file, so that what is refused before them leaves none."""
        if not self._begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            settings = json.dumps(self._settings, indent=1) + "\n"
            replace_file(self.settings_path, lambda path: path.write_text(settings, encoding="utf-8"))
            self._begun = True
        text = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        # Somebody else's file is left as it is, whatever its last line.
        if len(whole) < len(content) and self.settings_path.exists():
            os.truncate(self.path, len(whole))
        try:
            lines = whole.decode("utf-8").split("\n")[:-1]
        except UnicodeDecodeError as error:
            raise ArgumentError(f"output: {self.path} is no file of answers; choose another") from error
        if content and not self.settings_path.exists():
            raise ArgumentError(
                f"output: {self.path} is there, but {self.settings_path.name}, which says what it was made with, is "
                "not; choose another file"
            )
        return lines

    def _check_settings(self) -> None:
        try:
            found = json.loads(self.settings_path.read_text(encoding="utf-8"))
            names = found.keys() | self._settings.keys()
        except (ValueError, AttributeError) as error:
            raise ArgumentError(f"output: {self.settings_path} holds no settings of answers") from error
        changed = sorted(name for name in names if found.get(name) != self._settings.get(name))
        if changed:
            raise ArgumentError(
                f"output: {self.path} was made with another {', '.join(changed)}; choose another file, or delete it"
            )

    def _index(self, number: int, line: str, prompts: Mapping[int, list[int]]) -> int:
        try:
            record = json.loads(line)
            index, prompt_ids = int(record["index"]), record["prompt_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"output: {self.path}, line {number}, is no answer") from error
        if prompts.get(index, prompt_ids) != prompt_ids:
            raise ArgumentError(
                f"output: {self.path}, line {number}, answers another prompt than row {index + 1} of the data; choose "
                "another file, or delete it"
            )
        return index
