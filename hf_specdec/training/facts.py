"""What is known of a training: for its log, and in words for a model card."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_specdec.bench.provenance import device_name, package_versions, usable_cores
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.rank_rates import RankCounts
from hf_specdec.training.runs import RunNames, RunSettings
from hf_specdec.training.trainer import FeaturesTrainer
from hf_specdec.training.vocabulary import coverage


class RunClock(TrainerCallback, ExportableState):
    """Counts the seconds that a run has trained, those before a kill (up to the last checkpoint) included."""

    def __init__(self, earlier: float = 0.0) -> None:
        self.earlier = earlier
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of this process and of the ones that it goes on from."""
        return self.earlier + time.monotonic() - self._begin

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **further: Any
    ) -> None:
        """Read what earlier processes counted."""
        saved: Any = state.stateful_callbacks or {}
        if type(self).__name__ in saved:
            self.earlier = float(saved[type(self).__name__]["args"]["earlier"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {"earlier": self.seconds}, "attributes": {}}


def run_facts(
    trainer: FeaturesTrainer,
    names: RunNames,
    settings: RunSettings,
    train: TargetFeatures,
    held_out: TargetFeatures,
    token_map: Tensor | None,
    clock: RunClock,
) -> dict[str, Any]:
    """What a log says besides its history."""
    return {
        **dataclasses.asdict(names),
        "settings": dataclasses.asdict(settings),
        "texts": {"training": len(train), "held out": len(held_out)},
        "positions": {"training": train.num_positions, "held out": held_out.num_positions},
        "coverage": 1.0 if token_map is None else coverage(held_out.examples, token_map),
        "steps": trainer.state.global_step,
        "processes": trainer.args.world_size,
        "seconds": round(clock.seconds, 1),
    }


def counted_texts(facts: Mapping[str, Any]) -> str:
    """How many texts there were, from `run_facts`."""
    texts, positions = facts["texts"], facts["positions"]
    return (
        f"{texts['training']:,} texts with {positions['training']:,} learned tokens, and {texts['held out']:,} texts "
        f"with {positions['held out']:,} held out"
    )


def how_it_went(facts: Mapping[str, Any], device: torch.device, loss: str) -> str:
    """How the training went, from `run_facts`.

    Args:
        facts: of the run.
        device: where the target computed.
        loss: what was learned, in a few words.
    """
    seconds = facts["seconds"]
    duration = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
    cores = usable_cores()
    versions = [f"{name} {version}" for name, version in package_versions("torch", "transformers").items()]
    return (
        f"{facts['steps']:,} steps in {duration} with {facts['processes']} "
        f"process{'es' if facts['processes'] > 1 else ''} on {cores} core{'s' if cores > 1 else ''} of "
        f"{device_name(device)}; AdamW, "
        f"learning rate {facts['settings']['learning_rate']:g} falling as a cosine, {loss}. {', '.join(versions)}."
    )


def training_notes(
    facts: Mapping[str, Any], counts: RankCounts, device: torch.device, curves: str, log: str
) -> dict[str, str]:
    """Sections of the card: title to text in Markdown.

    Args:
        facts: as they stand in the log.
        counts: of the last evaluation.
        device: where the target computed.
        curves, log: names of the files beside the card.
    """
    weights = f"loss weights {facts['settings']['head_decay']:g}^i"
    training = (
        f"Data: {facts['data']}; {counted_texts(facts)}.\n\n"
        f"```bash\n{facts['command']}\n```\n\n"
        f"{how_it_went(facts, device, weights)}\n\n"
        f"Accuracies are of {int(counts.totals[0]):,} positions of held-out answers. The draft vocabulary holds "
        f"{facts['coverage']:.1%} of their tokens; others count as misses.\n\n"
        f"![Loss and accuracy by step]({curves})\n\nEvery number of the run is in [{log}]({log})."
    )
    return {"Training": training}
