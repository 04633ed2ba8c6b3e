"""lm-eval's own command line, in a process that knows the model `hf-specdec`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lm_eval.__main__ import cli_evaluate
from torch import distributed


def run_command_line(arguments: Sequence[str]) -> None:
    """Do what `lm-eval ARGUMENTS` does."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]  # lm-eval reads them from there alone
    try:
        cli_evaluate()
    finally:
        sys.argv = before
        # lm-eval leaves the group of `accelerate launch` open. A process that ends like that may be aborted by the
        # group's threads, and the launcher then stops the others, before the first one has written its results.
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
