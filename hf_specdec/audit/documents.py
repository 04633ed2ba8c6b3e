"""The documents that every arm continues: questions of Spec-Bench or GSM8K, or bare prompts, from JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_specdec.bench import encode_prompt
from hf_specdec.bench.prompts import MT_BENCH_CATEGORIES, json_lines
from hf_specdec.checks import require_whole
from hf_specdec.errors import ArgumentError


@dataclass(frozen=True)
class Document:
    """One prompt.

    Attributes:
        task: what it belongs to.
        document_id: its name within the run.
        text: what the user says.
        answer: the right number, for documents that are marked.
    """

    task: str
    document_id: str
    text: str
    answer: str | None = None


def read_documents(path: Path, count: int | None = None, *, name: str | None = None) -> list[Document]:
    """Read a file of JSON lines and take `count` documents, the same number of each task as far as possible.

    A line holds `question_id`, `category` and `turns` (Spec-Bench), `question` and `answer` (GSM8K), or `prompt`.
    Documents are named after the file, or by `name`, with their question's id or the number of the line.

    Raises:
        ArgumentError: no such file, no UTF-8, a line of another kind, two documents with one name, a count below 1, or
            fewer documents than that.
    """
    if count is not None:
        require_whole(count=count)
    documents: dict[str, Document] = {}
    for number, line in json_lines(path):
        try:
            document = _document(json.loads(line), name or path.stem, number)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ArgumentError(
                f"{path.name}, line {number}: expected a JSON object with question_id, category and turns, with "
                f"question and answer, or with prompt ({type(error).__name__}: {error})"
            ) from error
        if document.document_id in documents:
            raise ArgumentError(f"{path.name}, line {number}: {document.document_id} is taken; give it another id")
        documents[document.document_id] = document
    if count is not None and count > len(documents):
        raise ArgumentError(f"{path.name} holds {len(documents)} documents, not {count}")
    return list(_in_turn(list(documents.values()), len(documents) if count is None else count))


def read_all_documents(sources: Sequence[str]) -> list[Document]:
    """Documents of several files, each written `path` or `path:count`.

    Files of one name in different folders are told apart by their folders.

    Raises:
        ArgumentError: see `read_documents`; also for a count that is not a number, no files, or one file twice.
    """
    if not sources:
        raise ArgumentError("name at least one file of documents")
    files = [_path_and_count(source) for source in sources]
    stems, parents = Counter(path.stem for path, _ in files), Counter(_with_folder(path) for path, _ in files)
    documents: list[Document] = []
    for path, count in files:
        if parents[_with_folder(path)] > 1:
            raise ArgumentError(f"{_with_folder(path)} is given twice: name each file once, and each differently")
        documents += read_documents(path, count, name=path.stem if stems[path.stem] == 1 else _with_folder(path))
    return documents


def _path_and_count(source: str) -> tuple[Path, int | None]:
    path, colon, count = source.rpartition(":")
    if not colon or Path(source).is_file():
        return Path(source), None
    if count.isdecimal() and int(count) > 0:
        return Path(path), int(count)
    raise ArgumentError(f"{source!r}: behind the colon stands the number of documents, such as {path}:50")


def _with_folder(path: Path) -> str:
    return f"{path.absolute().parent.name}/{path.stem}"


@dataclass(frozen=True)
class Encoded:
    """A document and its token ids, int64 `[1, length]`."""

    document: Document
    input_ids: Tensor

    @property
    def key(self) -> str:
        """A short name for exactly this document under exactly this tokenizer."""
        digest = hashlib.sha256(repr((self.document, self.input_ids.tolist())).encode()).hexdigest()
        return f"{self.document.document_id}, {digest[:12]}"


def encode_documents(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    max_prompt_tokens: int | None = None,
) -> list[Encoded]:
    """Token ids of all documents; longer prompts than `max_prompt_tokens` keep their last tokens.

    Raises:
        ArgumentError: no documents, an empty one, two with one name, or less than one token of each.
    """
    if max_prompt_tokens is not None:
        require_whole(max_prompt_tokens=max_prompt_tokens)
    if not documents:
        raise ArgumentError("the audit needs at least one document")
    encoded = []
    for document in documents:
        ids = encode_prompt(tokenizer, document.text, chat=chat)
        if ids.shape[1] == 0:
            raise ArgumentError(f"document {document.document_id} is empty")
        encoded.append(Encoded(document, ids[:, -max_prompt_tokens:] if max_prompt_tokens else ids))
    names = [document.document_id for document in documents]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"two documents are called {twice!r}: give each a document_id of its own")
    return encoded


def mixed(documents: Sequence[Encoded]) -> list[Encoded]:
    """The tasks spread out, so that the first documents hold each task in the proportion in which all do."""
    by_task: dict[str, list[Encoded]] = defaultdict(list)
    for one in documents:
        by_task[one.document.task].append(one)
    places = [((i + 0.5) / len(kept), one) for kept in by_task.values() for i, one in enumerate(kept)]
    return [one for _, one in sorted(places, key=lambda place: place[0])]


def _document(record: dict[str, Any], source: str, number: int) -> Document:
    if "turns" in record:
        category = record["category"]
        task = "mt_bench" if category in MT_BENCH_CATEGORIES else category
        return Document(task, f"{source}/{record['question_id']}", _text(record["turns"][0]))
    name = f"{source}/{number}"
    if "question" in record:
        return Document(source, name, _text(record["question"]), _text(record["answer"]).rpartition("####")[2].strip())
    return Document(source, name, _text(record["prompt"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a text: {value!r}")
    value.encode()  # half a surrogate pair is no text either
    return value


def _in_turn(documents: Sequence[Document], count: int) -> Iterator[Document]:
    """One document of each task, then the next of each, in file order."""
    by_task: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_task[document.task].append(document)
    rounds = max((len(kept) for kept in by_task.values()), default=0)
    chosen = [kept[i] for i in range(rounds) for kept in by_task.values() if i < len(kept)]
    yield from chosen[:count]
