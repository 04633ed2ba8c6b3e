"""`hf-specdec generate`: one prompt, any model, any strategy."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TextStreamer

import hf_specdec
from hf_specdec import Medusa, SpeculationStats, SpeculativeOutput
from hf_specdec.bench import encode_prompt
from hf_specdec.cli.console import command, message_console, output_console, print_json
from hf_specdec.cli.options import Dtype, Verification, build_strategy, resolve_device
from hf_specdec.drafts import load_assistant
from hf_specdec.heads import MedusaHeads


class ConsoleStreamer(TextStreamer):
    """Writes the growing text to a rich console, without reading markup in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._console = console

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of the text."""
        self._console.print(Text(text), end="\n" if stream_end else "", soft_wrap=True)


@command
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of the model.")],
    assistant: Annotated[str | None, typer.Option(help="Folder or hub id of the draft model.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Name of the strategy; prompt_lookup if not given, medusa with --heads.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Folder or hub id of trained heads.")] = None,
    strategy_args: Annotated[str | None, typer.Option(help="Its settings: name=value,name=value.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; above it, sample.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the k likeliest tokens; 0 is off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling; drawn when not given.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the first accelerator if any.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template; by default if there is one.")] = None,
    verification: Annotated[Verification, typer.Option(help="How drafts are checked.")] = Verification.keyed,
    lossless: Annotated[
        bool, typer.Option("--lossless/--lossy", help="--lossy allows --verification typical, which changes texts.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming.")] = False,
) -> None:
    """Generate from any causal language model, streaming to the terminal."""
    loaded = None if heads is None else MedusaHeads.from_pretrained(heads)
    strategy = strategy or ("prompt_lookup" if loaded is None else loaded.strategy)
    drafter = build_strategy(strategy, strategy_args, loaded)
    if isinstance(drafter, Medusa) and loaded is None:
        raise typer.BadParameter(f"strategy {strategy} drafts with trained heads", param_hint="--heads")
    if (verification is Verification.typical) == lossless:
        raise typer.BadParameter(
            "--verification typical changes what the model says and goes with --lossy, which no other rule needs",
            param_hint="--verification",
        )
    if drafter.needs_draft_model and assistant is None:
        raise typer.BadParameter(f"strategy {strategy} drafts with a second model", param_hint="--assistant")
    if temperature == 0 and (seed is not None or top_k or top_p < 1 or verification is not Verification.keyed):
        raise typer.BadParameter(
            "--seed, --top-k, --top-p and --verification need sampling: pass --temperature above 0"
        )
    place = resolve_device(device)
    number_format = "auto" if dtype is None else dtype.resolve()
    target = AutoModelForCausalLM.from_pretrained(model, dtype=number_format).to(place)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(model)
    draft = None if assistant is None else load_assistant(assistant, target, dtype=number_format)
    input_ids = encode_prompt(tokenizer, prompt, chat=chat).to(place)
    arguments: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        arguments = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    output = hf_specdec.generate(
        target,
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        strategy=drafter,
        assistant_model=draft,
        seed=seed,
        verification=verification.value,
        lossless=lossless,
        streamer=None if as_json else ConsoleStreamer(tokenizer, output_console()),
        return_dict_in_generate=True,
        **arguments,
    )
    assert isinstance(output, SpeculativeOutput)
    assert output.speculation is not None
    tokens = output.sequences[0, input_ids.shape[1] :].tolist()
    if as_json:
        print_json(
            {
                "model": model,
                "strategy": strategy,
                "prompt": prompt,
                "prompt_tokens": input_ids.shape[1],
                "text": tokenizer.decode(tokens, skip_special_tokens=True),
                "token_ids": tokens,
                "stats": output.speculation.to_dict(),
            }
        )
        return
    message_console().print(Text(_stats_line(output.speculation), style="dim"))


def _stats_line(stats: SpeculationStats) -> str:
    seconds = stats.seconds_draft + stats.seconds_verify + stats.seconds_rest
    line = (
        f"{stats.emitted} tokens in {seconds:.2f} s, {stats.tokens_per_forward:.2f} tokens per forward, "
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted"
    )
    return line if stats.lossless else f"{line}; NOT lossless: {stats.verification} acceptance"
