"""`hf-specdec distill-draft`: a small draft model for a target, from its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer

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

if TYPE_CHECKING:
    from collections.abc import Mapping

_TOP_K = 64


@command
def distill_draft(
    model: Target,
    data: Texts,
    output: Annotated[Path, typer.Option(help="New folder of the draft; a run that was stopped goes on from there.")],
    layers: Annotated[
        str | None, typer.Option(help="The target's layers that it is made of, such as 0,15,29; even if not given.")
    ] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="How many layers, if --layers does not say which.")] = 3,
    draft_vocab: DraftVocab = None,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="Train and store its rows of the output matrix, too.")
    ] = False,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Learn so many of the target's best tokens; 64 if there are as many.")
    ] = None,
    epochs: Epochs = 1.0,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 5e-4,
    held_out: HeldOut = 0.05,
    max_length: MaxLength = 1024,
    limit: Limit = None,
    chat: Chat = None,
    evaluations: Evaluations = 10,
    depth: Annotated[int, typer.Option(min=1, help="Guesses of the chains that evaluations look at.")] = 5,
    cache_dir: CacheDir = None,
    cache_max_gb: CacheMaxGb = 10.0,
    full: Annotated[
        bool, typer.Option("--full", help="Also write a model with embeddings, for programs without hf_specdec.")
    ] = False,
    dtype: TrainingDtype = Dtype.bfloat16,
    cpu: Cpu = False,
    seed: Seed = 0,
    model_name: ModelName = None,
    data_name: DataName = None,
) -> None:
    """Train a few of a model's layers to guess what the whole model says; the model itself is not changed.

    Works with `accelerate launch -m hf_specdec.cli distill-draft ...`, too. Needs the extra `train`.
    """
    from hf_specdec.training.extras import require_extras

    require_extras()
    import torch

    from hf_specdec.checks import require_not_negative
    from hf_specdec.cli.training_progress import TrainingBars
    from hf_specdec.cli.training_words import load_target
    from hf_specdec.training.distill_run import DistillSettings, distill
    from hf_specdec.training.runs import RunNames, cached_features, open_run, trainer_arguments
    from hf_specdec.training.texts import read_examples, split_examples

    require_not_negative(cache_max_gb=cache_max_gb)
    settings = DistillSettings(
        layers=None if layers is None else _parse_layers(layers),
        num_layers=num_layers,
        draft_vocab_size=draft_vocab,
        own_output=own_output,
        top_k=_top_k(top_k, model),
        epochs=epochs,
        batch_size=batch_size,
        accumulate=accumulate,
        learning_rate=learning_rate,
        evaluations=evaluations,
        bf16=dtype is Dtype.bfloat16,
        depth=depth,
        seed=seed,
    )
    names = RunNames(model_name or public_name(model), data_name or public_name(data), command_line())
    examples = read_examples(data, AutoTokenizer.from_pretrained(model), max_length=max_length, limit=limit, chat=chat)
    train, test = split_examples(examples, held_out, seed)
    folder = open_run(output, train, test, settings, names)
    use_cpu = cpu or not torch.accelerator.is_available()
    arguments = trainer_arguments(folder, settings, len(train), use_cpu=use_cpu, disable_tqdm=True)
    main_process = arguments.process_index == 0
    with stopping(folder, main_process):
        target = load_target(model, dtype, arguments.device)
        features = cached_features(
            target,
            train,
            test,
            folder,
            "scores",
            cache_dir=cache_dir,
            cache_max_gb=cache_max_gb,
            top_k=settings.top_k,
            hidden_states=False,
        )
        with TrainingBars("Target reads", main_process) as bars:
            _, metrics = distill(
                *features, folder, settings, names, arguments, full=full, callbacks=[bars], progress=bars.count_texts
            )
    if main_process:
        _print_metrics(metrics)
        message_console().print(Text(f"Draft: {output}"))


def _parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 0,15,29", param_hint="--layers"
        ) from error


def _top_k(given: int | None, model: str) -> int:
    vocab_size = int(AutoConfig.from_pretrained(model).get_text_config(decoder=True).vocab_size)
    if given is not None and given > vocab_size:
        raise typer.BadParameter(f"{given} is more than the target's {vocab_size} tokens", param_hint="--top-k")
    return min(_TOP_K, vocab_size) if given is None else given


def _print_metrics(metrics: Mapping[str, float]) -> None:
    from hf_specdec.training.draft_card import acceptance_rates

    rates = acceptance_rates(metrics)
    table = Table(box=None)
    table.add_column("guesses in a row")
    for guesses in range(1, len(rates) + 1):
        table.add_column(str(guesses), justify="right")
    table.add_row("all right", *(f"{rate:.3f}" for rate in rates))
    output_console().print(table)
    output_console().print(
        f"same best token {metrics['eval_agreement']:.3f}, divergence {metrics['eval_kl']:.3f}, "
        f"{metrics['eval_tokens']:.2f} tokens per forward as a chain"
    )
