"""Training Medusa heads from beginning to end: checks, the Trainer, the best tree, files and card."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.heads.choices import best_tree, expected_tokens
from hf_specdec.training.curves import draw_head_curves, write_log
from hf_specdec.training.facts import RunClock, training_notes
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.fingerprints import examples_fingerprint
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.medusa import MedusaTrainer
from hf_specdec.training.texts import Example
from hf_specdec.training.vocabulary import coverage, frequent_tokens

_LOGGER = logging.getLogger(__name__)

LOG, CURVES = "training_log.json", "curves.png"
_LOGS_PER_SAVE = 10
# Seconds that processes wait for each other: one may have longer texts to put into the cache.
_PATIENCE = 6 * 3600


@dataclass(frozen=True)
class MedusaSettings:
    """How heads are trained.

    Args:
        num_heads: K.
        num_layers: residual blocks of each head.
        own_output: whether each head trains an output matrix of its own.
        draft_vocab_size: D, tokens that heads can guess: the most frequent ones of the answers; None: all.
        epochs: passes over the data.
        batch_size: texts that are computed at a time, in each process.
        accumulate: batches of one step.
        learning_rate: at its highest; it rises in the first twentieth of the steps and then falls as a cosine.
        head_decay: how much less each further head counts in the loss.
        evaluations: how often heads are evaluated and saved on the way.
        bf16: whether heads compute in bfloat16; their weights and sums stay in float32.
        num_nodes: nodes of the tree that is stored with the heads.
        width: ranks of guesses that are told apart when measured.
        seed: of the order of texts.

    Raises:
        ArgumentError: names the setting that is out of its range.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_output: bool = False
    draft_vocab_size: int | None = None
    epochs: float = 1.0
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-3
    head_decay: float = 0.8
    evaluations: int = 10
    bf16: bool = False
    num_nodes: int = 24
    width: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "batch_size", "accumulate", "evaluations", "num_nodes", "width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be above 0")
        if not 0 < self.head_decay <= 1:
            raise ArgumentError(f"head_decay={self.head_decay!r} must be above 0 and at most 1")
        guesses = self.draft_vocab_size
        if guesses is not None and (not isinstance(guesses, int) or guesses < self.width):
            raise ArgumentError(f"draft_vocab_size={guesses!r} must be a whole number of at least width={self.width}")


@dataclass(frozen=True)
class RunNames:
    """What cards and logs call things.

    Args:
        model: the target.
        data: the texts.
        command: the command line, or other words for how the heads were made.
    """

    model: str
    data: str
    command: str


def prepare_run(
    output: Path, train: Sequence[Example], held_out: Sequence[Example], settings: MedusaSettings, names: RunNames
) -> RunFolder:
    """Check texts and folder, before any model is loaded.

    Raises:
        ArgumentError: no text is long enough for the last head, or the folder is in use.
    """
    for name, examples in (("training", train), ("held-out", held_out)):
        if not any(one.num_learned > settings.num_heads for one in examples):
            raise ArgumentError(
                f"data: none of the {len(examples)} {name} texts has {settings.num_heads + 1} tokens to learn, which "
                f"is how far {settings.num_heads} heads reach; give longer answers or train fewer heads"
            )
    identity = {
        **dataclasses.asdict(settings),
        "model": names.model,
        "training texts": examples_fingerprint(train),
        "held-out texts": examples_fingerprint(held_out),
    }
    folder = RunFolder(output, identity)
    folder.check()
    return folder


def open_features(
    target: PreTrainedModel,
    train: Sequence[Example],
    held_out: Sequence[Example],
    cache_dir: Path | None,
    cache_gb: float | None,
) -> tuple[TargetFeatures, TargetFeatures]:
    """What the target says about the texts to train on and about those held out.

    Args:
        target: the model.
        train, held_out: the texts.
        cache_dir: folder for what was computed once; None: it is computed again in each epoch and each evaluation.
        cache_gb: bound of all files there, in 10^9 bytes; None for no bound.
    """
    parts = {"training": train, "held-out": held_out}
    learned = {name: sum(one.num_learned for one in examples) for name, examples in parts.items()}
    opened = []
    for name, examples in parts.items():
        bound = None if cache_gb is None else cache_gb * learned[name] / sum(learned.values())
        kept: dict[str, Any] = {} if cache_dir is None else {"cache_dir": cache_dir / name, "cache_max_gb": bound}
        opened.append(TargetFeatures(target, examples, **kept))
    return opened[0], opened[1]


