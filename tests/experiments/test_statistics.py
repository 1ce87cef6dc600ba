"""What can be told from chance: against arithmetic by hand, closed forms, enumeration and simulation."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from alignattn.experiments import statistics
from alignattn.experiments.statistics import Difference, holm, paired, seeds_needed

pytestmark = pytest.mark.filterwarnings("error")

lawful = settings(deadline=None, derandomize=True, database=None)
few = settings(lawful, max_examples=25)  # each example draws 9,999 resamples
numbers = st.floats(-100, 100, allow_subnormal=False)


def against_zero(*differences: float, higher_is_better: bool | None = True) -> Difference:
    return paired(differences, [0.0] * len(differences), higher_is_better)


def p_two_degrees(t: float) -> float:
    """Of Student's t with two degrees of freedom, where it is elementary: P(|T| > t) = 1 - t / √(t² + 2)."""
    return 1 - t / math.sqrt(t * t + 2)


def p_four_degrees(t: float) -> float:
    """With four: 1 - x (3 - x²) / 2, where x = t / √(t² + 4)."""
    x = t / math.sqrt(t * t + 4)
    return 1 - x * (3 - x * x) / 2


# The test and the effect


def test_three_seeds_by_hand():
    found = paired([4, 6, 8], [1, 2, 3], higher_is_better=True)
    # differences 3, 4, 5: mean 4, deviation √((1 + 0 + 1) / 2) = 1, t = 4 / (1 / √3) = 4√3
    assert found.seeds == 3
    assert found.mean == 4
    assert found.effect == pytest.approx(4 / 1)
    assert found.p == pytest.approx(p_two_degrees(4 * math.sqrt(3)))  # 1 - √48 / √50 = 0.0202
    assert found.p == pytest.approx(0.0202, abs=1e-4)
    assert found.verdict == "better" and found.more_seeds is None


def test_five_seeds_by_hand():
    found = paired([10, 9, 12, 11, 8], [9, 9, 9, 9, 9], higher_is_better=True)
    # differences 1, 0, 3, 2, -1: mean 1, squares about it 0 1 4 1 4: deviation √(10 / 4), t = 1 / √(2.5 / 5) = √2
    assert found.mean == 1
    assert found.effect == pytest.approx(1 / math.sqrt(2.5))
    assert found.p == pytest.approx(p_four_degrees(math.sqrt(2)))  # 0.2302
    assert found.verdict == "cannot tell"


@pytest.mark.parametrize("count", [3, 4, 5, 10, 31])
@pytest.mark.parametrize("shift", [0.0, 0.5, 3.0])
def test_the_test_is_scipys_for_pairs(count, shift):
    rng = np.random.default_rng(count)
    baseline = rng.normal(80, 5, count)
    values = baseline + rng.normal(shift, 1, count)
    found = paired(values, baseline, higher_is_better=True)
    assert found.p == pytest.approx(stats.ttest_rel(values, baseline).pvalue, rel=1e-9)
    assert found.effect == pytest.approx(np.mean(values - baseline) / np.std(values - baseline, ddof=1), rel=1e-9)
    assert (found.verdict == "better") == (found.p < 0.05 and found.mean > 0)


def test_pairing_counts_what_seeds_share_once():
    """Seeds apart by tens, and a gain of one in each: only a test that pairs can see it."""
    baseline = [10.0, 30.0, 50.0, 70.0]
    values = [11.1, 30.9, 51.1, 70.9]
    assert stats.ttest_ind(values, baseline).pvalue > 0.9
    assert paired(values, baseline, higher_is_better=True).verdict == "better"


def test_five_percent_is_where_the_verdict_turns():
    """With two degrees of freedom p = 0.05 at t = 0.95 √(2 / (1 - 0.95²)) = 4.303; deviation 1 makes t = mean √3."""
    critical = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    for factor, verdict in ((1.001, "better"), (0.999, "cannot tell")):
        mean = factor * critical
        assert against_zero(mean - 1, mean, mean + 1).verdict == verdict


def test_of_tests_without_a_difference_one_in_twenty_finds_one():
    """How often, simulated: 250 times five seeds that differ by noise alone; nothing but p is wanted."""
    rng = np.random.default_rng(0)
    found = np.array([_p_only(rng.normal(size=5)) for _ in range(250)])
    assert 0.01 < (found < 0.05).mean() < 0.1
    assert stats.kstest(found, "uniform").pvalue > 0.01


