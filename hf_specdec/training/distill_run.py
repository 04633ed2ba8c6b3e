"""Distilling a draft from beginning to end: checks, what the target says, the Trainer, files and card."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from hf_specdec.drafts import make_draft, save_draft, spread_layers, stock_model
from hf_specdec.errors import ArgumentError
from hf_specdec.training.curves import write_log
from hf_specdec.training.distill import DistillTrainer
from hf_specdec.training.draft_card import draft_card, draw_draft_curves
from hf_specdec.training.facts import RunClock
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.fingerprints import examples_fingerprint
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.medusa_run import RunNames, draft_vocabulary
from hf_specdec.training.texts import Example
from hf_specdec.training.vocabulary import coverage

_LOGGER = logging.getLogger(__name__)

LOG, CURVES, CARD = "training_log.json", "curves.png", "README.md"
FEATURES, FULL = "features", "full"
_LOGS_PER_SAVE = 10


@dataclass(frozen=True)
class DistillSettings:
    """How a draft is made and trained.

    Args:
        layers: the target's layers that it is made of; None: `num_layers` at even distances.
        num_layers: how many layers, if `layers` does not say which.
        draft_vocab_size: D, tokens that it can guess: the most frequent ones of the answers; None: all.
        own_output: whether it trains its rows of the output matrix too.
        top_k: how many of the target's best tokens it learns at each position.
        epochs: passes over the data.
        batch_size: texts that are computed at a time, in each process.
        accumulate: batches of one step.
        learning_rate: at its highest; it rises in the first twentieth of the steps and then falls as a cosine.
        evaluations: how often the draft is evaluated and saved on the way.
        bf16: whether it computes in bfloat16; its weights and sums stay in float32.
        depth: guesses of the chains that evaluations look at.
        seed: of the order of texts.

    Raises:
        ArgumentError: names the setting that is out of its range.
    """

    layers: tuple[int, ...] | None = None
    num_layers: int = 3
    draft_vocab_size: int | None = None
    own_output: bool = False
    top_k: int = 64
    epochs: float = 1.0
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 5e-4
    evaluations: int = 10
    bf16: bool = False
    depth: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "top_k", "batch_size", "accumulate", "evaluations", "depth"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be above 0")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ArgumentError(f"draft_vocab_size={self.draft_vocab_size!r} must be a whole number of at least 1")
        if self.own_output and self.draft_vocab_size is None:
            raise ArgumentError("own_output=True needs draft_vocab_size: a whole output matrix is too much to train")


def prepare_run(
    output: Path, train: Sequence[Example], held_out: Sequence[Example], settings: DistillSettings, names: RunNames
) -> RunFolder:
    """Check the folder, before any model is loaded.

    Raises:
        ArgumentError: it is in use.
    """
    identity = {
        **dataclasses.asdict(settings),
        "model": names.model,
        "training texts": examples_fingerprint(train),
        "held-out texts": examples_fingerprint(held_out),
    }
    folder = RunFolder(output, identity)
    folder.check()
    return folder


def trainer_arguments(
    folder: RunFolder, settings: DistillSettings, num_texts: int, use_cpu: bool
) -> TrainingArguments:
    """Arguments of a run in this folder."""
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=settings.bf16,
        eval_strategy="steps",
        save_strategy="steps",
        save_total_limit=2,
        seed=settings.seed,
        use_cpu=use_cpu,
        report_to=[],
    )
    texts_of_step = settings.batch_size * settings.accumulate * arguments.world_size
    num_steps = max(int(-(-num_texts // texts_of_step) * settings.epochs), 1)
    # Saves fall on logs, so that a run that goes on logs the same means as one that was never stopped.
    arguments.logging_steps = max(num_steps // (settings.evaluations * _LOGS_PER_SAVE), 1)
    arguments.eval_steps = arguments.save_steps = max(
        num_steps // settings.evaluations // arguments.logging_steps * arguments.logging_steps, arguments.logging_steps
    )
    return arguments


def read_target(
    target: PreTrainedModel,
    train: Sequence[Example],
    held_out: Sequence[Example],
    folder: RunFolder,
    settings: DistillSettings,
    *,
    cache_dir: Path | None = None,
    cache_max_gb: float | None = None,
) -> tuple[TargetFeatures, TargetFeatures]:
    """Both sets of texts, with a cache for what the target says.

    Args:
        target: the model.
        train: texts to train on.
        held_out: others.
        folder: of the run, which holds the cache if no other place is named, and removes it at its end.
        settings: of the run.
        cache_dir: where the cache is and stays.
        cache_max_gb: bound of the cache of the texts to train on, and of the others; 0 for no cache.
    """
    found = []
    for name, examples in (("train", train), ("held-out", held_out)):
        place = (cache_dir or folder.path / FEATURES) / name if cache_max_gb != 0 else None
        found.append(
            TargetFeatures(
                target,
                examples,
                top_k=settings.top_k,
                cache_dir=place,
                cache_max_gb=cache_max_gb if place is not None else None,
            )
        )
    return found[0], found[1]


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
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
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
        progress: told how far the target is with the texts of a stage.

    Returns:
        The draft, and what the last evaluation measured.

    Raises:
        ArgumentError: a draft vocabulary larger than the target's, or the folder is in use.
        DraftModelError: these layers cannot be cut out of the target.
    """
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
    if arguments.process_index == 0:
        folder.claim()
    clock = RunClock()
    trainer = DistillTrainer(
        draft,
        train_dataset=train,
        eval_dataset=held_out,
        depth=settings.depth,
        args=arguments,
        callbacks=[clock, *callbacks],
    )
    for stage, features in (("held-out", held_out), ("training", train)):
        features.fill_cache(
            lambda done, total, stage=stage: progress(stage, done, total),  # type: ignore[misc]
            arguments.process_index,
            arguments.world_size,
        )
    trainer.accelerator.wait_for_everyone()
    checkpoint = folder.last_checkpoint()
    if checkpoint is not None:
        _LOGGER.info("going on from %s", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate()
    draft.eval()
    if trainer.is_world_process_zero():
        facts = {
            "model": names.model,
            "num_hidden_layers": target.config.num_hidden_layers,
            "data": names.data,
            "command": names.command,
            "settings": dataclasses.asdict(settings),
            "layers": list(layers),
            "draft_vocab_size": settings.draft_vocab_size,
            "texts": {"training": len(train), "held out": len(held_out)},
            "positions": {"training": train.num_positions, "held out": held_out.num_positions},
            "coverage": 1.0 if token_map is None else coverage(held_out.examples, token_map),
            "steps": trainer.state.global_step,
            "processes": arguments.world_size,
            "device": str(target.device),
            "seconds": round(clock.seconds, 1),
        }
        history = trainer.state.log_history
        write_log(folder.path / LOG, history, facts)
        draw_draft_curves(folder.path / CURVES, history)
        save_draft(draft, folder.path)
        if full:
            stock_model(draft, target).save_pretrained(folder.path / FULL)
        card = draft_card({**facts, "device": target.device}, metrics, CURVES, LOG, folder.path.name)
        card.save(folder.path / CARD)
        shutil.rmtree(folder.path / FEATURES, ignore_errors=True)
        folder.finish()
    trainer.accelerator.wait_for_everyone()
    return draft, metrics
