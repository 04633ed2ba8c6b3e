"""`hf-specdec lm-eval ...`: lm-eval's own command line, with the model `hf-specdec` known to it."""

from __future__ import annotations

import typer

from hf_specdec.cli.console import command

# Everything behind the command's name is lm-eval's, --help and -h too.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@command
def lm_eval(context: typer.Context) -> None:
    """Run lm-eval with the model hf-specdec: `hf-specdec lm-eval run --model hf-specdec --model_args ...`.

    Takes lm-eval's own commands and options, `--help` among them. Needs the extra `lm-eval`.
    """
    from hf_specdec.lm_eval import run_command_line  # optional, and slow to import

    run_command_line(context.args)