def _p_only(differences: np.ndarray) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_bootstrap", lambda ordered: (0.0, 0.0))
        patch.setattr(statistics, "seeds_needed", lambda effect: None)
        return against_zero(*differences).p


# Which way is good


@pytest.mark.parametrize(
    ("differences", "higher_is_better", "verdict"),
    [
        ((3, 4, 5), True, "better"),
        ((3, 4, 5), False, "worse"),
        ((3, 4, 5), None, "differs"),
        ((-3, -4, -5), True, "worse"),
        ((-3, -4, -5), False, "better"),
        ((-3, -4, -5), None, "differs"),
        ((-3, 4, 5), True, "cannot tell"),
        ((-3, 4, 5), False, "cannot tell"),
        ((2, 2, 2), True, "better"),
        ((2, 2, 2), False, "worse"),
        ((-2, -2, -2), True, "worse"),
        ((-2, -2, -2), None, "differs"),
    ],
)
def test_the_verdict_knows_which_way_is_good(differences, higher_is_better, verdict):
    found = against_zero(*differences, higher_is_better=higher_is_better)
    assert found.verdict == verdict
    assert found.in_words().startswith(verdict)


@few
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.sampled_from([True, False]))
@example([(0.0, 2.0), (0.0, -1.0), (0.0, -1.0)], True)  # a mean of zero
@example([(0.0, 1000.0), (0.0, 1000.0000001), (0.0, 999.9999999)], True)  # the same at every seed, but for rounding
def test_swapping_the_sides_turns_everything_round(pairs, higher_is_better):
    values, baseline = zip(*pairs, strict=True)
    there, back = paired(values, baseline, higher_is_better), paired(baseline, values, higher_is_better)
    assert back.mean == -there.mean
    differences = sorted(x - y for x, y in pairs)
    if differences != sorted(-d for d in differences):  # else one problem, whose resamples are nearly symmetric
        assert _same((back.low, back.high), (-there.high, -there.low))
    assert _same((back.p, -back.effect), (there.p, there.effect))
    assert back.verdict == {"better": "worse", "worse": "better"}.get(there.verdict, there.verdict)
    assert back.more_seeds == there.more_seeds
    assert paired(values, baseline, not higher_is_better).verdict == back.verdict


@few
@given(st.data())
def test_the_order_of_seeds_does_not_matter(data):
    pairs = data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8))
    shuffled = data.draw(st.permutations(pairs))
    assert _same(
        _tuple(paired(*zip(*pairs, strict=True), higher_is_better=True)),
        _tuple(paired(*zip(*shuffled, strict=True), higher_is_better=True)),
    )


@few
@given(st.lists(st.integers(-100, 100), min_size=3, max_size=8), st.integers(-100, 100))
def test_what_both_sides_have_more_does_not_matter(differences, more):
    there = paired([d + more for d in differences], [more] * len(differences), higher_is_better=True)
    assert _same(_tuple(there), _tuple(against_zero(*differences)))


def _tuple(found: Difference) -> tuple[float, ...]:
    return found.seeds, found.mean, found.low, found.high, found.p, found.effect, found.more_seeds or math.nan


