"""How a training went: its log as JSON, and its curves as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_specdec.atomic import replace_file

TRAINED, HELD_OUT = "#777777", "#b3362c"


def write_log(path: Path, history: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Write what was logged, and what else is known of the run, as one JSON object."""
    text = json.dumps({**facts, "history": list(history)}, indent=1, ensure_ascii=False)
    replace_file(path, lambda place: place.write_text(text + "\n", encoding="utf-8"))


def draw_head_curves(path: Path, history: Sequence[Mapping[str, Any]], num_heads: int) -> None:
    """Draw the loss and each head's accuracy against the step, as PNG.

    Args:
        path: the file.
        history: `trainer.state.log_history` of a `MedusaTrainer`.
        num_heads: K.
    """
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(9.0, 3.4), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        plot_line(losses, history, "loss", "training", color=TRAINED, linewidth=0.8)
        plot_line(losses, history, "eval_loss", "held out", color=HELD_OUT, marker=".")
        losses.set_ylabel("loss, summed over heads")
        for head in range(num_heads):
            style: dict[str, Any] = {"color": f"C{head % 10}", "marker": "."}
            plot_line(accuracies, history, f"eval_head{head}_top1", f"head {head}", **style)
            plot_line(accuracies, history, f"eval_head{head}_top5", None, linestyle=":", **style)
        accuracies.set_ylim(0, 1)
        accuracies.set_ylabel("held-out accuracy (dotted: best five)")
        save_figure(path, figure, (losses, accuracies))


def save_figure(path: Path, figure: Figure, all_axes: Sequence[Axes]) -> None:
    """Dress axes over training steps, and write the picture in one go."""
    for axes in all_axes:
        axes.set_xlabel("step")
        axes.grid(linewidth=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
    replace_file(path, lambda place: figure.savefig(place, format="png", dpi=110, metadata={"Software": None}))


def plot_line(axes: Axes, history: Sequence[Mapping[str, Any]], name: str, label: str | None, **style: Any) -> None:
    """Draw what the log says under a name against the step; nothing if it never does."""
    points = [(record["step"], record[name]) for record in history if name in record]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
