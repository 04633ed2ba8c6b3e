"""The prompts of the training data: a mixture of a collection's sources, and kinds of prompts that it lacks.

Heads and drafts learn what the target says after prompts like those that they see in training, so the mixture decides.
README.md beside this file has the commands in their order.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

SUBJECTS = (
    "the ocean,volcanoes,the history of bread,football,chess,the moon,bees,trains,opera,vaccines,"
    "the Roman Empire,jazz,mountains,the weather,cats,the internet,coffee,dinosaurs,architecture,the human heart,"
    "forests,money,film directors,bicycles,the Olympic Games,painters,elections,rivers of Europe,space travel,"
    "robots,school,cooking,the Middle Ages,electricity,novels,islands,birds,aeroplanes,law,hospitals,"
    "winter sports,television series,gardens,computers,wine,deserts,the stock market,fashion,whales,"
    "the printing press"
).split(",")
REQUESTS = {
    "german": ("Schreibe vier deutsche Sätze über {}.", "Write a short newspaper report in German about {}."),
    "questions": (
        "Write eight short trivia questions about {}.",
        "Who, where, when: ask ten quiz questions about {}.",
    ),
    "news": ("Write a news article of three paragraphs about {}.", "Write a detailed encyclopedia entry about {}."),
}
# What people ask an assistant for, as often as possible with different subjects.
STYLES = (
    "Write a blog post about {}.",
    "Explain {} to a child.",
    "What are the advantages and disadvantages of {}?",
    "Write a short story in which {} plays a part.",
    "List ten facts about {}.",
    "Write an email that invites colleagues to a talk about {}.",
    "Imagine you are a teacher. Answer a pupil's question about {}.",
    "Compare two opinions about {} and say which is better founded.",
    "Give step by step instructions for a beginner who is interested in {}.",
    "Summarize what is known about {} in three sentences.",
    "Write a Python function that has something to do with {}, and explain it.",
    "What would happen if {} did not exist?",
    "Write a product description for a book about {}.",
    "Who are the most important people in connection with {}?",
    "Write a dialogue between two friends about {}.",
    "Make a table of terms about {} and what they mean.",
    "How has {} changed over the last hundred years?",
    "Write a poem about {}.",
    "Which questions about {} are still open in science?",
    "Draft a speech of two minutes about {}.",
)
# Kinds of sentences to translate, questions to answer and articles to summarise that are taken at most.
LIMIT = 250
FILE = Annotated[Path, typer.Option(help="File of prompts to write.")]

app = typer.Typer(help="Prompts for training data.", add_completion=False)


@app.command()
def mixture(
    prompts: Annotated[Path, typer.Argument(help="File of prompts with their sources.")],
    output: FILE,
    most: Annotated[int, typer.Option(min=1, help="Prompts of one source at most.")] = 1000,
) -> None:
    """A collection in which no source outweighs all others."""
    by_source: dict[str, list[dict[str, Any]]] = {}
    for line in prompts.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        by_source.setdefault(record["source"], []).append(record)
    chosen = random.Random(0)
    _write(output, [one for records in by_source.values() for one in chosen.sample(records, min(most, len(records)))])


@app.command()
def topics(output: FILE) -> None:
    """Requests for texts, to be answered by the target."""
    records = [
        {"prompt": request.format(subject), "kind": kind}
        for kind, requests in REQUESTS.items()
        for request, subject in product(requests, SUBJECTS)
    ]
    _write(output, records)


@app.command()
def requests(output: FILE, count: Annotated[int, typer.Option(min=1, help="Prompts.")] = 1000) -> None:
    """Everyday requests."""
    pairs = random.Random(1).sample(list(product(STYLES, SUBJECTS)), count)
    _write(output, [{"prompt": style.format(subject), "kind": "request"} for style, subject in pairs])


@app.command()
def tasks(answers: Annotated[list[Path], typer.Argument(help="Files of answers.")], output: FILE) -> None:
    """Translations, questions and summaries about the answers."""
    texts = [json.loads(line)["answer"] for path in answers for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = random.Random(0)
    records: list[dict[str, Any]] = []
    for kind, template, find in (
        ("translation", "Translate German to English: {}", _german_sentences),
        ("question", "{}", _questions),
        ("summary", "Summarize: {}", _articles),
    ):
        found = sorted({piece for text in texts for piece in find(text)})
        picked = chosen.sample(found, min(LIMIT, len(found)))
        records += [{"prompt": template.format(piece), "kind": kind} for piece in picked]
    _write(output, records)


def _german_sentences(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        if 40 < len(sentence) < 220 and len(re.findall(r"\b(der|die|das|und|ist|ein|eine|im|von)\b", sentence)) > 2:
            yield sentence.strip()


def _questions(text: str) -> Iterator[str]:
    for line in text.splitlines():
        found = re.fullmatch(r"\W*\d*\W*((?:Who|What|When|Where|Which|How)\b[^?]{12,110}\?)", line.strip())
        if found:
            yield found[1]


def _articles(text: str) -> Iterator[str]:
    if len(text) > 600 and not re.search(r"\b(der|die|und)\b", text):
        yield text.strip()


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} prompts in {path}")  # noqa: T201


if __name__ == "__main__":
    app()
