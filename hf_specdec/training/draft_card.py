"""What is written beside a distilled draft: its card, and its curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from matplotlib import rc_context
from matplotlib.figure import Figure

from hf_specdec.training.curves import HELD_OUT, TRAINED, plot_line, save_figure
from hf_specdec.training.facts import counted_texts, how_it_went

_TEMPLATE = """---
{{ card_data }}
---

# A draft model for {{ model }}

{{ summary }}

```python
import hf_specdec
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{{ model }}"
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
draft = hf_specdec.load_draft("{{ repo }}", model)
hf_specdec.enable(model)
output = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), strategy="tree", assistant_model=draft)
```

The text is that of the target: the draft guesses, and the target checks every token.

## Training

Data: {{ data }}; {{ texts }}.

```bash
{{ command }}
```

{{ how }}

![Divergence, agreement and acceptance]({{ curves }})

Every number of the run is in [{{ log }}]({{ log }}).

## On held-out text

{{ measured }}
"""


def draft_card(facts: Mapping[str, Any], metrics: Mapping[str, float], curves: str, log: str, repo: str) -> ModelCard:
    """Write the card.

    Args:
        facts: as they stand in the log.
        metrics: of the last evaluation.
        curves, log: names of the files beside the card.
        repo: what to load the draft from.
    """
    base_model = facts["model"] if "/" in facts["model"] else None
    layers = ", ".join(map(str, facts["layers"]))
    vocabulary = facts["draft_vocab_size"]
    data = ModelCardData(
        base_model=base_model,
        library_name="hf_specdec",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "distillation"],
    )
    card: ModelCard = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        model=facts["model"],
        repo=repo,
        summary=(
            f"Layers {layers} of the target's {facts['num_hidden_layers']}, trained to predict what the target says "
            "(forward Kullback-Leibler divergence to its own distribution). It has the target's embeddings and "
            + ("the target's output matrix" if vocabulary is None else f"{vocabulary:,} rows of the output matrix")
            + ", which are not stored here."
        ),
        data=facts["data"],
        texts=counted_texts(facts),
        command=facts["command"],
        how=how_it_went(
            facts,
            torch.device(facts["device"]),
            f"the target's {facts['settings']['top_k']} best tokens at each position",
        ),
        curves=curves,
        log=log,
        measured=_measured(facts, metrics),
    )
    return card


def draw_draft_curves(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Draw divergence and agreement against the step, and acceptance against the depth, as PNG.

    Args:
        path: the file.
        history: `trainer.state.log_history` of a `DistillTrainer`.
    """
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(9.0, 3.2), layout="constrained")
        divergences, agreements, acceptances = figure.subplots(1, 3)
        plot_line(divergences, history, "loss", "training", color=TRAINED, linewidth=0.8)
        plot_line(divergences, history, "eval_kl", "held out", color=HELD_OUT, marker=".")
        divergences.set_ylabel("KL(target, draft)")
        plot_line(agreements, history, "eval_agreement", None, color=HELD_OUT, marker=".")
        agreements.set_ylabel("held out: same best token")
        agreements.set_ylim(0, 1)
        rates = acceptance_rates([record for record in history if "eval_kl" in record][-1])
        acceptances.plot(range(1, len(rates) + 1), rates, color=HELD_OUT, marker=".")
        acceptances.set_ylim(0, 1)
        acceptances.set_xticks(range(1, len(rates) + 1))
        acceptances.set_ylabel("held out: all guesses right")
        save_figure(path, figure, (divergences, agreements, acceptances))


def acceptance_rates(metrics: Mapping[str, float]) -> list[float]:
    """How often the first 1, 2, ... guesses of a chain are all right, as an evaluation of `DistillTrainer` says."""
    rates: list[float] = []
    while f"eval_acceptance_{len(rates) + 1}" in metrics:
        rates.append(metrics[f"eval_acceptance_{len(rates) + 1}"])
    return rates


def _measured(facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    rates = acceptance_rates(metrics)
    header = ["guesses in a row", *map(str, range(1, len(rates) + 1))]
    lines = [header, ["--:"] * len(header), ["all right", *(f"{rate:.3f}" for rate in rates)]]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{table}\n\nThe best token is the target's at {metrics['eval_agreement']:.1%} of the positions; the "
        f"divergence is {metrics['eval_kl']:.3f}. A chain of {len(rates)} guesses a round gives "
        f"{metrics['eval_tokens']:.2f} tokens per forward of the target at temperature 0. The draft's vocabulary "
        f"holds {facts['coverage']:.1%} of the held-out answers' tokens; others count as misses."
    )
