"""Keyed noise: a pure function of seed, row, step and token, and Gumbel distributed in every direction."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

import texts
from hf_specdec import ArgumentError, KeyedSampler, NonFiniteLogitsError
from hf_specdec.noise import gumbel
from hf_specdec.sampling import Sampling, row_seeds

ALPHA = 1e-3
PINNED = {
    (0, 0, 0): [-0.7143951177675683, -1.0977226395059996, 0.916321777121184, 0.9934971892446836],
    (123456789, 3, 17): [1.6884865636095527, 0.8154585040255727, 1.2647856769793273, 1.2603916059871465],
    (-1, 0, 1): [2.837430087729653, -1.0100695884519872, 0.9675591407354319, 0.304309089047082],
}


def uniforms(noise: Tensor) -> Tensor:
    """Back through the Gumbel distribution function."""
    return torch.exp(-torch.exp(-noise))


def test_first_values_are_pinned() -> None:
    """A text must not change from one release to the next."""
    for key, values in PINNED.items():
        assert gumbel(*key, 4).tolist() == pytest.approx(values, rel=1e-14)


@pytest.mark.parametrize("axis", ["token", "step", "row", "seed"])
def test_gumbel_along_every_axis(axis: str) -> None:
    """Kolmogorov-Smirnov over 20 000 values; neighbours uncorrelated."""
    count = 20_000
    if axis == "token":
        noise = gumbel(7, 0, 0, count)
    else:
        keys = {
            "step": [(7, 0, i) for i in range(count)],
            "row": [(7, i, 3) for i in range(count)],
            "seed": [(i, 0, 3) for i in range(count)],
        }
        noise = torch.cat([gumbel(*key, 1) for key in keys[axis]])

    values = uniforms(noise)

    assert stats.kstest(values.numpy(), "uniform").pvalue > ALPHA
    for lag in (1, 2, 7):
        assert abs(float(torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1])) < 4 / count**0.5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((7, 0, 0), (7, 0, 1)),
        ((7, 0, 0), (7, 1, 0)),
        ((7, 0, 0), (8, 0, 0)),
        ((7, 0, 1), (7, 1, 0)),
        ((0, 1, 0), (1, 0, 0)),
    ],
)
def test_keys_are_independent(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    """A chi-square test of the joint law in 10 x 10 cells, and no value shared."""
    pairs = torch.stack([uniforms(gumbel(*one, 20_000)), uniforms(gumbel(*other, 20_000))])
    cells = (pairs[0] * 10).long().clamp(max=9) * 10 + (pairs[1] * 10).long().clamp(max=9)

    assert stats.chisquare(torch.bincount(cells, minlength=100).numpy()).pvalue > ALPHA
    assert not set(pairs[0].tolist()) & set(pairs[1].tolist())


def test_every_bit_counts() -> None:
    """Each of the upper bits of the uniform is a fair coin, and pairs of them are."""
    bits = (uniforms(gumbel(1, 2, 3, 20_000)).double() * 2**16).long()
    coins = torch.stack([(bits >> i) & 1 for i in range(16)]).double()

    assert float((coins.mean(1) - 0.5).abs().max()) < 4 * 0.5 / 20_000**0.5
    correlations = torch.corrcoef(coins) - torch.eye(16)
    assert float(correlations.abs().max()) < 4.5 / 20_000**0.5


def test_any_subset_is_the_same() -> None:
    """However many tokens are asked for at once, and whatever was asked for before."""
    whole = gumbel(5, 2, 9, 1000)
    gumbel(1, 1, 1, 7)

    assert torch.equal(gumbel(5, 2, 9, 10), whole[:10])
    assert torch.equal(gumbel(5, 2, 9, 1000), whole)
    assert whole.dtype == torch.float64


def test_rows_may_be_asked_for_in_any_order() -> None:
    """Choosing for some rows now and for others later, as ragged batches do, gives what all at once gives."""
    scores = torch.randn(6, 30)
    seeds = row_seeds(4, 6)
    together = Sampling(seeds).choose(range(6), range(6), scores)

    sampling = Sampling(seeds)
    backwards = [sampling.choose([row], [row], scores[row : row + 1])[0] for row in reversed(range(6))]

    assert backwards[::-1] == together
    assert sampling.choose([3, 3], [3, 3], scores[[3, 3]]) == [together[3]] * 2


def test_noise_is_finite() -> None:
    noise = gumbel(3, 0, 0, 1_000_000)

    assert bool(noise.isfinite().all())
    assert float(noise.max()) < 40


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()

    gumbel(1, 2, 3, 100)

    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_of_any_size() -> None:
    seeds = [0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 2]

    assert len({tuple(gumbel(seed, 0, 0, 4).tolist()) for seed in seeds}) == len(seeds)


def test_keyed_choice_has_the_law_of_the_scores() -> None:
    """Chi-square over 20 000 seeds, with a forbidden token among five."""
    logits = torch.tensor([0.3, -1.2, 2.0, -torch.inf, 0.0])
    count = 20_000
    sampling = Sampling([(seed, 0) for seed in range(count)])

    chosen = torch.tensor(sampling.choose(range(count), [4] * count, logits.expand(count, -1)))

    observed = torch.bincount(chosen, minlength=5)
    assert observed[3] == 0
    expected = logits.softmax(-1)[[0, 1, 2, 4]].double() * count
    expected *= count / expected.sum()
    assert stats.chisquare(observed[[0, 1, 2, 4]].numpy(), expected.numpy()).pvalue > ALPHA


@pytest.mark.parametrize("fresh", [False, True], ids=["keyed", "fresh"])
def test_children_are_a_sample_without_replacement(fresh: bool) -> None:
    """Ordered pairs of five tokens by chi-square: drafts must be drawn from the law that they are verified with."""
    count = 20_000
    logits = torch.tensor([0.3, -1.2, 1.5, -torch.inf, 0.0])
    generator = torch.Generator().manual_seed(3) if fresh else None
    sampling = Sampling([(seed, 0) for seed in range(count)], generator)

    children = sampling.draw_children(range(count), [2] * count, logits.expand(count, -1), [2] * count)

    q = logits.double().softmax(-1)
    observed, expected = [], []
    for first in range(5):
        for second in range(5):
            if first == second or 3 in (first, second):
                continue
            observed.append(sum(child.tokens == [first, second] for child in children))
            expected.append(count * float(q[first] * q[second] / (1 - q[first])))
    assert sum(observed) == count
    expected = [value * count / sum(expected) for value in expected]
    assert stats.chisquare(observed, expected).pvalue > ALPHA
    if fresh:
        assert all(torch.allclose(child.probs, q) for child in children[:50])
        assert all(child.confidences[0] == pytest.approx(float(q[child.tokens[0]])) for child in children[:50])
    else:
        assert all(child.probs is None for child in children[:50])


def test_first_keyed_child_is_what_the_target_would_choose() -> None:
    """Draft and target with the same scores agree always: the noise is shared."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 30, generator=generator)
    sampling = Sampling([(9, row) for row in range(200)])

    children = sampling.draw_children(range(200), [5] * 200, logits, [3] * 200)

    assert [child.tokens[0] for child in children] == sampling.choose(range(200), [5] * 200, logits)


