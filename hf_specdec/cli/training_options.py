"""Options that the training commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specdec.cli.options import Dtype

Target = Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of the target.")]
Texts = Annotated[str, typer.Option(help="File, folder or hub id of texts, best from `hf-specdec make-data`.")]
DraftVocab = Annotated[
    int | None, typer.Option(min=1, help="Guess only so many tokens, the most frequent ones; all if not given.")
]
Epochs = Annotated[float, typer.Option(help="Passes over the data.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts at a time, in each process.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches of one step.")]
LearningRate = Annotated[float, typer.Option(help="At its highest.")]
HeldOut = Annotated[float, typer.Option(help="Share of the texts to measure on.")]
MaxLength = Annotated[int, typer.Option(min=2, help="Longer texts lose their end.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read no more rows than this.")]
Chat = Annotated[bool | None, typer.Option(help="Use the chat template; by default if there is one.")]
Evaluations = Annotated[int, typer.Option(min=1, help="Evaluations and checkpoints on the way.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(help="Where to keep what the target says about the texts; in the output folder until the end."),
]
CacheMaxGb = Annotated[
    float, typer.Option(min=0.0, help="Disk for that, in GB; what does not fit is computed in each epoch.")
]
TrainingDtype = Annotated[Dtype, typer.Option(help="Number format of the target and of computing.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Use the CPU even if there is an accelerator.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
ModelName = Annotated[str | None, typer.Option(help="What the card calls the target; by default as in --model.")]
DataName = Annotated[str | None, typer.Option(help="What the card calls the data; by default as in --data.")]
