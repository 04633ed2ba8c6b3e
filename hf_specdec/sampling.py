"""Where randomness enters: keyed noise for choosing and ranking tokens, and the same noise for stock `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdec.errors import ArgumentError, NonFiniteLogitsError
from hf_specdec.noise import gumbel

Seed = int | Sequence[int]

_MAX_KEPT_NOISE = 32  # positions; 8 bytes a token of the vocabulary each


def row_seeds(seed: Seed, batch_size: int) -> list[tuple[int, int]]:
    """The (seed, row) key of each row: one int serves all rows, a sequence keys every row as row 0 of its own seed.

    Raises:
        ArgumentError: not ints, or not one a row.
    """
    check_seed(seed)
    if not isinstance(seed, Sequence):
        return [(int(seed), row) for row in range(batch_size)]
    if len(seed) != batch_size:
        raise ArgumentError(f"seed has {len(seed)} numbers for {batch_size} rows; pass one int, or one a row")
    return [(int(one), 0) for one in seed]


def check_seed(seed: object) -> None:
    """Check the type of a seed.

    Raises:
        ArgumentError: not an int, nor a sequence of ints.
    """
    ones = seed if isinstance(seed, Sequence) else [seed]
    if isinstance(seed, str) or not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ones):
        raise ArgumentError(
            f"seed must be an int or a sequence of ints, one a row, not {seed!r}; arrays and tensors have .tolist()"
        )


def noise_device(device: torch.device) -> torch.device:
    """Where noise in double precision can be computed: Apple's GPUs have none."""
    return torch.device("cpu") if device.type == "mps" else device


def in_double(scores: Tensor) -> Tensor:
    """The same numbers in float64, on a device that has it."""
    return scores.to(noise_device(scores.device)).double()


class KeyedSampler(LogitsProcessor):
    """Turns stock `generate(do_sample=False)` into sampling with keyed noise.

    Put it last: it leaves only the token `argmax(log p + g)` possible, where g is Gumbel noise keyed by (seed, row,
    number of tokens generated so far). Stock `generate` then gives the very tokens that hf_specdec gives with the same
    `seed` and the same processors, whatever the strategy.

    Args:
        seed: an int, or one int a row.
        prompt_length: number of columns of `input_ids` at the start of the call; by default taken from the first
            call, so use one object for one `generate`.

    Raises:
        NonFiniteLogitsError: scores from which nothing can be sampled.
    """

    def __init__(self, seed: Seed, prompt_length: int | None = None) -> None:
        check_seed(seed)
        self.seed = seed
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Keep one token possible a row: `input_ids` int64 `[B, length]`, `scores` `[B, V]`."""
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1]
        batch_size = scores.shape[0]
        sampling = Sampling(seeds=row_seeds(self.seed, batch_size))
        step = input_ids.shape[1] - self.prompt_length
        chosen = sampling.choose(range(batch_size), [step] * batch_size, scores)
        kept = torch.full_like(scores, -torch.inf)
        kept[torch.arange(batch_size), chosen] = 0
        return kept


class Children(NamedTuple):
    """Candidates for the token after one node, in the order in which verification must try them."""

    tokens: list[int]
    weights: list[float]
    """How likely the target is to choose each, as far as the draft can tell."""
    confidences: list[float]
    """The draft's own probability of each."""
    probs: Tensor | None
    """The distribution they were drawn from, float64 `[V]`, when they were drawn at random."""


