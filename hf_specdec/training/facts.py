"""What a model card tells about a training: data, command, time, versions, curves, accuracies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_specdec.bench.provenance import device_name, package_versions, usable_cores
from hf_specdec.training.rank_rates import RankCounts


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
    settings = facts["settings"]
    training = (
        f"Data: {facts['data']}; {facts['texts']['training']:,} texts with {facts['positions']['training']:,} learned "
        f"tokens, and {facts['texts']['held out']:,} texts with {facts['positions']['held out']:,} held out.\n\n"
        f"```bash\n{facts['command']}\n```\n\n"
        f"{facts['steps']:,} steps in {_duration(facts['seconds'])} with {facts['processes']} "
        f"process{'es' if facts['processes'] > 1 else ''} on {usable_cores()} cores of {device_name(device)}; AdamW, "
        f"learning rate {settings['learning_rate']:g} falling as a cosine, loss weights {settings['head_decay']:g}^i. "
        f"{_versions()}.\n\n"
        f"Accuracies are of {int(counts.totals[0]):,} positions of held-out answers. The draft vocabulary holds "
        f"{facts['coverage']:.1%} of their tokens; others count as misses.\n\n"
        f"![Loss and accuracy by step]({curves})\n\nEvery number of the run is in [{log}]({log})."
    )
    return {"Training": training}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _versions() -> str:
    return ", ".join(f"{name} {version}" for name, version in package_versions("torch", "transformers").items())
