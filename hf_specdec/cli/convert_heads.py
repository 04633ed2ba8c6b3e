"""`hf-specdec convert-heads`: Medusa heads from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from transformers import AutoModelForCausalLM

from hf_specdec.cli.console import command, output_console, print_json
from hf_specdec.cli.options import Dtype
from hf_specdec.heads import Layout, MedusaHeads, export_heads


@command
def convert_heads(
    source: Annotated[str, typer.Argument(help="Folder, file or hub id of the heads, in any known layout.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    layout: Annotated[Layout, typer.Option(help="Whose layout to write; TGI reads FasterDecoding's.")] = Layout.own,
    base: Annotated[str | None, typer.Option(help="Folder or hub id of the target, where a part is copied.")] = None,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="Give each head a copy of the target's output matrix.")
    ] = False,
    full_vocabulary: Annotated[
        bool, typer.Option("--full-vocabulary", help="Drop a reduced vocabulary: guess among all tokens.")
    ] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format; by default that of the source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Convert Medusa heads between this package's layout and those of FasterDecoding, TGI and vLLM."""
    heads = MedusaHeads.from_pretrained(source, dtype=None if dtype is None else dtype.resolve())
    target = None if base is None else AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    if base is not None and heads.base_model is None:
        heads.base_model = Path(base).name if Path(base).is_dir() else base
    files = export_heads(heads, output, layout, base=target, own_output=own_output, full_vocabulary=full_vocabulary)
    record = {
        "output": str(output),
        "layout": layout.value,
        "files": files,
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "own_output": heads.own_output or own_output,
        "draft_vocab_size": None if heads.token_map is None or full_vocabulary else len(heads.token_map),
        "base_model": heads.base_model,
    }
    if as_json:
        print_json(record)
        return
    table = Table(show_header=False, box=None)
    for name, value in record.items():
        text = ", ".join(value) if isinstance(value, list) else "-" if value is None else str(value)
        table.add_row(name.replace("_", " "), text)
    output_console().print(table)
