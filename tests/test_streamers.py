"""Streamers get what stock `generate` gives them, token by token, and one end."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import texts
from hf_specdec import ArgumentError, Speculation, generate
from strategies import STRATEGIES, oracle

PROMPT = texts.prompt(9)


class Recorder(BaseStreamer):
    """Writes down everything."""

    def __init__(self) -> None:
        self.events: list[list[int] | str] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(value.tolist())

    def end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_calls_as_stock_generate(
    target: PreTrainedModel, draft: PreTrainedModel, strategy: str, stops: bool
) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 16}
    if stops:
        settings["eos_token_id"] = int(texts.greedy(target, **settings)[0, -6])
    stock, ours = Recorder(), Recorder()
    text = texts.greedy(target, streamer=stock, **settings)

    arguments = STRATEGIES[strategy](draft, text.tolist())
    generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, streamer=ours, **arguments)

    assert ours.events == stock.events


@pytest.mark.parametrize("strategy", ["tree", "scripted"])
def test_a_batch_is_streamed_in_columns(target: PreTrainedModel, draft: PreTrainedModel, strategy: str) -> None:
    """A streamer that takes batches, as stock generate serves it: rows in step, padding behind finished ones."""
    batch = texts.padded([9, 4, 6])
    eos = int(texts.greedy(target, **batch, max_new_tokens=5)[0, -1])
    stock, ours = Recorder(), Recorder()
    text = texts.greedy(target, **batch, max_new_tokens=12, eos_token_id=eos, streamer=stock)

    arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, text))
    generate(
        target,
        **batch,
        max_new_tokens=12,
        eos_token_id=eos,
        do_sample=False,
        pad_token_id=texts.PAD,
        streamer=ours,
        **arguments,
    )

    assert ours.events == stock.events


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(
    target: PreTrainedModel,
    letters: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    skip_prompt: bool,
) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 16}
    text = texts.greedy(target, streamer=TextStreamer(letters, skip_prompt=skip_prompt), **settings)
    expected = capsys.readouterr().out
    assert letters.decode(text[0, 9:]) in expected

    streamer = TextStreamer(letters, skip_prompt=skip_prompt)
    generate(target, **settings, do_sample=False, streamer=streamer, strategy=oracle(text.tolist()))

    assert capsys.readouterr().out == expected


def test_iterator_streamer_in_a_thread(target: PreTrainedModel, letters: PreTrainedTokenizerFast) -> None:
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 16, "do_sample": False}
    text = texts.greedy(target, **settings)
    streamer = TextIteratorStreamer(letters, skip_prompt=True, timeout=60.0)

    thread = Thread(
        target=generate,
        args=(target,),
        kwargs={**settings, "streamer": streamer, "strategy": oracle(text.tolist())},
    )
    thread.start()
    received = "".join(streamer)
    thread.join()

    assert received == letters.decode(text[0, 9:])


def test_tokens_come_as_they_are_found(target: PreTrainedModel) -> None:
    """Not all at the end: the streamer sees each round's tokens before the next forward."""
    seen_at_forward: list[int] = []
    streamer = Recorder()
    text = texts.greedy(target, **texts.inputs(PROMPT), max_new_tokens=12)
    generate(target, **texts.inputs(PROMPT), max_new_tokens=1, strategy="none")
    handle = target.register_forward_pre_hook(lambda *args: seen_at_forward.append(len(streamer.events)))

    generate(
        target,
        **texts.inputs(PROMPT),
        max_new_tokens=12,
        do_sample=False,
        streamer=streamer,
        strategy=oracle(text.tolist()),
    )

    handle.remove()
    assert seen_at_forward == [1, 2, 8]  # the prompt was put; then the token after it; then six tokens a round


def test_streamer_of_the_bare_form(target: PreTrainedModel) -> None:
    """Without `enable` the streamer is given twice: to stock generate for the prompt, to the loop for the rest."""
    settings = {**texts.inputs(PROMPT), "max_new_tokens": 8, "do_sample": False}
    stock, ours = Recorder(), Recorder()
    texts.greedy(target, **settings, streamer=stock)

    target.generate(**settings, streamer=ours, custom_generate=Speculation("prompt_lookup", streamer=ours))

    assert ours.events == stock.events


def test_not_a_streamer(target: PreTrainedModel) -> None:
    with pytest.raises(ArgumentError, match="streamer must be a transformers streamer, not list"):
        generate(target, PROMPT, max_new_tokens=4, strategy="none", streamer=[])
