"""The command line: `hf-specdec demo`, `hf-specdec generate`, `hf-specdec env`."""

from __future__ import annotations

from hf_specdec.cli.app import app, main

__all__ = ["app", "main"]
