"""lm-eval's own command line, in a process that knows the model `hf-specdec`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate


def run_command_line(arguments: Sequence[str]) -> None:
    """Do what `lm-eval ARGUMENTS` does."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]  # lm-eval reads them from there alone
    try:
        cli_evaluate()
    finally:
        sys.argv = before