def _same(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return np.array_equal(np.array(one, float), np.array(other, float), equal_nan=True)


# The interval


def exact_bca(differences: list[float]) -> tuple[np.ndarray, float, float]:
    """BCa (Efron 1987) with every resample there is, n^n of them: all their means, sorted, and the two levels."""
    count = len(differences)
    means = np.sort(np.array(list(itertools.product(differences, repeat=count))).mean(axis=1).round(9))
    mean = round(sum(differences) / count, 9)
    bias = stats.norm.ppf(((means < mean).mean() + (means <= mean).mean()) / 2)
    without = [(sum(differences) - d) / (count - 1) for d in differences]
    centre = sum(without) / count
    acceleration = sum((centre - w) ** 3 for w in without) / (6 * sum((centre - w) ** 2 for w in without) ** 1.5)
    levels = []
    for z in (-1.959964, 1.959964):
        shifted = bias + z
        levels.append(stats.norm.cdf(bias + shifted / (1 - acceleration * shifted)))
    return means, *levels


@pytest.mark.parametrize(
    "differences",
    [
        [0.0, 0.1, 0.2, 0.4, 0.7, 4.0],  # skewed: levels far from 2.5 % and 97.5 %
        [0.0, -0.1, -0.2, -0.4, -0.7, -4.0],
        [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
        [-3.0, 1.0, 2.0, 2.5, 7.0],
        [0.25, 0.5, 0.5, -0.25, 1.0],  # ties
        [1.0, 2.0, -4.0],
    ],
)
def test_the_interval_is_bca_of_all_resamples(differences):
    means, low, high = exact_bca(differences)
    found = against_zero(*differences)
    slack = 0.012  # of level: three deviations of what 9,999 resamples leave open
    for end, level in ((found.low, low), (found.high, high)):
        lowest, highest = np.quantile(means, np.clip([level - slack, level + slack], 0, 1))
        assert lowest - 1e-9 <= end <= highest + 1e-9
    if len(differences) == 6 and abs(differences[-1]) == 4:  # that the test can tell BCa from plain percentiles
        assert not np.quantile(means, 0.025 - slack) <= found.low <= np.quantile(means, 0.025 + slack)


def test_the_interval_holds_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    found = [against_zero(*rng.normal(0.5, 1, 20)) for _ in range(100)]
    held = np.mean([f.low <= 0.5 <= f.high for f in found])
    assert 0.88 <= held <= 0.99  # 0.95, a little less for a bootstrap of twenty, and noise of 0.025


@pytest.mark.parametrize("count", [3, 5])
def test_with_few_seeds_it_is_too_narrow_as_the_module_says(count):
    """No resample's mean lies beyond the extremes, which miss a symmetric mean with probability 2 / 2^n."""
    rng = np.random.default_rng(1)
    found = [against_zero(*rng.normal(0, 1, count)) for _ in range(60)]
    assert np.mean([f.low <= 0 <= f.high for f in found]) < 1 - 2 / 2**count + 0.04


def test_the_interval_is_the_same_each_time():
    rng = np.random.default_rng(2)
    differences = rng.normal(size=6)
    first = against_zero(*differences)
    rng.normal(size=1000)
    assert against_zero(*differences) == first


@pytest.mark.parametrize("unit", [0.1, 1 / 408, 0.7, 3.0, 7e-5, 1e-300, 1e300])
def test_resamples_of_equal_mean_count_as_equal_in_every_unit(unit):
    """A share of 408 answers, say: sums that rounding tells apart would move an interval of few seeds by half of it."""
    differences = (1, 2, 3, -1, 0)
    found, plain = against_zero(*(unit * d for d in differences)), against_zero(*differences)
    assert (found.low / unit, found.high / unit) == pytest.approx((plain.low, plain.high), rel=1e-6)


# Scales, and numbers that are none


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-9, 1e9, 1e160, 1e300])
def test_scales_change_nothing_but_the_scale(scale):
    for differences in ((1.0, 2.0, 6.0), (3.0, 4.0, 5.0), (-1.0, 2.0, -5.0)):
        plain, found = against_zero(*differences), against_zero(*(scale * d for d in differences))
        assert (found.p, found.effect) == pytest.approx((plain.p, plain.effect), rel=1e-9)
        assert (found.verdict, found.more_seeds) == (plain.verdict, plain.more_seeds)
        assert found.mean / scale == pytest.approx(plain.mean)
        assert (found.low / scale, found.high / scale) == pytest.approx((plain.low, plain.high), abs=1e-6)


def test_the_largest_and_the_smallest_numbers_do_no_harm():
    most, least = 1.7e308, 5e-324
    assert against_zero(most, most, -most).verdict == "cannot tell"
    assert against_zero(most, most, most / 2).mean == pytest.approx(most / 1.2)
    assert against_zero(least, -least, 3 * least).verdict == "cannot tell"
    assert paired([most, least, 0], [most, 0, 0], higher_is_better=True).verdict == "cannot tell"
    assert paired([1e308] * 3, [-1e308] * 3, higher_is_better=True).in_words().endswith("not all values are finite")


