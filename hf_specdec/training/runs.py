"""What runs of `train-medusa` and of `distill-draft` have in common, from their settings to their end."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments

from hf_specdec.checks import require_positive, require_seed, require_whole
from hf_specdec.drafters.settings import eos_tokens
from hf_specdec.errors import ArgumentError
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.fingerprints import examples_fingerprint
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.texts import Example
from hf_specdec.training.trainer import FeaturesTrainer
from hf_specdec.training.vocabulary import frequent_tokens

_LOGGER = logging.getLogger(__name__)

LOG, CURVES = "training_log.json", "curves.png"
"""Names of the files beside a card."""

_LOGS_PER_SAVE = 10
# Seconds that processes wait for each other: one may have longer texts to put into the cache.
_PATIENCE = 6 * 3600


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How something is trained.

    Args:
        draft_vocab_size: D, tokens that can be guessed: the most frequent ones of the answers; None: all.
        epochs: passes over the data.
        batch_size: texts that are computed at a time, in each process.
        accumulate: batches of one step.
        learning_rate: at its highest; it rises in the first twentieth of the steps and then falls as a cosine.
        evaluations: how often there is an evaluation and a checkpoint on the way.
        bf16: whether to compute in bfloat16; trained weights and their sums stay in float32.
        seed: of the order of texts.

    Raises:
        ArgumentError: names the setting that is out of its range.
    """

    draft_vocab_size: int | None = None
    epochs: float = 1.0
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float
    evaluations: int = 10
    bf16: bool = False
    seed: int = 0

    whole: ClassVar[tuple[str, ...]] = ("batch_size", "accumulate", "evaluations")
    """Settings that count something."""

    def __post_init__(self) -> None:
        require_whole(**{name: getattr(self, name) for name in self.whole})
        require_positive(epochs=self.epochs, learning_rate=self.learning_rate)
        require_seed(seed=self.seed)
        if self.draft_vocab_size is not None:
            require_whole(draft_vocab_size=self.draft_vocab_size)


@dataclass(frozen=True)
class RunNames:
    """What cards and logs call things.

    Args:
        model: the target.
        data: the texts.
        command: the command line, or other words for how the result was made.
    """

    model: str
    data: str
    command: str


def open_run(
    output: Path, train: Sequence[Example], held_out: Sequence[Example], settings: RunSettings, names: RunNames
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


def cached_features(
    target: PreTrainedModel,
    train: Sequence[Example],
    held_out: Sequence[Example],
    folder: RunFolder,
    name: str,
    *,
    cache_dir: Path | None,
    cache_max_gb: float,
    **kinds: Any,
) -> tuple[TargetFeatures, TargetFeatures]:
    """What the target says about the texts to train on and about those held out.

    Args:
        target: the model.
        train, held_out: the texts.
        folder: of the run, which holds the cache if no other place is named, and removes it at its end.
        name: of this kind of features, so that one `cache_dir` can hold several.
        cache_dir: where the cache is and stays.
        cache_max_gb: bound of all files there, in 10^9 bytes, which both share by their size; 0 for no cache: all is
            computed again in each epoch and each evaluation.
        **kinds: which features; see `TargetFeatures`.

    Raises:
        ArgumentError: a bound that is none.
    """
    if cache_max_gb == 0:
        return TargetFeatures(target, train, **kinds), TargetFeatures(target, held_out, **kinds)
    place = cache_dir or folder.features
    learned = [sum(one.num_learned for one in examples) for examples in (train, held_out)]
    bounds = [cache_max_gb * part / sum(learned) for part in learned]
    return (
        TargetFeatures(target, train, cache_dir=place / f"training-{name}", cache_max_gb=bounds[0], **kinds),
        TargetFeatures(target, held_out, cache_dir=place / f"held-out-{name}", cache_max_gb=bounds[1], **kinds),
    )


def draft_vocabulary(target: PreTrainedModel, train: Sequence[Example], size: int | None) -> Tensor | None:
    """The tokens that may be guessed, int64 `[D]`: the most frequent ones, and those that end a text.

    Raises:
        ArgumentError: a size above the target's vocabulary.
    """
    if size is None:
        return None
    vocab_size = int(target.config.get_text_config(decoder=True).vocab_size)
    if size > vocab_size:
        raise ArgumentError(
            f"draft_vocab_size={size} is more than the {vocab_size} tokens of {type(target).__name__}; leave it out "
            "to guess among all"
        )
    ends = () if target.generation_config is None else eos_tokens(target.generation_config)
    return frequent_tokens(train, size, vocab_size=vocab_size, always=ends)


def trainer_arguments(folder: RunFolder, settings: RunSettings, num_texts: int, **further: Any) -> TrainingArguments:
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


def claim(folder: RunFolder, arguments: TrainingArguments) -> None:
    """Make the folder this run's, before a Trainer writes to it.

    Raises:
        ArgumentError: it is in use.
    """
    if arguments.process_index == 0:
        folder.claim()


def train_to_end(
    trainer: FeaturesTrainer,
    parts: Sequence[TargetFeatures],
    folder: RunFolder,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """Fill the caches of all parts, and train from the last checkpoint on; in every process of a run.

    Args:
        trainer: ready to train.
        parts: all texts.
        folder: claimed.
        progress: told how many texts of a part are in its cache, and how many there will be.

    Returns:
        What the evaluation of the last step measured.

    Raises:
        NonFiniteTrainingError: losses or weights came to be NaN or infinite.
    """
    # Whoever wants to see the log has a callback for it.
    trainer.remove_callback(PrinterCallback)
    trainer.accelerator.wait_for_everyone()  # the folder is this run's now, and may be written to
    for features in parts:
        features.fill_cache(progress, trainer.args.process_index, trainer.args.world_size)
    trainer.accelerator.wait_for_everyone()
    checkpoint = folder.last_checkpoint()
    if checkpoint is not None:
        _LOGGER.info("going on from %s", checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.check_weights()
    # There was none if all steps had been done before a kill.
    return trainer.evaluate() if trainer.measured is None else trainer.measured
