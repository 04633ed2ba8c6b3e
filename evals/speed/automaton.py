"""What the suffix automaton costs: time of an addition and of a query, and memory, by size.

python evals/speed/automaton.py
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from hf_specdec.demo_model import demo_model_folder
from hf_specdec.sources.automaton import ROOT, SuffixAutomaton
from hf_specdec.sources.matches import Match, continuations

DOCS = Path(__file__).parents[2] / "docs"
LATEST = 5000
QUERIES = 2000


def run(
    texts: Path = typer.Option(DOCS, help="A folder of .md files: the text that is read, again and again."),  # noqa: B008
    sizes: str = typer.Option("10000,30000,100000", help="Numbers of tokens."),
) -> None:
    """Print a table: the mean time of adding the latest tokens, the median and the longest time of a query."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    pages = [path.read_text(encoding="utf-8") for path in sorted(texts.rglob("*.md"))]
    tokens = [token for page in pages for token in tokenizer.encode(page)]
    table = Table("tokens", "add, us", "query, us", "slowest query, us", "KB a token", "states a token")
    for size in map(int, sizes.split(",")):
        read = (tokens * (size // len(tokens) + 1))[:size]
        automaton = SuffixAutomaton()
        automaton.extend(read[:-LATEST])
        adding = seconds(partial(automaton.extend, read[-LATEST:])) / LATEST
        state, length, asking = ROOT, 0, []
        for token in read[:QUERIES]:
            state, length = automaton.step(state, length, token)
            match = Match(automaton, state, length)
            asking.append(seconds(partial(continuations, match, "store")))
        table.add_row(
            f"{size:,}",
            f"{adding * 1e6:.1f}",
            f"{median(asking) * 1e6:.1f}",
            f"{max(asking) * 1e6:.0f}",
            f"{memory(read) / size / 1024:.2f}",
            f"{len(automaton.counts) / size:.2f}",
        )
    Console().print(table)


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def memory(tokens: list[int]) -> int:
    tracemalloc.start()
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size


if __name__ == "__main__":
    typer.run(run)
