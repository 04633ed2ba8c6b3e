"""The folder of a training run: whose it is, and where the run goes on after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specdec.atomic import replace_file
from hf_specdec.errors import ArgumentError

_RUN = "run.json"
_CHECKPOINTS = "checkpoints"
_FEATURES = "features"


class RunFolder:
    """A folder that one training run fills.

    While it runs, the folder holds `run.json`, which says what is trained, the Trainer's checkpoints, and perhaps what
    the target said about the texts. All go when the run is finished.

    Args:
        path: the folder; need not exist.
        settings: everything that makes this run this run, as JSON can hold it.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / _CHECKPOINTS
        self.features = self.path / _FEATURES
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))

    def check(self) -> None:
        """See that the folder is empty, or holds this run, stopped before its end.

        Raises:
            ArgumentError: it holds something else, or a run of other settings.
        """
        check_vacant(self.path)
        run = self.path / _RUN
        if not run.exists():
            return
        try:
            found = json.loads(run.read_text(encoding="utf-8"))
            names = found.keys() | self._settings.keys()
        except (ValueError, AttributeError) as error:
            raise ArgumentError(f"output: {run} is no record of a training run; choose another folder") from error
        changed = sorted(name for name in names if found.get(name) != self._settings.get(name))
        if changed:
            raise ArgumentError(
                f"output: {self.path} holds a run that differs in {', '.join(changed)}; choose another folder, or "
                "delete this one to begin again"
            )

    def claim(self) -> None:
        """`check`, and make the folder this run's.

        Raises:
            ArgumentError: as for `check`.
        """
        self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self._settings, indent=1)
        replace_file(self.path / _RUN, lambda path: path.write_text(text, encoding="utf-8"))

    def last_checkpoint(self) -> str | None:
        """The newest checkpoint that was written to its end, or None."""
        steps = []
        for folder in self.checkpoints.glob("checkpoint-*"):
            # The Trainer writes its state last.
            with contextlib.suppress(OSError, ValueError):
                json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
                steps.append((int(folder.name.rpartition("-")[2]), str(folder)))
        return max(steps)[1] if steps else None

    def finish(self) -> None:
        """Remove what only a run that goes on needs."""
        for folder in (self.checkpoints, self.features):
            shutil.rmtree(folder, ignore_errors=True)
        (self.path / _RUN).unlink(missing_ok=True)


def check_vacant(path: Path) -> None:
    """See that a folder is empty, missing, or that of a run that was stopped.

    Raises:
        ArgumentError: it is no folder, or holds something else.
    """
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"output: {path} is a file; give a folder")
    if path.exists() and not (path / _RUN).exists() and any(path.iterdir()):
        raise ArgumentError(
            f"output: {path} is in use, it holds {sorted(p.name for p in path.iterdir())[0]!r}; choose "
            "a new or empty folder"
        )