def draft_vocabulary(target: PreTrainedModel, train: Sequence[Example], size: int | None) -> Tensor | None:
    """The tokens that heads may guess, int64 `[D]`: the most frequent ones, and those that end a text.

    Raises:
        ArgumentError: a size above the target's vocabulary.
    """
    if size is None:
        return None
    vocab_size = int(target.config.get_text_config(decoder=True).vocab_size)
    if size > vocab_size:
        raise ArgumentError(
            f"draft_vocab_size={size} is more than the {vocab_size} tokens of {type(target).__name__}; leave it out "
            "to let heads guess all"
        )
    ends = target.generation_config.eos_token_id if target.generation_config is not None else None
    always = [ends] if isinstance(ends, int) else ends or []
    return frequent_tokens(train, size, vocab_size=vocab_size, always=always)


def trainer_arguments(
    folder: RunFolder, settings: MedusaSettings, num_texts: int, **further: Any
) -> TrainingArguments:
    """Arguments of a run in this folder; `further` go to TrainingArguments as they are."""
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
        ddp_timeout=_PATIENCE,
        report_to=[],
        **further,
    )
    texts_of_step = settings.batch_size * settings.accumulate * arguments.world_size
    num_steps = max(int(-(-num_texts // texts_of_step) * settings.epochs), 1)
    # Saves fall on logs, so that a run that goes on logs the same means as one that was never stopped.
    arguments.logging_steps = max(num_steps // (settings.evaluations * _LOGS_PER_SAVE), 1)
    arguments.eval_steps = arguments.save_steps = max(
        num_steps // settings.evaluations // arguments.logging_steps * arguments.logging_steps, arguments.logging_steps
    )
    return arguments


def train_medusa(
    train: TargetFeatures,
    held_out: TargetFeatures,
    folder: RunFolder,
    settings: MedusaSettings,
    names: RunNames,
    arguments: TrainingArguments,
    callbacks: Sequence[TrainerCallback] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> MedusaHeads:
    """Train heads, choose their tree, and write them with card, log and curves into the folder.

    A run that was stopped goes on from its last checkpoint. Call it in every process of a distributed run.

    Args:
        train, held_out: the texts; their caches, if they have any, are filled first.
        folder: from `prepare_run`, and claimed.
        settings, names: as for `prepare_run`.
        arguments: from `trainer_arguments`.
        callbacks: further ones of the Trainer.
        progress: told how many texts are in the cache, and how many there will be.

    Returns:
        The heads, in the target's dtype.

    Raises:
        ArgumentError: the draft vocabulary is larger than the target's.
    """
    clock = RunClock()
    target = train.target
    token_map = draft_vocabulary(target, train.examples, settings.draft_vocab_size)
    heads = MedusaHeads.for_target(
        target,
        token_map=token_map,
        num_heads=settings.num_heads,
        num_layers=settings.num_layers,
        own_output=settings.own_output,
        base_model=names.model,
    )
    for features in (held_out, train):
        features.fill_cache(progress, arguments.process_index, arguments.world_size)
    trainer = MedusaTrainer(
        heads,
        train_dataset=train,
        eval_dataset=held_out,
        head_decay=settings.head_decay,
        width=settings.width,
        args=arguments,
        callbacks=[clock, *callbacks],
    )
    # Whoever wants to see the log has a callback for it.
    trainer.remove_callback(PrinterCallback)
    trainer.accelerator.wait_for_everyone()
    checkpoint = folder.last_checkpoint()
    if checkpoint is not None:
        _LOGGER.info("going on from %s", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.rank_counts is None:  # all steps were done before a kill
        trainer.evaluate()
    counts = trainer.rank_counts
    assert counts is not None
    heads.rank_rates = counts.rates
    heads.tree = tree = best_tree(counts.rates, settings.num_nodes)
    heads = heads.to(target.dtype)
    if trainer.is_world_process_zero():
        facts = {
            "model": names.model,
            "data": names.data,
            "command": names.command,
            "settings": dataclasses.asdict(settings),
            "texts": {"training": len(train), "held out": len(held_out)},
            "positions": {"training": train.num_positions, "held out": held_out.num_positions},
            "coverage": 1.0 if token_map is None else coverage(held_out.examples, token_map),
            "steps": trainer.state.global_step,
            "processes": arguments.world_size,
            "seconds": round(clock.seconds, 1),
            "expected_tokens_per_forward": expected_tokens(tree, counts.rates),
        }
        heads.notes = training_notes(facts, counts, target.device, CURVES, LOG)
        write_log(folder.path / LOG, trainer.state.log_history, facts)
        draw_head_curves(folder.path / CURVES, trainer.state.log_history, heads.num_heads)
        heads.save_pretrained(folder.path)
        folder.finish()
    trainer.accelerator.wait_for_everyone()
    return heads