@few
@given(st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=6), st.sampled_from([True, False, None]))
@example([(0.0, 0.0), (0.0, 0.0), (0.0, 1.797693134861417e308)], None)
def test_no_numbers_break_it(pairs, higher_is_better):
    values, baseline = zip(*pairs, strict=True)
    found = paired(values, baseline, higher_is_better)
    assert found.seeds == len(pairs)
    assert found.verdict in ("better", "worse", "differs", "cannot tell")
    assert found.in_words().startswith((found.verdict, "no difference seen"))
    if not math.isnan(found.p):
        assert 0 <= found.p <= 1
        size = max(map(abs, (found.low, found.high, found.mean)))
        assert found.low - 1e-9 * size <= found.mean <= found.high + 1e-9 * size
        assert (found.p < 0.05) == (found.verdict != "cannot tell")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_value_that_is_not_finite_leaves_no_verdict(bad, count):
    values = [1.0] * count
    for found in (
        paired([bad, *values[1:]], [0.0] * count, higher_is_better=True),
        paired([0.0] * count, [bad, *values[1:]], higher_is_better=True),
        paired([bad] * count, [bad] * count, higher_is_better=True),
    ):
        assert not math.isfinite(found.mean)
        assert all(map(math.isnan, (found.low, found.high, found.p, found.effect)))
        assert found.more_seeds is None
        assert found.in_words() == "cannot tell: not all values are finite"
    assert paired([math.inf, *values[1:]], [0.0] * count, higher_is_better=True).mean == math.inf


# Few seeds, and seeds that agree


def test_with_one_or_two_seeds_nothing_is_said_but_how_many_are_missing():
    for differences, words in (((5.0,), "2 seeds more"), ((5.0, 5.0), "1 seed more"), ((1.0, 2.0), "1 seed more")):
        found = against_zero(*differences)
        assert found.mean == sum(differences) / len(differences)
        assert all(map(math.isnan, (found.low, found.high, found.p, found.effect)))
        assert found.in_words() == f"cannot tell: {words} at least"


def test_no_seed_at_all_is_no_difference():
    found = against_zero()
    assert found.seeds == 0 and math.isnan(found.mean)
    assert found.in_words() == "cannot tell: 3 seeds more at least"


def test_sides_of_unequal_length_are_no_pairs():
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0, 3.0], [1.0], higher_is_better=True)


@pytest.mark.parametrize("baseline", [[7.0, 8.0, 9.0], [0.0, 0.0, 0.0], [-1e300, 5e-324, 3.0]])
def test_equal_values_show_no_difference(baseline):
    found = paired(baseline, baseline, higher_is_better=True)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert math.isnan(found.effect)
    assert found.verdict == "cannot tell" and found.in_words() == "no difference seen"


def test_equal_but_for_rounding_is_equal():
    found = paired([0.1 + 0.2, 0.7 + 0.1, 1.1 + 2.2], [0.3, 0.8, 3.3], higher_is_better=True)
    assert (0.1 + 0.2, 0.7 + 0.1, 1.1 + 2.2) != (0.3, 0.8, 3.3)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    assert found.in_words() == "no difference seen"


def test_the_same_difference_at_every_seed_is_certain():
    found = paired([90.1, 80.2, 70.3], [90.0, 80.1, 70.2], higher_is_better=True)  # 0.1, but for rounding
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high) == (found.mean, found.mean)
    assert found.p == 0 and math.isnan(found.effect)
    assert found.verdict == "better" and found.more_seeds is None


def test_a_small_difference_at_one_seed_is_not_taken_for_rounding_at_all():
    for more in (0.002, 0.0015):  # shares of 2e-9 and 1.5e-9, the second with a deviation and a mean below 1e-9
        found = paired([1e6, 1e6, 1e6 + more], [1e6, 1e6, 1e6], higher_is_better=True)
        assert found.verdict == "cannot tell" and found.p == pytest.approx(p_two_degrees(1.0))  # t of (0, 0, 1) is 1


# How many seeds would tell


@pytest.mark.parametrize(
    ("effect", "count"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (-0.5, 34), (50.0, 3), (1e300, 3), (-1e300, 3)]
)
def test_seeds_needed_are_the_textbooks(effect, count):
    """One sample, two-sided, level 0.05, power 0.8: small, medium and large effects as G*Power has them."""
    assert seeds_needed(effect) == count


@pytest.mark.parametrize("effect", [0.3, 0.5, 0.8, 1.2, 2.0, 3.5])
def test_seeds_needed_find_the_effect_four_times_in_five(effect):
    rng = np.random.default_rng(3)
    count = seeds_needed(effect)
    assert count is not None

    def power(count: int) -> float:
        sample = rng.normal(effect, 1, (60_000, count))
        t = sample.mean(1) / (sample.std(1, ddof=1) / math.sqrt(count))
        return float((np.abs(t) > stats.t.ppf(0.975, count - 1)).mean())

    assert power(count) > 0.8 - 0.005
    assert count == 3 or power(count - 1) < 0.8 + 0.005


