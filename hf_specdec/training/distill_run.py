"""Distilling a draft from beginning to end: checks, what the target says, the Trainer, files and card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from hf_specdec.drafts import make_draft, save_draft, spread_layers, stock_model
from hf_specdec.errors import ArgumentError
from hf_specdec.training.curves import write_log
from hf_specdec.training.distill import DistillTrainer
from hf_specdec.training.divergence import Guesser
from hf_specdec.training.draft_card import draft_card, draw_draft_curves
from hf_specdec.training.facts import RunClock, run_facts
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.runs import (
    CURVES,
    LOG,
    RunNames,
    RunSettings,
    claim,
    draft_vocabulary,
    train_to_end,
)

CARD, FULL = "README.md", "full"


@dataclass(frozen=True, kw_only=True)
class DistillSettings(RunSettings):
    """How a draft is made and trained.

    Args:
        layers: the target's layers that it is made of; None: `num_layers` at even distances.
        num_layers: how many layers, if `layers` does not say which.
        own_output: whether it trains its rows of the output matrix too.
        top_k: how many of the target's best tokens it learns at each position.
        learning_rate: see `RunSettings`, as everything else.
        depth: guesses of the chains that evaluations look at.

    Raises:
        ArgumentError: names the setting that is out of its range.
    """

    layers: tuple[int, ...] | None = None
    num_layers: int = 3
    own_output: bool = False
    top_k: int = 64
    learning_rate: float = 5e-4
    depth: int = 5

    whole: ClassVar[tuple[str, ...]] = (*RunSettings.whole, "num_layers", "top_k", "depth")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.own_output and self.draft_vocab_size is None:
            raise ArgumentError("own_output=True needs draft_vocab_size: a whole output matrix is too much to train")


def distill(
    train: TargetFeatures,
    held_out: TargetFeatures,
    folder: RunFolder,
    settings: DistillSettings,
    names: RunNames,
    arguments: TrainingArguments,
    *,
    full: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[PreTrainedModel, dict[str, float]]:
    """Train a draft, and write it with card, log and curves into the folder.

    A run that was stopped goes on where it was. Call it in every process of a distributed run.

    Args:
        train: the texts, with `top_k`.
        held_out: others.
        folder: of this run.
        settings: of the run.
        names: for card and log.
        arguments: from `trainer_arguments`.
        full: write the draft as a model that needs nothing else, too, into the folder `full`.
        callbacks: of the Trainer.
        progress: told how many texts of a part are in its cache, and how many there will be.

    Returns:
        The draft, and what the last evaluation measured.

    Raises:
        ArgumentError: a draft vocabulary larger than the target's, or the folder is in use.
        DraftModelError: these layers cannot be cut out of the target, or make logits in an unknown way.
        NonFiniteTrainingError: losses or weights came to be NaN or infinite; no draft is written.
    """
    clock = RunClock()
    target = train.target
    token_map = draft_vocabulary(target, train.examples, settings.draft_vocab_size)
    layers = settings.layers if settings.layers is not None else spread_layers(target, settings.num_layers)
    draft = make_draft(
        target,
        layers,
        token_map=token_map,
        own_output=settings.own_output,
        dtype=torch.float32,
        base_model=names.model,
    )
    Guesser(draft)  # refuses logits made in an unknown way, before the folder is this run's
    claim(folder, arguments)
    trainer = DistillTrainer(
        draft,
        train_dataset=train,
        eval_dataset=held_out,
        depth=settings.depth,
        args=arguments,
        callbacks=[clock, *callbacks],
    )
    metrics = train_to_end(trainer, (held_out, train), folder, progress)
    draft.eval()
    if trainer.is_world_process_zero():
        facts = run_facts(trainer, names, settings, train, held_out, token_map, clock) | {
            "num_hidden_layers": target.config.num_hidden_layers,
            "layers": list(layers),
            "draft_vocab_size": settings.draft_vocab_size,
            "device": str(target.device),
        }
        history = trainer.state.log_history
        write_log(folder.path / LOG, history, facts)
        draw_draft_curves(folder.path / CURVES, history)
        save_draft(draft, folder.path)
        if full:
            stock_model(draft, target).save_pretrained(folder.path / FULL)
        draft_card(facts, metrics, CURVES, LOG, folder.path.name).save(folder.path / CARD)
        folder.finish()
    trainer.accelerator.wait_for_everyone()
    return draft, metrics
