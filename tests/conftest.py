from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import hf_specdec
import zoo
from tiny_folder import tiny_model_folder as tiny_model_folder
from tiny_folder import tiny_tokenizer as tiny_tokenizer

# Workers share the cores, and one thread sums in the same order everywhere.
torch.set_num_threads(1)
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    """A tiny Llama without EOS, not enabled. Tests that change a model make their own."""
    return zoo.make("llama")


@pytest.fixture(scope="session")
def draft(target: PreTrainedModel) -> PreTrainedModel:
    """A draft that agrees with the target about every second time and never stops for lack of confidence."""
    return zoo.make_draft(target)


@pytest.fixture
def enabled(target: PreTrainedModel) -> PreTrainedModel:
    """The target with `strategy=`, for one test."""
    with hf_specdec.enabled(target):
        yield target


@pytest.fixture(scope="session")
def letters() -> PreTrainedTokenizerFast:
    """Ids 0 to 77 are one to three letters of "abcdef", so strings stop inside tokens and across them."""
    alphabet = "abcdef"
    pairs = [(a, b) for a in alphabet for b in alphabet]
    triples = [(a + b, a) for a, b in pairs]
    words = [*alphabet, *(a + b for a, b in pairs), *(a + b for a, b in triples)]
    words += [f"<{index}>" for index in range(len(words), zoo.VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [*pairs, *triples], unk_token="<96>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<96>", pad_token="<95>")
