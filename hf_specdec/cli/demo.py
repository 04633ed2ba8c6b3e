"""`hf-specdec demo`: plain and speculative generation of the embedded model, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.live import Live
from rich.table import Table
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import Drafter, KeyedSampler
from hf_specdec.bench import ForwardClock, encode_prompt, first_difference, score_gap, takes_heads
from hf_specdec.cli.console import command, message_console, output_console, print_json
from hf_specdec.cli.options import Dtype, build_named_strategy
from hf_specdec.cli.panels import GrowingPanel, side_by_side
from hf_specdec.demo_model import DEMO_MODEL_NAME, load_demo_draft, load_demo_heads, load_demo_model

DEFAULT_PROMPT = """Write this class again and add a method `size` that returns the number of items.

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]
```"""
_WARM_UP_TOKENS = 4

Generate = Callable[[int, BaseStreamer | None], torch.Tensor]


@dataclass(frozen=True)
class Side:
    """What one of the two sides generated."""

    text: str
    token_ids: list[int]
    seconds: float
    tokens_per_forward: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall clock."""
        return len(self.token_ids) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The side as plain JSON values."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "new_tokens": len(self.token_ids),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_forward": self.tokens_per_forward,
        }


@command
def demo(
    prompt: Annotated[
        str, typer.Argument(help="What to say; a class to rewrite if not given.", show_default=False)
    ] = DEFAULT_PROMPT,
    strategy: Annotated[
        str, typer.Option(help="Name of the strategy; with _heads behind it, the strategy with trained heads.")
    ] = "auto_heads",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; above it, sample.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the model.")] = Dtype.bfloat16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no panels.")] = False,
) -> None:
    """Show plain and speculative generation of a small embedded model side by side. Needs no network."""
    drafter = build_named_strategy(strategy, None, load_demo_heads() if takes_heads(strategy) else None)
    model, tokenizer = load_demo_model(dtype.resolve())
    input_ids = encode_prompt(tokenizer, prompt)
    draft = load_demo_draft(model) if drafter.needs_draft_model else None
    plain = _plain(model, input_ids, temperature, seed)
    speculative = _speculative(model, input_ids, temperature, seed, drafter, draft)
    # The first calls of a process pay for allocations and thread pools that neither side should be charged with.
    for generate in (plain, speculative):
        generate(_WARM_UP_TOKENS, None)
    titles = (f"plain {DEMO_MODEL_NAME}", f"the same with {strategy}")
    sides = _run(model, tokenizer, (plain, speculative), titles, max_new_tokens, show=not as_json)
    difference = first_difference(sides[0].token_ids, sides[1].token_ids)
    gap = score_gap(model, input_ids, sides[0].token_ids, sides[1].token_ids, temperature=temperature, seed=seed)
    if as_json:
        print_json(
            {
                "model": DEMO_MODEL_NAME,
                "prompt": prompt,
                "strategy": strategy,
                "dtype": dtype.value,
                "temperature": temperature,
                "seed": seed,
                "plain": sides[0].to_dict(),
                "speculative": sides[1].to_dict(),
                "ratio": sides[1].tokens_per_second / sides[0].tokens_per_second,
                "identical": difference is None,
                "first_difference": difference,
                "score_gap": gap,
            }
        )
        return
    output_console().print(_table(sides, difference, gap))
    if difference is not None and dtype is not Dtype.float32:
        message_console().print(
            f"In {dtype.value} a forward over several tokens rounds differently from one over a single token. Texts "
            "may part where two tokens are nearly tied (score gap); with --dtype float32 they are equal.",
            style="dim",
        )


def _plain(model: PreTrainedModel, input_ids: torch.Tensor, temperature: float, seed: int) -> Generate:
    def generate(max_new_tokens: int, streamer: BaseStreamer | None) -> torch.Tensor:
        processors = LogitsProcessorList()
        if temperature > 0:
            # Stock generate samples with fresh randomness; with keyed noise as its last processor it draws the same
            # tokens as the speculative side, so that the two texts can be compared.
            processors.extend([TemperatureLogitsWarper(temperature), KeyedSampler(seed)])
        return torch.as_tensor(
            model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                logits_processor=processors,
                max_new_tokens=max_new_tokens,
                streamer=streamer,
            )
        )

    return generate


def _speculative(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    temperature: float,
    seed: int,
    strategy: Drafter,
    draft: PreTrainedModel | None,
) -> Generate:
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}

    def generate(max_new_tokens: int, streamer: BaseStreamer | None) -> torch.Tensor:
        return torch.as_tensor(
            hf_specdec.generate(
                model,
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                streamer=streamer,
                strategy=strategy,
                assistant_model=draft,
                seed=seed,
                **sampling,
            )
        )

    return generate


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    generators: tuple[Generate, Generate],
    titles: tuple[str, str],
    max_new_tokens: int,
    *,
    show: bool,
) -> list[Side]:
    """Run the sides one after the other, so that they do not compete for the processor; draw them as they grow."""
    panels = [GrowingPanel(title, tokenizer) for title in titles]
    console = output_console() if show else message_console()
    console.quiet = not show
    sides = []
    with Live(side_by_side(*panels), console=console, refresh_per_second=8, vertical_overflow="visible"):
        for panel, generate in zip(panels, generators, strict=True):
            panel.waiting = False
            with ForwardClock(model) as clock:
                started = perf_counter()
                generate(max_new_tokens, panel.collector)
                seconds = perf_counter() - started
            tokens = panel.collector.tokens
            sides.append(Side(panel.text, tokens, seconds, len(tokens) / clock.target_forwards))
    # Without a terminal the last frame does not end its line.
    console.line()
    return sides


def _table(sides: list[Side], difference: int | None, gap: float | None) -> Table:
    plain, speculative = sides
    table = Table(show_edge=False)
    for header in ("", "plain", "speculative"):
        table.add_column(header, justify="right" if header else "left")
    table.add_row("new tokens", str(len(plain.token_ids)), str(len(speculative.token_ids)))
    table.add_row("seconds", f"{plain.seconds:.2f}", f"{speculative.seconds:.2f}")
    table.add_row("tokens/s", f"{plain.tokens_per_second:.1f}", f"{speculative.tokens_per_second:.1f}")
    ratio = speculative.tokens_per_second / plain.tokens_per_second
    table.add_row("ratio", "1.00x", f"{ratio:.2f}x")
    table.add_row("tokens per forward", f"{plain.tokens_per_forward:.2f}", f"{speculative.tokens_per_forward:.2f}")
    if difference is None:
        verdict = "identical"
    else:
        verdict = f"differs from token {difference}"
        if gap is not None:
            verdict += f" (score gap {gap:.4f})"
    table.add_row("text", "", verdict)
    return table
