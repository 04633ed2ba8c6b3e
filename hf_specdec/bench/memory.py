"""Peak memory at long context, each arm in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hf_specdec.bench.rows import MemoryRow
from hf_specdec.errors import SpecDecError


@dataclass(frozen=True)
class MemoryTask:
    """What one fresh process does: load, generate after a random prompt, report."""

    model: str
    arm: str
    context_tokens: int = 4096
    new_tokens: int = 32
    # 0: no draft model.
    draft_layers: int = 0
    # Folder or hub id of a draft model, instead of layers of the target.
    draft: str | None = None
    draft_tokens: int = 5
    # Folder or hub id of heads, for arms that use some.
    heads: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0


class MeasurementError(SpecDecError, RuntimeError):
    """A process that should have measured something failed."""


def measure_memory(tasks: Sequence[MemoryTask]) -> list[MemoryRow]:
    """Run each task in a process of its own, one after the other.

    On the CPU the memory is the resident set of the process, on a GPU what torch has allocated there.

    Raises:
        MeasurementError: a process failed; the message holds the end of its error output.
    """
    return [_measure(task) for task in tasks]


def _measure(task: MemoryTask) -> MemoryRow:
    command = [sys.executable, "-m", "hf_specdec.bench.memory_probe", json.dumps(asdict(task))]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise MeasurementError(f"the process of arm {task.arm!r} failed:\n{finished.stderr[-2000:]}")
    # The libraries may have written to stdout too; the row is the last line.
    return MemoryRow(**json.loads(finished.stdout.splitlines()[-1]))
