"""The strategies that every exactness test runs. A new strategy joins by one line in `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

import zoo
from hf_specdec import (
    Assisted,
    Auto,
    DraftContext,
    EarlyExit,
    Jacobi,
    Lookahead,
    Medusa,
    PromptLookup,
    Recycling,
    Scripted,
    Suffix,
    SuffixStore,
    Tree,
)

Build = Callable[[PreTrainedModel, Sequence[Sequence[int]]], dict[str, Any]]

# From a draft model and the texts that stock generate gave (prompt included, padding not) to arguments of generate.
STRATEGIES: dict[str, Build] = {
    "none": lambda draft, texts: {"strategy": "none"},
    "prompt_lookup": lambda draft, texts: {"strategy": PromptLookup(max_ngram=2, nodes=16)},
    "assisted": lambda draft, texts: {"strategy": Assisted(), "assistant_model": draft, "num_assistant_tokens": 5},
    "assisted_unsure": lambda draft, texts: {
        "strategy": "assisted",
        "assistant_model": draft,
        "assistant_confidence_threshold": 0.4,
    },
    "tree": lambda draft, texts: {
        "strategy": Tree(nodes=20, depth=5, min_gain=0.0, min_score=0.0),
        "assistant_model": draft,
    },
    "early_exit": lambda draft, texts: {"strategy": EarlyExit(exit_layer=1, adaptive=False)},
    "layer_set": lambda draft, texts: {"strategy": EarlyExit(layers=(0,), adaptive=False)},
    "jacobi": lambda draft, texts: {"strategy": Jacobi(block=5)},
    "lookahead": lambda draft, texts: {"strategy": Lookahead(window=4, ngram=3, guesses=4)},
    "suffix": lambda draft, texts: {"strategy": Suffix(nodes=16, node_cost=0)},
    "suffix_store": lambda draft, texts: {"strategy": Suffix(store=nearly(texts), node_cost=0)},
    "recycling": lambda draft, texts: {"strategy": Recycling(nodes=16, node_cost=0)},
    "auto": lambda draft, texts: {
        "strategy": Auto(parts=[Suffix(store=nearly(texts)), Recycling()], nodes=20, node_cost=0)
    },
    "medusa": lambda draft, texts: {"strategy": Medusa(heads=zoo.make_heads(draft), nodes=16, node_cost=0)},
    "medusa_tree": lambda draft, texts: {
        "strategy": Medusa(
            heads=zoo.make_heads(draft, token_map=torch.arange(2, zoo.VOCAB_SIZE - 5, 2)),
            tree=[(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 2, 0)],
        )
    },
    "auto_heads": lambda draft, texts: {"strategy": Auto(nodes=20, node_cost=0).with_heads(zoo.make_heads(draft))},
    "auto_measured": lambda draft, texts: {"strategy": "auto"},
    "scripted": lambda draft, texts: {"strategy": mostly_right(texts)},
}


def nearly(texts: Sequence[Sequence[int]]) -> SuffixStore:
    """A store that knows the texts, but for every seventh token."""
    store = SuffixStore(learn=False)  # rejection sampling gives another text after it has learned
    for text in texts:
        store.add([(token + (i % 7 == 0)) % zoo.VOCAB_SIZE for i, token in enumerate(text)])
    return store


def mostly_right(texts: Sequence[Sequence[int]], depth: int = 5) -> Scripted:
    """Guesses three branches a row: two know the text and spoil 40 % of its tokens, each others; one is nonsense."""

    def spoiled(text: Sequence[int], start: int, salt: int) -> list[int]:
        guess = text[start : start + depth]
        return [
            token if (7 * (start + i) + 3 * salt) % 10 < 6 else (token + 1 + salt) % zoo.VOCAB_SIZE
            for i, token in enumerate(guess)
        ]

    def script(context: DraftContext) -> list[list[list[int]]]:
        rows = []
        for known, text in zip(context.texts, texts, strict=True):
            start = len(known)
            nonsense = [(token * 31 + start) % zoo.VOCAB_SIZE for token in known[-depth:]]
            rows.append([spoiled(text, start, 0), nonsense, spoiled(text, start, 1)])
        return rows

    return Scripted(script)


def oracle(texts: Sequence[Sequence[int]], depth: int = 5) -> Scripted:
    """Guesses a chain that is always right."""
    return Scripted(
        lambda context: [
            [list(text[len(known) : len(known) + depth])] for known, text in zip(context.texts, texts, strict=True)
        ],
        chains_only=True,
    )
