"""Speed of stock generation and of the strategies, at batch size 1, on the embedded model or any other.

python evals/speed/run.py --help
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from hf_specdec import Auto, Drafter, Recycling, SuccessorTable, Suffix, SuffixStore
from hf_specdec.bench import (
    DEFAULT_ARMS,
    BatchRow,
    MemoryRow,
    MemoryTask,
    Results,
    Setup,
    check_arms,
    collect_provenance,
    encode_prompt,
    measure_batch,
    measure_memory,
    measure_speed,
    read_prompts,
    report,
    select_prompts,
    split_arms,
    write_results,
)
from hf_specdec.cli.names import without_folders
from hf_specdec.demo_model import DEMO_MODEL_NAME, demo_model_folder, make_layer_draft, shipped_folder
from hf_specdec.drafts import load_assistant
from hf_specdec.errors import SpecDecError
from hf_specdec.heads import MedusaHeads

HERE = Path(__file__).parent
BATCH_ROWS = 8
FILLED, HEADS_FILLED = "auto_filled", "auto_heads_filled"


def run(
    prompts: Annotated[Path, typer.Option(help="Questions in Spec-Bench's format.")] = HERE / "prompts.jsonl",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 8,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 96,
    arms: Annotated[str, typer.Option(help="What to compare, separated by commas.")] = ",".join(DEFAULT_ARMS),
    model: Annotated[str | None, typer.Option(help="Folder or hub id; the embedded model if not given.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Folder or hub id of the draft model; the embedded model has one of its own.")
    ] = None,
    draft_layers: Annotated[int, typer.Option(min=0, help="Draft with the target's first layers instead.")] = 0,
    heads: Annotated[
        str | None, typer.Option(help="Folder or hub id of trained heads; the embedded model has some of its own.")
    ] = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each drafted chain.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    batch: Annotated[bool, typer.Option(help=f"Also measure batches of {BATCH_ROWS} prompts.")] = False,
    memory: Annotated[bool, typer.Option(help="Also measure memory at 4096 tokens of context.")] = False,
    output: Annotated[Path, typer.Option(help="Rows go here as JSON lines, tables beside it as .md.")] = (
        HERE / "results" / "speed.jsonl"
    ),
) -> None:
    """Measure and store; every method generates greedily."""
    transformers_logging.disable_progress_bar()
    console = Console()
    folder = str(demo_model_folder()) if model is None else model
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if model is None:
        draft = str(shipped_folder("draft")) if draft is None and not draft_layers else draft
        heads = str(shipped_folder("heads")) if heads is None else heads
    drafting = make_layer_draft(target, draft_layers) if draft_layers and draft is None else None
    if draft is not None:
        drafting = load_assistant(draft, target, dtype=target.dtype)
    trained = None if heads is None else MedusaHeads.from_pretrained(heads).to(target.device, target.dtype)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    tables = {name: SuccessorTable(vocab_size) for name in (FILLED, HEADS_FILLED)}
    kept = kept_strategies(tables, vocab_size, trained)
    setup = Setup(target, drafting, draft_tokens, max_new_tokens, seed, kept, trained)
    chosen = select_prompts(read_prompts(prompts), tokenizer, per_task=num_prompts, max_tokens=max_prompt_tokens)
    names = split_arms(arms)
    check_arms(names, setup)
    preparation = {}
    for arm in tables.keys() & set(names):
        started = perf_counter()
        # In front of each token stands a chat up to where the answer begins.
        tables[arm].fill(target, prefix=encode_prompt(tokenizer, "")[0].tolist())
        preparation[f"the table of {arm} was filled"] = seconds = perf_counter() - started
        console.print(f"Filled the table of {arm} in {seconds:.1f} s", highlight=False)

    speed = []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("Prompts", total=len(chosen))
        for row in measure_speed(setup, tokenizer, chosen, names):
            speed.append(row)
            bar.update(task, completed=len({(row.task, row.prompt_id) for row in speed}))

    # What was kept holds the answers by now, so these arms would not be measured but asked what they have seen.
    fresh = [arm for arm in names if arm not in kept]
    # Stock prompt lookup and stock assisted generation refuse batches.
    batchable = [arm for arm in fresh if not arm.startswith("stock_")]
    batch_rows: list[BatchRow] = []
    if batch:
        texts = [prompt.text for prompt in chosen[:BATCH_ROWS]]
        batch_rows = measure_batch(setup, tokenizer, texts, batchable)
    memory_rows: list[MemoryRow] = []
    if memory:
        shared = {
            "draft": draft,
            "draft_layers": draft_layers,
            "draft_tokens": draft_tokens,
            "heads": heads,
            "dtype": dtype,
            "device": device,
        }
        memory_rows = measure_memory([MemoryTask(folder, arm, seed=seed, **shared) for arm in fresh])

    results = Results(
        collect_provenance(
            target,
            name=without_folders(model) if model else DEMO_MODEL_NAME,
            draft=in_words(draft, draft_layers),
            seed=seed,
            command=shlex.join(["python", "evals/speed/run.py", *map(without_folders, sys.argv[1:])]),
            preparation_seconds=preparation,
        ),
        speed,
        batch_rows,
        memory_rows,
    )
    write_results(output, results)
    tables = output.with_suffix(".md")
    tables.write_text(report(results), encoding="utf-8")
    console.print(report(results), markup=False, highlight=False, soft_wrap=True)


def kept_strategies(
    filled: dict[str, SuccessorTable], vocab_size: int, heads: MedusaHeads | None
) -> dict[str, Drafter]:
    """Arms whose store or table outlives a prompt, as in a service that keeps its strategy object."""

    def both(table: SuccessorTable) -> Auto:
        return Auto(parts=[Suffix(store=SuffixStore()), Recycling(table=table)])

    kept: dict[str, Drafter] = {
        "suffix_kept": Suffix(store=SuffixStore()),
        "recycling_kept": Recycling(table=SuccessorTable(vocab_size)),
        "auto_kept": both(SuccessorTable(vocab_size)),
        FILLED: both(filled[FILLED]),
    }
    if heads is not None:
        kept["auto_heads_kept"] = both(SuccessorTable(vocab_size)).with_heads(heads)
        kept[HEADS_FILLED] = both(filled[HEADS_FILLED]).with_heads(heads)
    return kept


def in_words(draft: str | None, layers: int) -> str | None:
    """The draft model, for the table's head."""
    if draft == str(shipped_folder("draft")):
        return "three layers of the target, distilled; in the package"
    if draft is not None:
        return Path(draft).name if Path(draft).is_dir() else draft
    return f"the first {layers} layers of the target, untrained" if layers else None


if __name__ == "__main__":
    try:
        typer.run(run)
    except SpecDecError as error:
        Console(stderr=True).print(f"Error: {error}", markup=False)
        sys.exit(1)