def test_greedy_children_are_the_most_likely_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -torch.inf, -torch.inf, 1.0]])

    children = Sampling(None).draw_children([0, 1], [0, 0], logits, [3, 3])

    assert [child.tokens for child in children] == [[1, 3, 2], [0, 3]]
    assert children[0].confidences == pytest.approx(logits[0].softmax(-1)[[1, 3, 2]].tolist())


def test_children_of_broken_scores() -> None:
    """A draft that computes nonsense guesses nothing."""
    logits = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]])

    for sampling in (Sampling(None), Sampling([(1, row) for row in range(3)])):
        assert [child.tokens for child in sampling.draw_children(range(3), [0] * 3, logits, [2] * 3)] == [[], [], []]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_choice_from_broken_scores_is_refused(bad: float) -> None:
    scores = torch.tensor([[0.0, bad, 1.0]])

    with pytest.raises(NonFiniteLogitsError, match="new token 6"):
        Sampling(None).choose([0], [6], scores)
    with pytest.raises(NonFiniteLogitsError, match="remove_invalid_values"):
        KeyedSampler(1, prompt_length=1)(torch.zeros(1, 3, dtype=torch.int64), scores)


def test_nothing_allowed_is_refused() -> None:
    with pytest.raises(NonFiniteLogitsError):
        Sampling([(1, 0)]).choose([0], [0], torch.full((1, 4), -torch.inf))


@pytest.mark.parametrize("bad", [1.5, "1", None, True, [1, "2"], [0.5]])
def test_seeds_of_a_wrong_type(bad: object) -> None:
    with pytest.raises(ArgumentError, match="seed must be an int or a sequence of ints"):
        row_seeds(bad, 2)


def test_row_seeds() -> None:
    assert row_seeds(4, 3) == [(4, 0), (4, 1), (4, 2)]
    assert row_seeds([4, 5], 2) == [(4, 0), (5, 0)]


def test_keyed_sampler_counts_generated_tokens() -> None:
    """Its prompt length is that of the first call, or the one that it is told."""
    scores = torch.zeros(2, 50)
    told, learns = KeyedSampler(3, prompt_length=4), KeyedSampler(3)
    learns(torch.zeros(2, 4, dtype=torch.int64), scores)

    for length in (4, 5, 9):
        ids = torch.zeros(2, length, dtype=torch.int64)
        expected = [int(gumbel(3, row, length - 4, 50).argmax()) for row in range(2)]
        assert told(ids, scores).argmax(-1).tolist() == learns(ids, scores).argmax(-1).tolist() == expected


def test_keyed_sampler_leaves_one_token() -> None:
    kept = KeyedSampler(3, prompt_length=4)(texts.prompt(6), torch.randn(1, 50))

    assert int((kept > -torch.inf).sum()) == 1
