"""Write a draft model for the audit: the first layers of the target, untrained.

python evals/identity/make_draft.py --help
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from hf_specdec.demo_model import make_layer_draft


def make(
    model: Annotated[str, typer.Option(help="Folder or hub id of the target.")],
    output: Annotated[Path, typer.Option(help="Folder of the draft.")],
    layers: Annotated[int, typer.Option(min=1, help="How many of the target's layers it has.")] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that it drafts in a round.")] = 5,
) -> None:
    """Save the first layers of a model, with its norm and its head, as a model of its own."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draft = make_layer_draft(target, layers)
    draft.generation_config.num_assistant_tokens = tokens
    draft.save_pretrained(output)


if __name__ == "__main__":
    typer.run(make)
