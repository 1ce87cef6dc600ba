"""Whether a method differs from soft attention, judged on seeds that both were trained from.

    d_s = x_s - y_s over the seeds s,   t = mean(d) / (deviation(d) / √n),   effect = mean(d) / deviation(d)

The verdict is that of the two-sided paired t-test at 5 %. The interval is a bootstrap over seeds (BCa). With a handful
of seeds a bootstrap is too narrow, so that an interval may leave out zero where the test cannot tell: the test decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.05
POWER = 0.8
FEWEST = 3  # paired seeds below which nothing is said: two seeds agree by chance too often
MOST = 1000  # seeds beyond which nobody goes
RESAMPLES = 9999
ROUNDING = 1e-9  # share of the values below which a difference is taken for rounding


@dataclass(frozen=True)
class Difference:
    """What one kind of attention makes different from another, paired over seeds."""

    seeds: int  # that both have
    mean: float
    low: float  # 95 % bootstrap interval; NaN with fewer than three seeds or a value that is not finite
    high: float
    p: float  # paired t-test; NaN likewise
    effect: float  # mean over deviation of the differences (Cohen's d_z); NaN where there is no deviation
    verdict: str  # "better", "worse", "differs" where neither is good, or "cannot tell"
    more_seeds: int | None  # about how many more would tell; None: told already, cannot be said, or more than MOST
    error: float = math.nan  # standard error of the mean; NaN with fewer than three seeds

    def in_words(self) -> str:
        """The verdict as a sentence."""
        if self.verdict != "cannot tell":
            return self.verdict
        if self.seeds and not math.isfinite(self.mean):
            return "cannot tell: not all values are finite"
        if self.seeds < FEWEST:
            return f"cannot tell: {_seeds(FEWEST - self.seeds)} more at least"
        if self.more_seeds is None:
            return f"cannot tell: not with {MOST} seeds" if self.mean else "no difference seen"
        return f"cannot tell: about {_seeds(self.more_seeds)} more would"


def paired(values: Sequence[float], baseline: Sequence[float], higher_is_better: bool | None) -> Difference:
    """Compare values with a baseline, entry i of both being of one seed; the order of the seeds is of no account."""
    differences = [float(x) - float(y) for x, y in zip(values, baseline, strict=True)]
    count, nan = len(differences), math.nan
    if not differences or not all(map(math.isfinite, differences)):
        return Difference(count, sum(differences) if differences else nan, nan, nan, nan, nan, "cannot tell", None)
    # Scaled by a power of two, which costs no digit, so that no square overflows or vanishes.
    largest = max(map(abs, differences))
    exponent = math.frexp(largest)[1]
    scaled = np.sort([math.ldexp(difference, -exponent) for difference in differences])
    mean = math.ldexp(centre := math.fsum(scaled) / count, exponent)
    if count < FEWEST:
        return Difference(count, mean, nan, nan, nan, nan, "cannot tell", None)
    noise = ROUNDING * max(abs(float(value)) for value in (*values, *baseline))
    if largest <= noise:  # equal but for rounding
        return Difference(count, 0.0, 0.0, 0.0, 1.0, nan, "cannot tell", None, 0.0)
    deviation = float(np.std(scaled if centre > 0 else -scaled[::-1], ddof=1))
    if deviation <= math.ldexp(noise, -exponent) < abs(centre):  # every seed differs by the same
        return Difference(count, mean, mean, mean, 0.0, nan, _verdict(mean, higher_is_better), None, 0.0)
    effect = centre / deviation
    error = math.ldexp(deviation / math.sqrt(count), exponent)
    p = float(2 * stats.t.sf(abs(effect) * math.sqrt(count), count - 1))
    low, high = (math.ldexp(end, exponent) for end in _bootstrap(scaled))
    if p < LEVEL:
        return Difference(count, mean, low, high, p, effect, _verdict(mean, higher_is_better), None, error)
    needed = seeds_needed(effect)
    more = None if needed is None else max(1, needed - count)
    return Difference(count, mean, low, high, p, effect, "cannot tell", more, error)


def seeds_needed(effect: float) -> int | None:
    """Fewest seeds with which a paired t-test finds an effect of this size with 80 % power; None: more than MOST.

    The effect is an estimate and so is this: about.
    """
    counts = np.arange(FEWEST, MOST + 1)
    enough = _power(effect, counts) >= POWER  # NaN, as scipy has it far beyond the answer, is not enough
    return int(counts[enough.argmax()]) if enough.any() else None


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, by Holm's steps; NaN stays, and is not counted."""
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted = [math.nan] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = highest
    return adjusted


def _seeds(count: int) -> str:
    return f"{count} seed" if count == 1 else f"{count} seeds"


def _verdict(mean: float, higher_is_better: bool | None) -> str:
    if higher_is_better is None:
        return "differs"
    return "better" if (mean > 0) == higher_is_better else "worse"


def _power(effect: float, count: np.ndarray) -> np.ndarray:
    """Of the two-sided t-test: the far tail of the noncentral t, both sides."""
    critical = stats.t.ppf(1 - LEVEL / 2, count - 1)
    centre = min(abs(effect), 100.0) * np.sqrt(count)  # beyond, the power is 1 and scipy has no answer
    found: np.ndarray = stats.nct.sf(critical, count - 1, centre) + stats.nct.cdf(-critical, count - 1, centre)
    return found


def _bootstrap(ordered: np.ndarray) -> tuple[float, float]:
    """BCa interval of the mean; the same differences give the same interval, and mirrored ones the mirrored one."""
    mirrored = -ordered[::-1]
    flipped = mirrored.tolist() > ordered.tolist()
    sample = mirrored if flipped else ordered
    found = stats.bootstrap(
        (sample,),
        _rounded_mean,
        n_resamples=RESAMPLES,
        confidence_level=1 - LEVEL,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(0),  # the same results give the same table
    ).confidence_interval
    low, high = max(float(found.low), sample[0]), min(float(found.high), sample[-1])  # rounded means may lie beyond
    return (-high, -low) if flipped else (low, high)


def _rounded_mean(sample: np.ndarray, axis: int) -> np.ndarray:
    """Of a few seeds many resamples have one mean: BCa counts them, and their rounding must not tell them apart."""
    means: np.ndarray = np.mean(sample, axis=axis)
    return np.round(means, 12)
