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


@dataclass(frozen=True)
class Difference:
    """What one kind of attention makes different from another, paired over seeds."""

    seeds: int  # that both have
    mean: float
    low: float  # 95 % bootstrap interval; NaN with fewer than three seeds
    high: float
    p: float  # paired t-test; NaN likewise
    effect: float  # mean over deviation of the differences (Cohen's d_z); NaN where there is no deviation
    verdict: str  # "better", "worse", "differs" where neither is good, or "cannot tell"
    more_seeds: int | None  # about how many more would tell; None: told already, or more than MOST

    def in_words(self) -> str:
        """The verdict as a sentence."""
        if self.verdict != "cannot tell":
            return self.verdict
        if self.seeds < FEWEST:
            return f"cannot tell: {_seeds(FEWEST - self.seeds)} more at least"
        if self.more_seeds is None:
            return f"cannot tell: not with {MOST} seeds" if self.mean else "no difference seen"
        return f"cannot tell: about {_seeds(self.more_seeds)} more would"


def paired(values: Sequence[float], baseline: Sequence[float], higher_is_better: bool | None) -> Difference:
    """Compare values with a baseline, entry i of both being of one seed."""
    differences = np.subtract(np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64))
    count, mean = len(differences), float(differences.mean())
    nan = math.nan
    if count < FEWEST or not np.isfinite(differences).all():
        return Difference(count, mean, nan, nan, nan, nan, "cannot tell", None)
    deviation = float(differences.std(ddof=1))
    if deviation <= 1e-9 * max(abs(mean), float(np.abs(values).max()), 1e-300):  # equal but for rounding
        same = abs(mean) <= 1e-9 * max(float(np.abs(values).max()), 1e-300)
        verdict = "cannot tell" if same else _verdict(mean, higher_is_better)
        return Difference(count, 0.0 if same else mean, mean, mean, 1.0 if same else 0.0, nan, verdict, None)
    p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    effect = mean / deviation
    low, high = _bootstrap(differences)
    if p < LEVEL:
        return Difference(count, mean, low, high, p, effect, _verdict(mean, higher_is_better), None)
    needed = seeds_needed(effect)
    more = None if needed is None else max(1, needed - count)
    return Difference(count, mean, low, high, p, effect, "cannot tell", more)


def seeds_needed(effect: float) -> int | None:
    """Fewest seeds with which a paired t-test finds an effect of this size with 80 % power; None: more than MOST.

    The effect is an estimate and so is this: about.
    """
    if effect == 0 or not math.isfinite(effect):
        return None
    # From below: far beyond the answer scipy's noncentral t gives NaN.
    return next((count for count in range(FEWEST, MOST + 1) if _power(effect, count) >= POWER), None)


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


def _power(effect: float, count: int) -> float:
    """Of the two-sided t-test: the far tail of the noncentral t, both sides."""
    critical = stats.t.ppf(1 - LEVEL / 2, count - 1)
    centre = abs(effect) * math.sqrt(count)
    return float(stats.nct.sf(critical, count - 1, centre) + stats.nct.cdf(-critical, count - 1, centre))


def _bootstrap(differences: np.ndarray) -> tuple[float, float]:
    found = stats.bootstrap(
        (differences,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=0.95,
        method="BCa",
        vectorized=True,
        rng=np.random.default_rng(0),  # the same results give the same table
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
