"""The target's own answers to prompts, written by the engine: what heads and drafts are trained on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.checks import require_not_negative, require_seed, require_whole
from hf_specdec.compat import num_positions
from hf_specdec.drafters import Drafter
from hf_specdec.drafters.settings import eos_tokens
from hf_specdec.enable import generate
from hf_specdec.errors import ArgumentError
from hf_specdec.training.answer_file import AnswerFile
from hf_specdec.training.fingerprints import model_fingerprint
from hf_specdec.training.records import Record, read_records
from hf_specdec.training.texts import encode_chat, prompt_messages, uses_chat

_LOGGER = logging.getLogger(__name__)
_SPECULATING_ROWS = 4  # up to so many rows a forward has room for guesses, on any machine we know
_BATCHES_SORTED_TOGETHER = 32

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True)
class AnswerSettings:
    """What the answers depend on.

    Args:
        max_new_tokens: an answer's length at most, its end token included.
        temperature: 0 takes the likeliest token each time; above it, sample, with nothing else between the model's
            probabilities and the choice.
        seed: of sampling. Each answer has its own seed, made from this one, the prompt and its place in the data, so
            it depends neither on the batch nor on where a run was stopped.

    Raises:
        ArgumentError: a number out of range.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_whole(max_new_tokens=self.max_new_tokens)
        require_not_negative(temperature=self.temperature)
        require_seed(seed=self.seed)

    def seed_of(self, prompt: Prompt) -> int:
        """The seed of one answer."""
        digest = hashlib.sha256(json.dumps([self.seed, prompt.index, prompt.input_ids]).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def arguments(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Arguments of `generate` for a batch."""
        if self.temperature == 0:
            return {"do_sample": False}
        seeds = [self.seed_of(one) for one in prompts]
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0, "seed": seeds}


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: its place in the data, from 0.
        content: a text, or chat messages.
        input_ids: as the target gets it.
        source: the other columns of its row.
    """

    index: int
    content: str | list[dict[str, Any]]
    input_ids: list[int]
    source: dict[str, Any]


@dataclass(frozen=True)
class AnswerCounts:
    """What `make_answers` did.

    Attributes:
        num_answers: prompts of the data with an answer in the file.
        num_new: of these, written by this call.
        num_new_tokens: tokens of the new ones.
        num_left_out: prompts that are too long.
    """

    num_answers: int
    num_new: int
    num_new_tokens: int
    num_left_out: int


def make_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str | Path | Iterable[dict[str, Any]],
    output: str | Path,
    settings: AnswerSettings | None = None,
    *,
    strategy: str | Drafter | None = None,
    batch_size: int = 8,
    chat: bool | None = None,
    limit: int | None = None,
    max_prompt_tokens: int | None = None,
    progress: Progress = lambda done, total, tokens: None,
) -> AnswerCounts:
    """Let the target answer prompts, and write its answers into a file of JSON lines.

    A line holds `index`, `prompt`, `answer`, `prompt_ids`, `answer_ids` (with the end token, if the answer ended by
    itself) and `source`, the other columns of the prompt's row if it has any. Lines stand in the order in which
    answers were finished. What else the answers depend on stands in a second file, `<output>.settings`.

    A run that was stopped, in whatever way, goes on where it was when it is called again; so does one with more data
    behind the old ones.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        data: rows with `prompt`, `messages` (all before the assistant's last) or `text`; see `read_records`.
        output: the file.
        settings: what answers depend on.
        strategy: how to generate; changes no answer. By default "auto" for up to 4 rows, and plain decoding above:
            many rows make use of the machine without guesses, and each guess would take a place from another row.
        batch_size: rows of a batch.
        chat: put prompts into the tokenizer's chat template; None does so where there is one. Messages always are.
        limit: take the first rows of the data only.
        max_prompt_tokens: longer prompts are left out, as are those that leave no room for an answer.
        progress: told how many prompts have answers, how many there are, and the tokens generated by this call.

    Raises:
        ArgumentError: data that hold no prompts, or a file made from another model, other settings or other prompts.
    """
    settings = AnswerSettings() if settings is None else settings
    require_whole(batch_size=batch_size)
    if strategy is None:
        strategy = "auto" if batch_size <= _SPECULATING_ROWS else "none"
    everything = read_prompts(data, tokenizer, chat=chat, limit=limit)
    room = _room(model, settings, max_prompt_tokens)
    prompts = [one for one in everything if len(one.input_ids) <= room]
    if not prompts:
        raise ArgumentError(f"none of {len(everything)} prompts has at most {room} tokens")
    if len(prompts) < len(everything):
        _LOGGER.warning(
            "%d of %d prompts are left out: more than %d tokens", len(everything) - len(prompts), len(everything), room
        )
    file = AnswerFile(Path(output), {**_identity(model), **asdict(settings)})
    done = file.open_for({one.index: one.input_ids for one in prompts})
    missing = [one for one in prompts if one.index not in done]
    num_done, num_tokens = len(prompts) - len(missing), 0
    progress(num_done, len(prompts), 0)
    for batch in _batches(missing, batch_size):
        answers = _answer(model, batch, settings, strategy)
        file.append(_line(one, answer, tokenizer) for one, answer in zip(batch, answers, strict=True))
        num_done += len(batch)
        num_tokens += sum(map(len, answers))
        progress(num_done, len(prompts), num_tokens)
    return AnswerCounts(num_done, len(missing), num_tokens, len(everything) - len(prompts))


def read_prompts(
    data: str | Path | Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """The prompts of a data set, with their token ids.

    Raises:
        ArgumentError: a row without a prompt, an empty one, or one that the chat template refuses.
    """
    in_template = uses_chat(tokenizer, chat)
    return [_prompt(record, index, tokenizer, in_template) for index, record in enumerate(read_records(data, limit))]


def _prompt(record: Record, index: int, tokenizer: PreTrainedTokenizerBase, in_template: bool) -> Prompt:
    content, column = prompt_messages(record), "prompt" if record.get("prompt") is not None else "messages"
    if content is None and record.get("text") is not None:
        content, column = record.text("text"), "text"
    if content is None:
        found = ", ".join(sorted(record.values)) or "none"
        raise ArgumentError(f"{record.where}: expected a column prompt, messages or text, found {found}")
    if not content or (isinstance(content, str) and not content.strip()):
        raise record.error(column, "holds no prompt")
    if isinstance(content, list):
        ids = encode_chat(tokenizer, content, record, answer_follows=True)
    elif in_template:
        ids = encode_chat(tokenizer, [{"role": "user", "content": content}], record, answer_follows=True)
    else:
        ids = tokenizer(content)["input_ids"]
    source = {name: value for name, value in record.values.items() if name != column}
    return Prompt(index, content, ids, source)


def _room(model: PreTrainedModel, settings: AnswerSettings, max_prompt_tokens: int | None) -> int:
    if max_prompt_tokens is not None:
        require_whole(max_prompt_tokens=max_prompt_tokens)
    positions = num_positions(model)
    if positions is None:
        return 2**62 if max_prompt_tokens is None else max_prompt_tokens
    room = positions - settings.max_new_tokens
    if room < 1:
        raise ArgumentError(
            f"max_new_tokens={settings.max_new_tokens} leaves no room for a prompt: the model takes {positions} tokens"
        )
    return room if max_prompt_tokens is None else min(room, max_prompt_tokens)


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    generation = model.generation_config.to_diff_dict()
    return {
        "model": model_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "generation_config": {
            name: value for name, value in sorted(generation.items()) if name not in _NOT_THE_ANSWERS
        },
    }


_NOT_THE_ANSWERS = frozenset({"_from_model_config", "transformers_version", "max_new_tokens", "max_length"})


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Prompts of similar lengths together, as far as they stand near each other in the data."""
    window = batch_size * _BATCHES_SORTED_TOGETHER
    for start in range(0, len(prompts), window):
        near = sorted(prompts[start : start + window], key=lambda one: -len(one.input_ids))
        for first in range(0, len(near), batch_size):
            yield near[first : first + batch_size]


def _answer(
    model: PreTrainedModel, prompts: Sequence[Prompt], settings: AnswerSettings, strategy: str | Drafter
) -> list[list[int]]:
    ends = eos_tokens(model.generation_config)
    padding = model.generation_config.pad_token_id
    input_ids, mask = _left_pad(
        [one.input_ids for one in prompts], min(ends, default=0) if padding is None else padding
    )
    sequences = generate(
        model,
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=settings.max_new_tokens,
        strategy=strategy,
        **settings.arguments(prompts),
    )
    assert isinstance(sequences, Tensor)
    return [_until_end(row, ends) for row in sequences[:, input_ids.shape[1] :].tolist()]


def _left_pad(texts: list[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, texts))
    input_ids = torch.tensor([[padding] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    return input_ids, mask


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def _line(prompt: Prompt, answer: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    line = {
        "index": prompt.index,
        "prompt": prompt.content,
        "answer": tokenizer.decode(answer, skip_special_tokens=True),
        "prompt_ids": prompt.input_ids,
        "answer_ids": answer,
    }
    return line | {"source": prompt.source} if prompt.source else line
