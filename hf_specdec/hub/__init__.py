"""The hub form: a folder for `generate(custom_generate=<folder>, trust_remote_code=True, strategy=...)`."""

from __future__ import annotations

from pathlib import Path


def hub_folder() -> str:
    """Path of the template folder; copy its `custom_generate/generate.py` into a model repository to share it."""
    return str(Path(__file__).parent)
