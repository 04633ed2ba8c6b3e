"""The typer application: every command is a module beside this one."""

from __future__ import annotations

import typer

from hf_specdec.cli.audit import audit
from hf_specdec.cli.convert_heads import convert_heads
from hf_specdec.cli.demo import demo
from hf_specdec.cli.distill_draft import distill_draft
from hf_specdec.cli.env import env
from hf_specdec.cli.generate import generate
from hf_specdec.cli.lists import ListCommand
from hf_specdec.cli.lm_eval import PASS_ON, lm_eval
from hf_specdec.cli.make_data import make_data
from hf_specdec.cli.train_medusa import train_medusa
from hf_specdec.cli.tune_tree import tune_tree

app = typer.Typer(
    name="hf-specdec",
    help="Lossless speculative decoding for transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(generate)
app.command(cls=ListCommand)(audit)
app.command()(env)
app.command("make-data")(make_data)
app.command("lm-eval", context_settings=PASS_ON)(lm_eval)
app.command()(train_medusa)
app.command()(tune_tree)
app.command("distill-draft")(distill_draft)
app.command("convert-heads")(convert_heads)


def main() -> None:
    """Run the command line; exit status 1 for a failure, 2 for a wrong call."""
    app()
