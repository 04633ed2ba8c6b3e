"""`hf-specdec train-medusa`: heads for a model, from its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text
from transformers import AutoTokenizer

from hf_specdec.cli.console import command, message_console, output_console
from hf_specdec.cli.names import command_line, public_name
from hf_specdec.cli.options import Dtype
from hf_specdec.cli.training_options import (
    Accumulate,
    BatchSize,
    CacheDir,
    CacheMaxGb,
    Chat,
    Cpu,
    DataName,
    DraftVocab,
    Epochs,
    Evaluations,
    HeldOut,
    LearningRate,
    Limit,
    MaxLength,
    ModelName,
    Seed,
    Target,
    Texts,
    TrainingDtype,
)
from hf_specdec.cli.training_stop import stopping


@command
def train_medusa(
    model: Target,
    data: Texts,
    output: Annotated[Path, typer.Option(help="New folder of the heads; a run that was stopped goes on from there.")],
    heads: Annotated[int, typer.Option(min=1, help="Heads: how many tokens ahead they guess.")] = 4,
    layers: Annotated[int, typer.Option(min=1, help="Residual blocks of each head.")] = 1,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="Train an output matrix for each head instead of using the target's.")
    ] = False,
    draft_vocab: DraftVocab = None,
    epochs: Epochs = 1.0,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 1e-3,
    head_decay: Annotated[float, typer.Option(help="Each further head counts so much less in the loss.")] = 0.8,
    held_out: HeldOut = 0.05,
    max_length: MaxLength = 1024,
    limit: Limit = None,
    chat: Chat = None,
    evaluations: Evaluations = 10,
    cache_dir: CacheDir = None,
    cache_max_gb: CacheMaxGb = 4.0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the tree that is stored with the heads.")] = 24,
    width: Annotated[int, typer.Option(min=1, help="Guesses of a head that are told apart.")] = 10,
    dtype: TrainingDtype = Dtype.bfloat16,
    cpu: Cpu = False,
    seed: Seed = 0,
    model_name: ModelName = None,
    data_name: DataName = None,
) -> None:
    """Train Medusa heads that guess what a model will say; the model itself is not changed.

    Works with `accelerate launch -m hf_specdec.cli train-medusa ...`, too. Needs the extra `train`.
    """
    from hf_specdec.training.extras import require_extras

    require_extras()
    import torch

    from hf_specdec.checks import require_not_negative
    from hf_specdec.cli.training_progress import TrainingBars
    from hf_specdec.cli.training_words import accuracy_table, load_target
    from hf_specdec.training.medusa_run import MedusaSettings, prepare_run, train_medusa
    from hf_specdec.training.runs import RunNames, cached_features, trainer_arguments
    from hf_specdec.training.texts import read_examples, split_examples

    require_not_negative(cache_max_gb=cache_max_gb)
    settings = MedusaSettings(
        num_heads=heads,
        num_layers=layers,
        own_output=own_output,
        draft_vocab_size=draft_vocab,
        epochs=epochs,
        batch_size=batch_size,
        accumulate=accumulate,
        learning_rate=learning_rate,
        head_decay=head_decay,
        evaluations=evaluations,
        bf16=dtype is Dtype.bfloat16,
        num_nodes=nodes,
        width=width,
        seed=seed,
    )
    names = RunNames(model_name or public_name(model), data_name or public_name(data), command_line())
    examples = read_examples(data, AutoTokenizer.from_pretrained(model), max_length=max_length, limit=limit, chat=chat)
    train, test = split_examples(examples, held_out, seed)
    folder = prepare_run(output, train, test, settings, names)
    use_cpu = cpu or not torch.accelerator.is_available()
    arguments = trainer_arguments(folder, settings, len(train), use_cpu=use_cpu, disable_tqdm=True)
    main_process = arguments.process_index == 0
    with stopping(folder, main_process):
        target = load_target(model, dtype, arguments.device)
        features = cached_features(
            target, train, test, folder, "states", cache_dir=cache_dir, cache_max_gb=cache_max_gb
        )
        with TrainingBars("Target reads", main_process) as bars:
            trained = train_medusa(
                *features, folder, settings, names, arguments, callbacks=[bars], progress=bars.count_texts
            )
    if main_process:
        output_console().print(accuracy_table(trained))
        message_console().print(Text(f"Heads: {output}"))
