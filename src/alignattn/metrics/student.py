"""Student's t distribution and Welch's test, in torch alone.

    t = (x̄ - ȳ) / sqrt(u + v),    u = s_x²/n_x,  v = s_y²/n_y,    df = (u + v)² / (u²/(n_x - 1) + v²/(n_y - 1))
    p = P(|T| >= |t|) = I_{df/(df + t²)}(df/2, 1/2)

Welch 1947. I is the regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8),
evaluated as Lentz does with Thompson and Barnett's changes. s² has n - 1 below. With no variance on either side p is
0 where the means differ and 1 where they don't.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from alignattn.errors import ConfigError, ShapeError, checked
from alignattn.metrics.inputs import check_length, check_real, exact

FRACTION_STEPS = 3_000  # some sqrt(df) are needed; at the end the error is below 1e-10 up to df = 1e7
STIRLING_ABOVE = 40.0  # from here the series for log Gamma(a + 1/2) - log Gamma(a) is exact to float64


def _check_statistic(t: Any, df: Any) -> None:
    for name, value in (("t", t), ("df", df)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isnan().any()):
            raise ConfigError(f"{name} must be a floating-point tensor without NaN.")
    if t.shape != df.shape:
        raise ShapeError(f"t {tuple(t.shape)} and df {tuple(df.shape)} must have one shape.")
    if bool((df <= 0).any()) or bool(df.isinf().any()):
        raise ConfigError("df, the degrees of freedom, must be > 0 and finite.")


@checked(_check_statistic)
def student_p_value(t: Float[Tensor, "*shape"], df: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Two-sided p-value of the statistic `t` with `df` degrees of freedom."""
    t, df = exact(t).abs(), exact(df)
    a, odds = df / 2, (t / df.sqrt()).square()
    inside, outside = 1 / (1 + odds), torch.where(odds > 1, 1 / (1 + 1 / odds), odds / (1 + odds))
    # log x^a (1-x)^(1/2) / B(a, 1/2), with x = 1 / (1 + odds)
    log_front = -a * torch.log1p(odds) + outside.log() / 2 + _log_gamma_step(a) - math.log(math.pi) / 2
    front, half = log_front.exp(), torch.full_like(a, 0.5)
    tail = inside < (a + 1) / (a + 2.5)  # there the fraction for I converges fast, elsewhere that for 1 - I
    first, second = torch.where(tail, a, half), torch.where(tail, half, a)
    part = front * _beta_fraction(first, second, torch.where(tail, inside, outside)) / first
    return torch.where(tail, part, 1 - part).clamp(0.0, 1.0)


def _check_samples(first: Any, second: Any) -> None:
    for name, value in (("first", first), ("second", second)):
        check_real(name, value, "s n")
        if len(value) < 2:
            raise ShapeError(f"{name} has one sample, and a variance needs two. Draw more, the paper draws 20.")
    check_length("first", first.shape[1], "second", second.shape[1])


@checked(_check_samples)
def welch_p_value(first: Float[Tensor, "s n"], second: Float[Tensor, "r n"]) -> Float[Tensor, " n"]:
    """Two-sided p-values of n tests: have s samples of `first` and r of `second` one mean?"""
    means, errors = [], []
    for value in (exact(first), exact(second).to(first.device)):
        shifted = value - value[0]  # equal samples give exact zeros, which a rounded mean would not
        means.append(value[0] + shifted.mean(0))
        errors.append(shifted.var(0) / len(value))
    difference, error = means[0] - means[1], errors[0] + errors[1]  # (n)
    still = error == 0
    share = errors[0] / error.masked_fill(still, 1.0)  # as a share, since squares of small variances vanish
    df = 1 / (share.square() / (len(first) - 1) + (1 - share).square() / (len(second) - 1))
    p_value = student_p_value(difference / error.masked_fill(still, 1.0).sqrt(), df)
    return torch.where(still, exact(difference == 0), p_value)


def _log_gamma_step(a: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Log of Gamma(a + 1/2) / Gamma(a); of large `a` by a series, since the difference of large logs is rough."""
    series = a.log() / 2 - 1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5) + 17 / (14336 * a**7)
    return torch.where(a > STIRLING_ABOVE, series, torch.lgamma(a + 0.5) - torch.lgamma(a))


def _beta_fraction(
    a: Float[Tensor, "*shape"], b: Float[Tensor, "*shape"], x: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """1 / (1 + d_1 / (1 + d_2 / ...)) of Abramowitz and Stegun 26.5.8, two terms a step."""
    tiny, settled = 1e-300, 1e-14  # a factor of a step rounds by some 1e-15, and nearer to one it may never come

    def kept(value: Tensor) -> Tensor:
        return torch.where(value.abs() < tiny, torch.full_like(value, tiny), value)

    upper, lower = torch.ones_like(x), 1 / kept(1 - (a + b) * x / (a + 1))
    result = lower
    for m in range(1, FRACTION_STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            lower, upper = 1 / kept(1 + term * lower), kept(1 + term / upper)
            result = result * lower * upper
        if bool(((lower * upper - 1).abs() < settled).all()):
            break
    return result
