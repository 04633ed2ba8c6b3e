"""Texts to train on, as token ids: data sets with prompts and answers, conversations or bare texts."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_specdec.checks import is_finite
from hf_specdec.errors import ArgumentError
from hf_specdec.training.records import Record, read_records

_LOGGER = logging.getLogger(__name__)

COLUMNS = "prompt_ids and answer_ids, prompt and answer, messages, or text"


@dataclass(frozen=True)
class Example:
    """A tokenised text.

    Attributes:
        input_ids: all of it.
        num_prompt: how many tokens stand before those that are learned; 0 for a text without a prompt.
    """

    input_ids: list[int]
    num_prompt: int

    @property
    def num_learned(self) -> int:
        """Number of tokens that are predicted in training; the first of a text has nothing before it."""
        return len(self.input_ids) - max(self.num_prompt, 1)


def read_examples(
    data: str | Path | Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    max_length: int | None = None,
    chat: bool | None = None,
    limit: int | None = None,
) -> list[Example]:
    """Read a data set (see `read_records`) whose rows hold one of the following.

    - `prompt_ids` and `answer_ids`, as `hf-specdec make-data` writes them: taken as they are.
    - `prompt` (a text, or chat messages) and `answer`: with a chat template, the answer is the assistant's turn, up to
      its EOS token; without one it follows the prompt's tokens, with the EOS token behind it.
    - `messages`: a conversation. What the assistant says last is the answer; what follows it is left out.
    - `text`: all of it is learned; longer ones than `max_length` are cut into several.

    Args:
        data: file, folder, name of a data set on the hub, or rows.
        tokenizer: the target's; not needed for rows with ids.
        max_length: longer examples lose their end; those whose prompt alone is as long are left out.
        chat: use the tokenizer's chat template for prompts; None does so where there is one.
        limit: read no more rows than this.

    Raises:
        ArgumentError: nothing to read, a row of another kind (named by file and line), a chat template that does not
            show where the answer begins, or no example that fits.
    """
    if max_length is not None and max_length < 2:
        raise ArgumentError(f"max_length={max_length!r} must be at least 2")
    encoder = _Encoder(tokenizer, chat, max_length)
    encoded = [example for record in read_records(data, limit) for example in encoder.encode(record)]
    if max_length is not None:
        encoded = [Example(one.input_ids[:max_length], one.num_prompt) for one in encoded]
    kept = [one for one in encoded if one.num_learned > 0]
    if not kept:
        raise ArgumentError(
            "no example has a token to learn"
            + ("" if max_length is None else f" within max_length={max_length}: use a larger one, or other data")
        )
    if len(kept) < len(encoded):
        _LOGGER.warning(
            "%d of %d examples are left out: no token to learn within %s tokens",
            len(encoded) - len(kept),
            len(encoded),
            max_length,
        )
    return kept


def split_examples(examples: Sequence[Example], held_out: float, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Divide into examples to train on and examples held out.

    Examples with the same prompt fall on the same side. Which side depends on the prompt and the seed alone as far
    as possible, so most stay where they are when the data grow.

    Args:
        examples: at least two, with different prompts.
        held_out: share of the held-out examples, between 0 and 1; at least one is held out.
        seed: another seed, another choice.

    Raises:
        ArgumentError: a share that is none, or nothing left to train on.
    """
    if not is_finite(held_out) or not 0 < held_out < 1:
        raise ArgumentError(f"held_out={held_out!r} must be a share between 0 and 1, such as 0.05")
    groups: dict[bytes, list[int]] = {}
    for index, one in enumerate(examples):
        groups.setdefault(_split_key(one, seed), []).append(index)
    wanted = max(math.floor(held_out * len(examples)), 1)
    chosen: set[int] = set()
    for key in sorted(groups):
        if len(chosen) >= wanted:
            break
        chosen.update(groups[key])
    if len(chosen) == len(examples):
        raise ArgumentError(
            f"{len(examples)} examples with {len(groups)} different prompts cannot be divided; more data are needed"
        )
    return (
        [one for index, one in enumerate(examples) if index not in chosen],
        [examples[index] for index in sorted(chosen)],
    )


