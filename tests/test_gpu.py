"""The same exactness on a CUDA device, where kernels, devices and dtypes differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StaticCache

import texts
import zoo
from hf_specdec import Tree, generate
from hf_specdec.noise import gumbel
from strategies import STRATEGIES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    """No TF32: a block of rows and a single row must round alike as far as float32 can."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() for name, value in batch.items()}


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_exactness(family: str, strategy: str, sampling: bool) -> None:
    target = zoo.make(family).cuda()
    draft = zoo.make_draft(target).cuda()
    for lengths in ((9,), (9, 4, 13)):
        batch = texts.padded(lengths)
        settings = {**on_device(batch), "max_new_tokens": 20}
        if sampling:
            expected = texts.sampled(target, **texts.SAMPLING, **settings)
            mode = {"do_sample": True, "seed": texts.SEED, **texts.SAMPLING}
        else:
            expected = texts.greedy(target, **settings)
            mode = {"do_sample": False}

        arguments = STRATEGIES[strategy](draft, texts.rows_without_padding(batch, expected.cpu()))
        ours = generate(target, **settings, **mode, pad_token_id=texts.PAD, **arguments)

        assert ours.is_cuda
        assert ours.tolist() == expected.tolist()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits(dtype: torch.dtype, attention: str) -> None:
    """Where the texts part, the two tokens were a near-tie; nothing else may part them."""
    target = zoo.make("llama", attention=attention).cuda().to(dtype)
    draft = zoo.make_draft(target).cuda()
    settings = {**on_device(texts.inputs(texts.prompt(9))), "max_new_tokens": 40}
    expected = texts.greedy(target, **settings)[0].tolist()

    ours = generate(target, **settings, do_sample=False, strategy=Tree(), assistant_model=draft)[0].tolist()

    parted = next((i for i, pair in enumerate(zip(ours, expected, strict=True)) if pair[0] != pair[1]), None)
    if parted is not None:
        with torch.no_grad():
            logits = target(torch.tensor([expected[:parted]], device="cuda")).logits[0, -1].float()
        gap = abs(float(logits[ours[parted]] - logits[expected[parted]]))
        assert gap < 0.05 * float(logits.std())


def test_noise_does_not_depend_on_the_device() -> None:
    on_cpu = gumbel(5, 1, 2, 50_000)
    on_gpu = gumbel(5, 1, 2, 50_000, "cuda").cpu()

    torch.testing.assert_close(on_cpu, on_gpu, atol=1e-12, rtol=1e-12)


def test_a_draft_on_another_device() -> None:
    target = zoo.make("llama").cuda()
    draft = zoo.make_draft(zoo.make("llama"))
    settings = {**on_device(texts.padded([9, 4])), "max_new_tokens": 20}
    expected = texts.greedy(target, **settings)

    for strategy in ("assisted", "tree"):
        arguments = STRATEGIES[strategy](draft, [])
        ours = generate(target, **settings, do_sample=False, pad_token_id=texts.PAD, **arguments)
        assert ours.tolist() == expected.tolist()


def test_rejection_sampling_on_the_device() -> None:
    target = zoo.make("llama").cuda()
    draft = zoo.make_draft(target).cuda()
    settings = {**on_device(texts.padded([9, 4])), "max_new_tokens": 20, "do_sample": True, "seed": 3}

    runs = [
        generate(target, **settings, verification="rejection", strategy="assisted", assistant_model=draft).tolist()
        for _ in range(2)
    ]

    assert runs[0] == runs[1]


def test_static_cache() -> None:
    """Stock generate compiles its forward for such a cache; its buffers stay where they are."""
    target = zoo.make("llama").cuda()
    settings = {**on_device(texts.inputs(texts.prompt(9))), "max_new_tokens": 12}
    expected = texts.greedy(target, **settings)
    cache = StaticCache(config=target.config, max_cache_len=40)

    ours = generate(target, **settings, do_sample=False, strategy="prompt_lookup", cache=cache)

    assert ours.tolist() == expected.tolist()
    assert int(cache.get_seq_length()) == 20
