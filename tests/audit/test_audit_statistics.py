"""Every statistic against enumeration, or its level and power by simulation with fixed seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from hf_specdec.audit.law import (
    LOG_LIKELIHOOD,
    LOG_RATIO,
    MEMBERSHIP,
    LawRecord,
    law_record,
    moments,
    randomised_pit,
)
from hf_specdec.audit.recording import Proposal
from hf_specdec.audit.statistics import (
    Outcome,
    Sums,
    detectable_bias,
    detectable_distance,
    holm,
    ks_test,
    paired_bootstrap,
    z_test,
)

P = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)


def p_value(sums: Sums) -> float:
    return z_test(sums).p_value


class TestMoments:
    def test_they_are_those_of_the_law(self) -> None:
        """Excess, variance and third moment of f, by going through all tokens."""
        f = torch.tensor([1.0, -2.0, 0.5, 7.0, 100.0], dtype=torch.float64)
        terms = moments(P.expand(5, -1), f.expand(5, -1), torch.arange(5))
        excess = torch.tensor([term.excess for term in terms], dtype=torch.float64)
        assert float((P * excess).sum()) == pytest.approx(0, abs=1e-12)
        for term in terms:
            assert term.variance == pytest.approx(float((P * excess**2).sum()))
            assert term.third == pytest.approx(float((P * excess**3).sum()))

    def test_certain_tokens_have_no_moments(self) -> None:
        certain = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        (term,) = moments(certain, torch.tensor([[-3.0, 7.0]], dtype=torch.float64), torch.tensor([0]))
        assert term == (1, 0.0, 0.0, pytest.approx(0.0, abs=1e-12))


class TestZ:
    @pytest.mark.parametrize("share", [0.02, 0.3])
    def test_the_tail_is_that_of_the_binomial(self, share: float) -> None:
        """Sums of skewed terms: the exact tail is known, a normal one is far off."""
        count = 3000
        variance, third = share * (1 - share), share * (1 - share) * (1 - 2 * share)
        for z in (2.0, 3.5, 4.8):
            hits = math.ceil(count * share + z * math.sqrt(count * variance))
            sums = Sums(count, hits - 0.5 - count * share, count * variance, count * third)
            exact = 2 * float(stats.binom.sf(hits - 1, count, share))
            assert 0.8 < p_value(sums) / exact < 1.25
            hits = math.floor(count * share - z * math.sqrt(count * variance))
            short = Sums(count, hits + 0.5 - count * share, count * variance, count * third)
            assert p_value(short) > 0.8 * 2 * float(stats.binom.cdf(hits, count, share))
        if share < 0.1:
            assert 2 * stats.norm.sf(sums.z) < 0.5 * exact

    def test_level_and_power(self) -> None:
        """Rejection rates at 1 % from texts of the right law and of a slightly wrong one."""
        rng = np.random.default_rng(0)
        centred = (P[:4].log() - (P[:4] * P[:4].log()).sum()).numpy()
        variance, third = float((P[:4].numpy() * centred**2).sum()), float((P[:4].numpy() * centred**3).sum())

        def rate(law: list[float]) -> float:
            counts = rng.multinomial(1000, law, size=4000)
            return float(
                np.mean(
                    [p_value(Sums(1000, float(row @ centred), 1000 * variance, 1000 * third)) < 0.01 for row in counts]
                )
            )

        assert 0.006 < rate([0.5, 0.3, 0.15, 0.05]) < 0.015
        assert rate([0.56, 0.28, 0.12, 0.04]) > 0.85

    @pytest.mark.parametrize(
        "sums", [Sums(29, 40.0, 16.0, 0.0), Sums(1000, 10.0, 1.0, 0.9), Sums(29, -40.0, 16.0, 0.0)]
    )
    def test_where_three_moments_do_not_suffice_chebyshev_holds(self, sums: Sums) -> None:
        """Too few tokens, one token that decides everything."""
        assert p_value(sums) == pytest.approx(0.01)

    def test_certain_tokens(self) -> None:
        assert p_value(Sums(1000, 0.0, 0.0, 0.0)) == 1.0
        assert p_value(Sums(1000, 1e-13, 0.0, 0.0)) > 0.99
        assert p_value(Sums(1000, -1.0, 0.0, 0.0)) < 1e-9

    @pytest.mark.parametrize("rare", [1e-5, 1e-4, 1e-3])
    def test_a_peaked_law_does_not_hide_tokens_that_cannot_come(self, rare: float) -> None:
        """A sum that one token decides is tested all the same, and right tokens pass."""
        p = torch.tensor([1 - rare, rare, 0.0], dtype=torch.float64)
        f = p.log().clamp_min(-1e4)
        certain, allowed, impossible = (moments(p[None], f[None], torch.tensor([token]))[0] for token in range(3))

        def total(*terms: tuple[Sums, int]) -> Sums:
            return Sums(*(sum(count * term[i] for term, count in terms) for i in range(4)))  # type: ignore[arg-type]

        expected = round(20_000 * rare)
        assert p_value(total((certain, 20_000 - expected), (allowed, expected))) > 0.05
        assert p_value(total((certain, 19_990), (impossible, 10))) < 1e-6

    def test_sums_add_up(self) -> None:
        assert Sums(1, 2.0, 3.0, 4.0).plus(Sums(10, 20.0, 30.0, 40.0)) == Sums(11, 22.0, 33.0, 44.0)


class TestPit:
    def test_the_values_of_all_tokens_fill_the_unit_interval_once(self) -> None:
        """Each token owns an interval as long as its probability; tokens that are equally probable share theirs."""
        p = torch.tensor([0.25, 0.4, 0.25, 0.1, 0.0], dtype=torch.float64)
        intervals = {}
        for token in range(4):
            values = randomised_pit(
                p.expand(4000, -1), torch.full((4000,), token), torch.Generator().manual_seed(token)
            )
            intervals[token] = (min(values), max(values))
        expected = {3: (0.0, 0.1), 0: (0.1, 0.6), 2: (0.1, 0.6), 1: (0.6, 1.0)}
        for token, (low, high) in expected.items():
            assert intervals[token] == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))

    def test_level_and_power(self) -> None:
        rng = np.random.default_rng(1)
        uniform = [ks_test(rng.random(400).tolist()) for _ in range(2000)]
        rate = float(np.mean([outcome.p_value < 0.01 for outcome in uniform]))
        assert 0.005 < rate < 0.016
        bent = ks_test((rng.random(400) ** 1.4).tolist())
        assert bent.p_value < 1e-5

    def test_a_single_value(self) -> None:
        assert ks_test([0.001]).p_value == pytest.approx(0.002)


class TestLaw:
    """`law_record` on texts of known laws over five tokens."""

    def record(self, law: torch.Tensor, tokens: int, seed: int) -> LawRecord:
        generator = torch.Generator().manual_seed(seed)
        text = torch.multinomial(law, tokens, replacement=True, generator=generator).tolist()
        return law_record(P.log().expand(tokens, -1), 1.0, text, None, generator)

    def test_right_and_wrong(self) -> None:
        right = self.record(P, 2000, 0)
        assert p_value(right.sums[LOG_LIKELIHOOD]["all"]) > 0.01
        colder = P.square() / P.square().sum()
        assert p_value(self.record(colder, 2000, 0).sums[LOG_LIKELIHOOD]["all"]) < 1e-12

    def test_records_add_up_and_survive_json(self) -> None:
        one, two = self.record(P, 50, 1), self.record(P, 70, 2)
        one.merge(LawRecord.from_dict(two.to_dict()))
        assert one.tokens == 120
        assert one.sums[LOG_LIKELIHOOD]["all"].tokens == len(one.pit["all"]) == 120

    def test_a_token_that_cannot_come_is_seen(self) -> None:
        """Once in 2000 tokens; the law gives it no chance at all."""
        generator = torch.Generator().manual_seed(3)
        text = torch.multinomial(P, 2000, replacement=True, generator=generator).tolist()
        record = law_record(P.log().expand(2000, -1), 1.0, [*text[:-1], 4], None, generator)
        assert all(math.isfinite(value) for value in record.sums[LOG_LIKELIHOOD]["all"])
        assert p_value(record.sums[LOG_LIKELIHOOD]["all"]) < 1e-12

    def test_the_temperature_divides(self) -> None:
        logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        hot = law_record(logits, 2.0, [1] * 40, None, torch.Generator().manual_seed(1))
        same = law_record(logits / 2, 1.0, [1] * 40, None, torch.Generator().manual_seed(1))
        assert hot == same

    def test_drafts_are_compared_as_they_were_proposed(self) -> None:
        """Ten tokens of each kind: picked guesses, guesses drawn from q, and none."""
        q = torch.tensor([0.1, 0.2, 0.6, 0.1, 0.0], dtype=torch.float64)
        proposals = [Proposal("1", (0, 3), None), Proposal("2", (), q.float()), Proposal("bonus", (), None)] * 10
        text = [0, 2, 1] * 10
        record = law_record(P.log().expand(30, -1), 1.0, text, proposals, torch.Generator().manual_seed(0))
        assert {name: sums.tokens for name, sums in record.sums[MEMBERSHIP].items()} == {"all": 20, "1": 10, "2": 10}
        picked, drawn = record.sums[MEMBERSHIP]["1"], record.sums[MEMBERSHIP]["2"]
        assert picked == pytest.approx((10, 10 * (1 - 0.55), 10 * 0.55 * 0.45, 10 * 0.55 * 0.45 * (1 - 1.1)))
        assert drawn == pytest.approx((10, 10 * (1 - 0.45), 10 * 0.45 * 0.55, 10 * 0.45 * 0.55 * (1 - 0.9)))
        (ratio,) = moments(P[None], (q.clamp_min(1e-300).log() - P.log()).clamp(-20, 20)[None], torch.tensor([2]))
        assert record.sums[LOG_RATIO]["2"] == pytest.approx([10 * value for value in ratio], rel=1e-6)
        assert record.sums[LOG_LIKELIHOOD].keys() == {"all", "1", "2", "bonus"}


class TestHolm:
    def test_an_example_by_hand(self) -> None:
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_it_is_the_step_down_procedure(self) -> None:
        rng = np.random.default_rng(2)
        for size, alpha in itertools.product((1, 2, 7, 30), (0.01, 0.2)):
            values = (rng.random(size) ** 3).tolist()
            rejected = set()
            for rank, index in enumerate(sorted(range(size), key=lambda i: values[i])):
                if values[index] > alpha / (size - rank):
                    break
                rejected.add(index)
            assert {i for i, value in enumerate(holm(values)) if value <= alpha} == rejected

    def test_no_tests(self) -> None:
        assert holm([]) == []


class TestDetectableBias:
    def test_it_is_detected_nine_times_in_ten(self) -> None:
        rng = np.random.default_rng(3)
        count, family, alpha = 900, 40, 1e-3
        spread = 1 / math.sqrt(count)
        bias = detectable_bias(Outcome(0.0, 1.0, count, spread), alpha, family)
        z = (rng.standard_normal(20_000) * spread + bias) / spread
        rate = float(np.mean(2 * stats.norm.sf(np.abs(z)) <= alpha / family))
        assert rate == pytest.approx(0.9, abs=0.01)

    @pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
    def test_where_sums_are_skewed_too(self, share: float) -> None:
        """The exact power of a binomial count, with a bias towards its long tail; such a bias widens it as well."""
        count, family, alpha = 3000, 40, 1e-3
        variance, third = share * (1 - share), share * (1 - share) * (1 - 2 * share)

        def outcome(hits: float) -> Outcome:
            return z_test(Sums(count, hits - count * share, count * variance, count * third))

        bias = detectable_bias(outcome(count * share), alpha, family)
        critical = next(
            hits for hits in range(count) if hits > count * share and outcome(hits).p_value <= alpha / family
        )
        assert 0.8 < stats.binom.sf(critical - 1, count, share + bias) < 0.95

    def test_chebyshev_sees_less(self) -> None:
        few = z_test(Sums(20, 0.0, 20.0, 0.0))
        assert detectable_bias(few, 1e-3, 10) * 20 / math.sqrt(20) == pytest.approx(100 + float(stats.norm.ppf(0.9)))

    def test_a_distance_that_is_detected(self) -> None:
        rng = np.random.default_rng(4)
        count, family, alpha = 2000, 40, 1e-3
        distance = detectable_distance(Outcome(0.0, 1.0, count, 0.5 / math.sqrt(count)), alpha, family)
        # Uniform but for a share that moved down: its distribution function is off by that share in the middle.
        found = 0
        for _ in range(200):
            values = rng.random(count)
            values = np.where((values > 0.5) & (rng.random(count) < 2 * distance), values - 0.5, values)
            found += ks_test(values.tolist()).p_value <= alpha / family
        assert found >= 170


class TestPairedBootstrap:
    def test_agreement_and_constant_difference(self) -> None:
        assert paired_bootstrap([0.0] * 12, 0) == (Outcome(0.0, 1.0, 12, 0.0), (0.0, 0.0))
        assert paired_bootstrap([1.0] * 12, 0) == (Outcome(1.0, 0.5**11, 12, 0.0), (1.0, 1.0))
        assert paired_bootstrap([1.0] * 9, 0) is None

    def test_a_few_equal_differences_prove_little(self) -> None:
        """Their spread is tiny, but three of one sign come once in four times."""
        result = paired_bootstrap([1.0, 1.001, 0.999] + [0.0] * 40, 0)
        assert result is not None
        assert result[0].p_value >= 0.25
        result = paired_bootstrap([1.0, 1.001] * 6, 0)
        assert result is not None
        assert result[0].p_value == 0.5**11

    def test_level_coverage_and_power(self) -> None:
        rng = np.random.default_rng(5)
        small = covered = 0
        for _ in range(100):
            result = paired_bootstrap(rng.normal(0, 1, 50).tolist(), 0)
            assert result is not None
            outcome, (low, high) = result
            assert low < outcome.statistic < high
            covered += low < 0 < high
            small += outcome.p_value < 0.05
        assert 88 <= covered <= 99
        assert 1 <= small <= 11
        result = paired_bootstrap(rng.normal(1, 1, 50).tolist(), 0)
        assert result is not None
        assert result[1][0] > 0
        assert result[0].p_value < 1e-4
