"""What the training commands share: loading the target, and the table of accuracies."""

from __future__ import annotations

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdec.cli.options import Dtype
from hf_specdec.heads import MedusaHeads, expected_tokens
from hf_specdec.training.rank_rates import TOP


def load_target(name: str, dtype: Dtype, place: torch.device) -> PreTrainedModel:
    """The model in evaluation mode."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.resolve())
    model.to(place)  # type: ignore[arg-type]
    model.eval()
    return model


def accuracy_table(heads: MedusaHeads) -> Group:
    """How often heads are right, what the tree takes of each, and what it should give.

    Args:
        heads: with `rank_rates` and `tree`.
    """
    rank_rates, tree = heads.rank_rates or (), heads.tree or ()
    table = Table(box=None)
    for title in ("head", "guesses token", "best guess", f"best {TOP}", "nodes", "tokens per forward"):
        table.add_column(title, justify="right")
    for head, rates in enumerate(rank_rates):
        shallow = [node for node in tree if len(node) <= head + 1]
        table.add_row(
            str(head),
            f"t + {head + 2}",
            f"{rates[0]:.3f}",
            f"{sum(rates[:TOP]):.3f}",
            str(sum(len(node) == head + 1 for node in tree)),
            f"{expected_tokens(shallow, rank_rates):.2f}" if shallow else "",
        )
    total = expected_tokens(tree, rank_rates)
    return Group(table, Text(f"A tree of {len(tree)} nodes: {total:.2f} tokens expected per forward of the target"))