class Sampling:
    """The randomness of one call.

    Args:
        seeds: the (seed, row) key of each row, or None for greedy decoding.
        fresh: a generator when verification uses fresh randomness (rejection sampling); drafts then draw from it too.
    """

    def __init__(self, seeds: list[tuple[int, int]] | None, fresh: torch.Generator | None = None) -> None:
        self.seeds = seeds
        self.fresh = fresh
        self._noise: dict[tuple[int, int], Tensor] = {}  # draft and target ask for the same positions

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.seeds is None

    def choose(self, rows: Sequence[int], steps: Sequence[int], scores: Tensor) -> list[int]:
        """The next token of some rows.

        Args:
            rows: R rows of the batch.
            steps: for each the number of tokens generated before this one.
            scores: processed scores (log probabilities up to a constant), `[R, V]`.

        Raises:
            NonFiniteLogitsError: a row holds NaN or +inf, or allows no token.
        """
        best = self._perturbed(rows, steps, scores).max(dim=-1)
        tokens: list[int] = best.indices.tolist()
        check_finite(best.values.tolist(), steps)
        return tokens

    def draw_children(
        self, rows: Sequence[int], steps: Sequence[int], scores: Tensor, counts: Sequence[int]
    ) -> list[Children]:
        """Candidates below some nodes of a draft tree, from a draft's processed scores.

        Greedy: the most likely tokens. Keyed noise: the k largest of log q + g with the target's own noise, so that
        draft and target agree as often as they can. Fresh randomness: a sample without replacement by an exponential
        race (Kool et al. 2019). A draft whose scores are not finite proposes nothing.

        Args:
            rows: the row of each of R nodes; a row may come more than once.
            steps: for each the number of tokens generated before its children.
            scores: the draft's processed scores, `[R, V]`.
            counts: how many children each node gets at most; tokens that q forbids are never drawn.
        """
        if not rows:
            return []
        perturbed = self._fresh_noise(scores) if self.fresh is not None else self._perturbed(rows, steps, scores)
        top = perturbed.topk(min(max(counts), scores.shape[-1]), dim=-1)
        weights = (top.values - perturbed.logsumexp(-1, keepdim=True)).exp()
        confidences = weights
        if not self.greedy:
            picked = scores.gather(-1, top.indices.to(scores.device))
            confidences = (picked - scores.logsumexp(-1, keepdim=True)).exp()
        columns = (top.indices.tolist(), weights.tolist(), confidences.tolist(), top.values.isfinite().tolist())
        children = []
        for node, (tokens, weight, confidence, finite, count) in enumerate(zip(*columns, counts, strict=True)):
            allowed = min(count, finite.index(False) if False in finite else len(finite))
            probs = None
            if self.fresh is not None and allowed:
                probs = scores[node].to(perturbed.device).double().softmax(-1)
                # At low temperature q underflows to zero: such tokens win the race only when nothing else is left.
                allowed = sum(probs[token] > 0 for token in tokens[:allowed])
            children.append(Children(tokens[:allowed], weight[:allowed], confidence[:allowed], probs))
        return children

    def _perturbed(self, rows: Sequence[int], steps: Sequence[int], scores: Tensor) -> Tensor:
        if self.seeds is None:
            return scores
        device = noise_device(scores.device)
        noise = [self._noise_at(row, step, scores.shape[-1], device) for row, step in zip(rows, steps, strict=True)]
        return torch.stack(noise).add_(scores.to(device))

    def _noise_at(self, row: int, step: int, vocab_size: int, device: torch.device) -> Tensor:
        assert self.seeds is not None
        if (row, step) not in self._noise:
            if len(self._noise) >= _MAX_KEPT_NOISE:
                self._noise.clear()
            self._noise[row, step] = gumbel(*self.seeds[row], step, vocab_size, device)
        return self._noise[row, step].to(device)

    def _fresh_noise(self, scores: Tensor) -> Tensor:
        assert self.fresh is not None
        device = self.fresh.device
        race = torch.empty(scores.shape, dtype=torch.float64, device=device).exponential_(generator=self.fresh)
        return scores.to(device) - race.log_()


def check_finite(best_scores: Sequence[float], steps: Sequence[int | str]) -> None:
    """Refuse to emit a token that was not chosen from finite scores.

    Raises:
        NonFiniteLogitsError: some best score is NaN or infinite.
    """
    for best, step in zip(best_scores, steps, strict=True):
        if not -torch.inf < best < torch.inf:
            raise NonFiniteLogitsError(
                f"the target's scores for new token {step} are not finite (best {best}), so no token was emitted from "
                "them; look for overflow in a 16-bit model, for processors that forbid every token, for a temperature "
                "near zero, or pass remove_invalid_values=True"
            )