def prompt_messages(record: Record) -> str | list[dict[str, Any]] | None:
    """What a row asks: a text, or the messages before the assistant's last; None if it asks nothing.

    Raises:
        ArgumentError: a column with something else in it.
    """
    if record.get("prompt") is not None:
        prompt = record["prompt"]
        return prompt if isinstance(prompt, str) else _messages(record, "prompt")
    if record.get("messages") is not None:
        messages = _messages(record, "messages")
        last = _last_answer(messages)
        return messages if last is None else messages[:last]
    return None


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], record: Record, *, answer_follows: bool
) -> list[int]:
    """Token ids of messages in the tokenizer's chat template.

    Raises:
        ArgumentError: there is no template, or it does not take these messages.
    """
    if tokenizer.chat_template is None:
        raise ArgumentError(
            f"{record.where}: chat messages need a tokenizer with a chat template; this one has none, so give prompt "
            "and answer as texts"
        )
    try:
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=answer_follows, return_dict=False)
    except TemplateError as error:
        raise ArgumentError(f"{record.where}: the chat template refuses these messages: {error}") from error
    return cast("list[int]", tokens)


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether plain prompts go into the chat template.

    Raises:
        ArgumentError: they should, and there is none.
    """
    if chat and tokenizer.chat_template is None:
        raise ArgumentError("the tokenizer has no chat template: pass chat=False (--no-chat)")
    return tokenizer.chat_template is not None if chat is None else chat


@dataclass(frozen=True)
class _Encoder:
    tokenizer: PreTrainedTokenizerBase | None
    chat: bool | None
    max_length: int | None

    def encode(self, record: Record) -> list[Example]:
        if record.get("prompt_ids") is not None and record.get("answer_ids") is not None:
            prompt, answer = (_ids(record, name) for name in ("prompt_ids", "answer_ids"))
            return [Example(prompt + answer, len(prompt))]
        if self.tokenizer is None:
            raise ArgumentError(f"{record.where}: no prompt_ids and answer_ids, so a tokenizer is needed")
        if record.get("messages") is not None:
            messages = _messages(record, "messages")
            last = _last_answer(messages)
            if last is None:
                raise record.error("messages", "holds no message of the assistant; hf-specdec make-data writes some")
            return [self._conversation(self.tokenizer, messages[:last], messages[last], record)]
        if record.get("prompt") is not None:
            return [self._prompt_and_answer(self.tokenizer, record)]
        if record.get("text") is not None:
            return self._pieces(self.tokenizer(record.text("text"))["input_ids"])
        found = ", ".join(sorted(record.values)) or "none"
        raise ArgumentError(f"{record.where}: expected columns {COLUMNS}, found {found}")

    def _prompt_and_answer(self, tokenizer: PreTrainedTokenizerBase, record: Record) -> Example:
        if record.get("answer") is None:
            raise ArgumentError(
                f"{record.where}: a prompt without an answer; let the target write the answers with "
                "hf-specdec make-data, and train on the file that it makes"
            )
        prompt, answer = prompt_messages(record), record.text("answer")
        if isinstance(prompt, str):
            if not uses_chat(tokenizer, self.chat):
                ids: list[int] = tokenizer(prompt)["input_ids"]
                end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
                return Example(ids + tokenizer(answer, add_special_tokens=False)["input_ids"] + end, len(ids))
            prompt = [{"role": "user", "content": prompt}]
        assert prompt is not None
        return self._conversation(tokenizer, prompt, {"role": "assistant", "content": answer}, record)

    def _conversation(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: list[dict[str, Any]],
        answer: dict[str, Any],
        record: Record,
    ) -> Example:
        before = encode_chat(tokenizer, prompt, record, answer_follows=True)
        whole = encode_chat(tokenizer, [*prompt, answer], record, answer_follows=False)
        if whole[: len(before)] != before:
            raise ArgumentError(
                f"{record.where}: the chat template writes a conversation with its answer otherwise than the prompt "
                "of that answer, so it does not show where the answer begins; use a file of hf-specdec make-data, or "
                "chat=False (--no-chat) with prompt and answer as texts"
            )
        # Templates may write a line break behind the end of a turn, where the model has stopped already.
        answer_ids, end = whole[len(before) :], tokenizer.eos_token_id
        while end in answer_ids and answer_ids[-1] != end:
            answer_ids.pop()
        return Example(before + answer_ids, len(before))

    def _pieces(self, ids: list[int]) -> list[Example]:
        step = self.max_length or max(len(ids), 1)
        return [Example(ids[start : start + step], 0) for start in range(0, len(ids), step)]


def _ids(record: Record, column: str) -> list[int]:
    ids = record[column]
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise record.error(column, "must be a list of token ids")
    return ids


def _messages(record: Record, column: str) -> list[dict[str, Any]]:
    messages = record[column]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(
            isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
            for one in messages
        )
    ):
        kind = "a text or a list of chat messages" if column == "prompt" else "a list of chat messages"
        raise record.error(column, f"must be {kind}, each with role and content as texts")
    return messages


def _last_answer(messages: list[dict[str, Any]]) -> int | None:
    found = [index for index, one in enumerate(messages) if one["role"] == "assistant"]
    return found[-1] if found else None


def _split_key(example: Example, seed: int) -> bytes:
    prompt = example.input_ids[: example.num_prompt or None]
    return hashlib.sha256(repr((seed, prompt)).encode()).digest()
