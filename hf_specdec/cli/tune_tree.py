"""`hf-specdec tune-tree`: measure heads on held-out texts, and store the tree that suits them best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from transformers import AutoTokenizer

from hf_specdec.cli.console import command, message_console, output_console, print_json
from hf_specdec.cli.names import command_line, public_name
from hf_specdec.cli.options import Dtype, resolve_device
from hf_specdec.cli.training_options import Chat, DataName, Limit, MaxLength, Target
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads, best_tree, expected_tokens


@command
def tune_tree(
    model: Target,
    heads: Annotated[str, typer.Option(help="Folder or hub id of the heads.")],
    data: Annotated[str, typer.Option(help="Texts that the heads were not trained on, as for train-medusa.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the tree.")] = 24,
    width: Annotated[int, typer.Option(min=1, help="Guesses of a head that are told apart.")] = 10,
    output: Annotated[
        Path | None, typer.Option(help="New folder for the heads with the tree; by default it joins them in theirs.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at a time.")] = 8,
    max_length: MaxLength = 1024,
    limit: Limit = None,
    chat: Chat = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of target and heads.")] = Dtype.bfloat16,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first accelerator if any.")] = None,
    data_name: DataName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how often each guess of Medusa heads comes true, and store it with the tree that is best for it.

    Needs the extra `train`.
    """
    from hf_specdec.training.extras import require_extras

    require_extras()
    from hf_specdec.cli.training_progress import TrainingBars
    from hf_specdec.cli.training_words import accuracy_table, load_target
    from hf_specdec.heads.files import Place
    from hf_specdec.heads.layouts import is_own
    from hf_specdec.training.features import TargetFeatures
    from hf_specdec.training.folders import check_vacant
    from hf_specdec.training.rank_rates import check_weights, check_width, measure_ranks
    from hf_specdec.training.texts import read_examples

    trained = MedusaHeads.from_pretrained(heads)
    check_width(trained, width)
    check_weights(trained)
    if output is not None:
        check_vacant(output)
    elif not Path(heads).is_dir() or not all(is_own(file.names()) for file in Place(heads).tensor_files()):
        raise ArgumentError(f"output: {heads} is no folder of heads in this package's layout; give a new folder")
    examples = read_examples(data, AutoTokenizer.from_pretrained(model), max_length=max_length, limit=limit, chat=chat)
    target = load_target(model, dtype, resolve_device(device))
    with TrainingBars("Measuring") as bars:
        counts = measure_ranks(
            trained, TargetFeatures(target, examples), width=width, batch_size=batch_size, progress=bars.count_texts
        )
    trained.rank_rates = counts.rates
    trained.tree = tree = best_tree(counts.rates, nodes)
    trained.notes["Tree"] = (
        f"Best of {len(tree)} nodes for accuracies on {len(examples):,} texts of {data_name or public_name(data)} "
        f"({int(counts.totals[0]):,} positions), if heads are right independently of each other:\n\n"
        f"```bash\n{command_line()}\n```"
    )
    trained.save_pretrained(output or heads)
    if as_json:
        print_json(
            {
                "tree": trained.tree,
                "rank_rates": trained.rank_rates,
                "positions": counts.totals.tolist(),
                "expected_tokens_per_forward": expected_tokens(tree, counts.rates),
            }
        )
        return
    output_console().print(accuracy_table(trained))
    message_console().print(Text(f"Stored in {output or heads}"))