@given(st.floats(0.09, 0.6))
@few
def test_seeds_needed_follow_the_normal_approximation(effect):
    """n ≈ ((z₀.₉₇₅ + z₀.₈) / d)² + z₀.₉₇₅² / 2 (Guenther 1981)."""
    count = seeds_needed(effect)
    assert count == pytest.approx(((1.959964 + 0.841621) / effect) ** 2 + 1.959964**2 / 2, abs=1.1)
    assert seeds_needed(-effect) == count


@pytest.mark.parametrize("effect", [0.0, 1e-300, 0.05, -0.05, math.nan])
def test_what_a_thousand_seeds_do_not_tell_has_no_number(effect):
    assert seeds_needed(effect) is None


def test_a_thousand_seeds_are_the_most():
    """7.849 / 998.1 and 7.849 / 999.1 are the squares of the effects that need 1000 and 1001."""
    assert seeds_needed(math.sqrt(7.849 / 998.0)) == 1000
    assert seeds_needed(math.sqrt(7.849 / 999.5)) is None


def test_seeds_that_are_there_are_not_asked_for_again():
    found = against_zero(0, 1, 2)  # effect 1, which takes ten
    assert found.effect == pytest.approx(1) and found.more_seeds == 10 - 3
    assert found.in_words() == "cannot tell: about 7 seeds more would"


def test_a_difference_too_small_for_any_number_of_seeds():
    found = against_zero(-10, 10, 0.01)
    assert found.more_seeds is None
    assert found.in_words() == "cannot tell: not with 1000 seeds"


def test_seeds_that_cancel_show_no_difference():
    assert against_zero(-1, 0, 1).in_words() == "no difference seen"


@few
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=8).filter(lambda d: len(set(d)) > 1))
def test_there_is_always_something_to_do_where_nothing_can_be_told(differences):
    found = against_zero(*differences)
    if found.verdict == "cannot tell":
        assert found.more_seeds is None or found.more_seeds >= 1
    else:
        assert found.more_seeds is None


@pytest.mark.parametrize(("more", "words"), [(1, "about 1 seed more would"), (2, "about 2 seeds more would")])
def test_one_seed_is_no_seeds(more, words):
    assert replace(against_zero(0, 1, 2), more_seeds=more).in_words() == f"cannot tell: {words}"


# Holm


def test_holm_by_hand():
    """0.005 × 4, 0.01 × 3, 0.03 × 2, and 0.04 × 1 lifted to the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_leaves_out_what_was_not_tested():
    found = holm([math.nan, 0.01, math.nan, 0.04])
    assert found[1] == pytest.approx(0.02) and found[3] == pytest.approx(0.04)
    assert math.isnan(found[0]) and math.isnan(found[2])
    assert holm([]) == []


shares = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@lawful
@given(shares)
def test_holm_is_closed_testing_with_bonferroni(p_values):
    """A hypothesis is rejected when every set of hypotheses with it in is, by Bonferroni: all sets, one by one."""
    adjusted = holm(p_values)
    numbers = range(len(p_values))
    sets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(numbers, size)]
    for i in numbers:
        worst = max(min(1.0, len(s) * min(p_values[j] for j in s)) for s in sets if i in s)
        assert adjusted[i] == pytest.approx(worst, abs=1e-12)


@lawful
@given(shares)
def test_holm_keeps_the_order_and_never_lowers(p_values):
    adjusted = holm(p_values)
    assert all(p <= a <= 1 for p, a in zip(p_values, adjusted, strict=True))
    assert min(adjusted) == pytest.approx(min(1, len(p_values) * min(p_values)))  # Bonferroni's
    by_p = sorted(zip(p_values, adjusted, strict=True))
    assert [a for _, a in by_p] == sorted(adjusted)


@lawful
@given(st.data())
def test_holm_does_not_care_in_which_order_tests_come(data):
    p_values = data.draw(shares)
    order = data.draw(st.permutations(range(len(p_values))))
    adjusted = holm(p_values)
    assert holm([p_values[i] for i in order]) == [adjusted[i] for i in order]
