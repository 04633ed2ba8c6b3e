"""Training Medusa heads from beginning to end: checks, the Trainer, the best tree, files and card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformers import TrainerCallback, TrainingArguments

from hf_specdec.checks import require_share
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads
from hf_specdec.heads.choices import best_tree, expected_tokens
from hf_specdec.training.curves import draw_head_curves, write_log
from hf_specdec.training.facts import RunClock, run_facts, training_notes
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.folders import RunFolder
from hf_specdec.training.medusa import MedusaTrainer
from hf_specdec.training.rank_rates import check_width
from hf_specdec.training.runs import (
    CURVES,
    LOG,
    RunNames,
    RunSettings,
    claim,
    draft_vocabulary,
    open_run,
    train_to_end,
)
from hf_specdec.training.texts import Example


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(RunSettings):
    """How heads are trained.

    Args:
        num_heads: K.
        num_layers: residual blocks of each head.
        own_output: whether each head trains an output matrix of its own.
        learning_rate: see `RunSettings`, as everything else.
        head_decay: how much less each further head counts in the loss.
        num_nodes: nodes of the tree that is stored with the heads.
        width: ranks of guesses that are told apart when measured.

    Raises:
        ArgumentError: names the setting that is out of its range.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_output: bool = False
    learning_rate: float = 1e-3
    head_decay: float = 0.8
    num_nodes: int = 24
    width: int = 10

    whole: ClassVar[tuple[str, ...]] = (*RunSettings.whole, "num_heads", "num_layers", "num_nodes", "width")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(head_decay=self.head_decay)
        if self.draft_vocab_size is not None and self.draft_vocab_size < self.width:
            raise ArgumentError(
                f"draft_vocab_size={self.draft_vocab_size} must be a whole number of at least width={self.width}"
            )


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
    return open_run(output, train, held_out, settings, names)


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
        folder: from `prepare_run`.
        settings, names: as for `prepare_run`.
        arguments: from `trainer_arguments`.
        callbacks: further ones of the Trainer.
        progress: told how many texts of a part are in its cache, and how many there will be.

    Returns:
        The heads, in the target's dtype.

    Raises:
        ArgumentError: the draft vocabulary is larger than the target's, the width larger than what heads can guess, or
            the folder is in use.
        NonFiniteTrainingError: losses or weights came to be NaN or infinite; no heads are written.
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
    check_width(heads, settings.width)
    claim(folder, arguments)
    trainer = MedusaTrainer(
        heads,
        train_dataset=train,
        eval_dataset=held_out,
        head_decay=settings.head_decay,
        width=settings.width,
        args=arguments,
        callbacks=[clock, *callbacks],
    )
    train_to_end(trainer, (held_out, train), folder, progress)
    counts = trainer.rank_counts
    assert counts is not None
    heads.rank_rates = counts.rates
    heads.tree = tree = best_tree(counts.rates, settings.num_nodes)
    heads = heads.to(target.dtype)
    if trainer.is_world_process_zero():
        facts = run_facts(trainer, names, settings, train, held_out, token_map, clock) | {
            "expected_tokens_per_forward": expected_tokens(tree, counts.rates)
        }
        heads.notes = training_notes(facts, counts, target.device, CURVES, LOG)
        write_log(folder.path / LOG, trainer.state.log_history, facts)
        draw_head_curves(folder.path / CURVES, trainer.state.log_history, heads.num_heads)
        heads.save_pretrained(folder.path)
        folder.finish()
    trainer.accelerator.wait_for_everyone()
    return heads
