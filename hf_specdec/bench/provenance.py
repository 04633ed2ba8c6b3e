"""What a measurement was taken on: enough to repeat it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_specdec import __version__


@dataclass(frozen=True)
class Provenance:
    """Where a file of results comes from."""

    model: str
    draft: str | None
    dtype: str
    attention: str
    device: str
    cores: int
    threads: int
    versions: dict[str, str]
    seed: int
    date: str
    command: str
    # What arms did before the first prompt, in words, and the seconds it took; not part of their rows.
    preparation_seconds: dict[str, float] = field(default_factory=dict)


def collect_provenance(
    model: PreTrainedModel,
    *,
    name: str,
    draft: str | None,
    seed: int,
    command: str,
    preparation_seconds: Mapping[str, float] | None = None,
) -> Provenance:
    """Describe this process and `model`; `name` and `draft` say in words which models were measured."""
    return Provenance(
        model=name,
        draft=draft,
        dtype=str(model.dtype).removeprefix("torch."),
        attention=model.config._attn_implementation,
        device=device_name(model.device),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        versions=package_versions("torch", "transformers", "tokenizers"),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        preparation_seconds=dict(preparation_seconds or {}),
    )


def package_versions(*names: str) -> dict[str, str]:
    """Versions of Python, of this package and of those packages in `names` that are installed."""
    versions = {"python": platform.python_version(), "hf_specdec": __version__}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def device_name(device: torch.device) -> str:
    """The product name of a processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} on {platform.machine()}"
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
