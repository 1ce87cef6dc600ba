"""Student's t and Welch's test against closed forms and scipy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import student_p_value, welch_p_value

DOUBLE = torch.float64


def p_value(t, df):
    return student_p_value(torch.as_tensor(t, dtype=DOUBLE), torch.as_tensor(df, dtype=DOUBLE))


def test_closed_forms_of_one_and_two_degrees_of_freedom():
    t = np.geomspace(1e-6, 1e6, 200)
    one = 2 / math.pi * np.arctan(1 / t)  # Cauchy
    assert p_value(t, np.full(200, 1.0)).numpy() == pytest.approx(one, rel=1e-12)
    two = 2 / (2 + t**2 + t * np.sqrt(2 + t**2))  # 1 - t / sqrt(2 + t²), without cancellation
    assert p_value(t, np.full(200, 2.0)).numpy() == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize("df", [0.3, 1.5, 3.0, 19.0, 27.4, 38.0, 79.9, 80.1, 200.0, 1e3, 1e5])
def test_agrees_with_scipy(df):
    t = np.concatenate([np.geomspace(1e-8, 1e3, 300), np.linspace(0.5, 5, 100)])
    expected = 2 * stats.t.sf(t, df)
    actual = p_value(t, np.full(400, df)).numpy()
    assert actual == pytest.approx(expected, abs=1e-12, rel=0)
    shown = expected > 1e-280
    assert actual[shown] == pytest.approx(expected[shown], rel=1e-10, abs=0)


def test_each_entry_has_its_own_degrees_of_freedom_and_the_shape_stays():
    t, df = torch.linspace(-4, 4, 12, dtype=DOUBLE).view(3, 4), torch.linspace(1, 60, 12, dtype=DOUBLE).view(3, 4)
    assert p_value(t, df).numpy() == pytest.approx(2 * stats.t.sf(t.abs().numpy(), df.numpy()), abs=1e-10)


def test_zero_is_no_evidence_and_infinity_is_proof():
    assert p_value([0.0, math.inf, -math.inf, 1e200], [5.0] * 4).tolist() == [1.0, 0.0, 0.0, 0.0]


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0.5, 200))
def test_even_in_t_falling_in_it_and_a_probability(t, other, df):
    low, high = sorted((t, other))
    p = p_value([low, high, -low], [df] * 3).tolist()
    assert 0 <= p[1] <= p[0] + 1e-13 <= 1 + 1e-13 and p[2] == p[0]


def test_welch_by_hand():
    first = torch.tensor([[0.1], [0.2], [0.3]], dtype=DOUBLE)  # mean 0.2, s² = 0.01
    second = torch.tensor([[0.4], [0.6], [0.8]], dtype=DOUBLE)  # mean 0.6, s² = 0.04
    u, v = 0.01 / 3, 0.04 / 3
    t = (0.2 - 0.6) / math.sqrt(u + v)
    df = (u + v) ** 2 / (u**2 / 2 + v**2 / 2)  # 50 / 17
    assert df == pytest.approx(50 / 17)
    assert welch_p_value(first, second).item() == pytest.approx(2 * stats.t.sf(-t, df), abs=1e-12)


@pytest.mark.parametrize(("s", "r"), [(20, 20), (2, 2), (5, 30)])
@pytest.mark.parametrize("spread", [1e-6, 0.1, 3.0])
def test_welch_agrees_with_scipy(s, r, spread):
    generator = torch.Generator().manual_seed(s)
    first = torch.randn(s, 200, generator=generator, dtype=DOUBLE)
    second = spread * torch.randn(r, 200, generator=generator, dtype=DOUBLE) + 0.5
    expected = stats.ttest_ind(first.numpy(), second.numpy(), axis=0, equal_var=False).pvalue
    assert welch_p_value(first, second).numpy() == pytest.approx(expected, abs=1e-10, rel=0)
    assert welch_p_value(second, first).numpy() == pytest.approx(expected, abs=1e-10, rel=0)


def test_without_variance_p_is_zero_where_means_differ_and_one_where_they_do_not():
    first, second = (
        torch.tensor([[0.1, 0.1, 0.7]] * 20, dtype=DOUBLE),
        torch.tensor([[0.1, 0.3, 0.1]] * 20, dtype=DOUBLE),
    )
    assert welch_p_value(first, second).tolist() == [1.0, 0.0, 0.0]


def test_variance_on_one_side_alone():
    first, second = torch.tensor([[0.1], [0.2], [0.4]], dtype=DOUBLE), torch.full((3, 1), 0.3, dtype=DOUBLE)
    expected = stats.ttest_1samp(first[:, 0].numpy(), 0.3).pvalue  # df = 2, the error is that of the first
    assert welch_p_value(first, second).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-120, 1e-30, 1e100])
def test_welch_is_blind_to_scale(scale):
    first = torch.tensor([[0.1], [0.2], [0.35]], dtype=DOUBLE)
    second = torch.tensor([[0.4], [0.6], [0.8]], dtype=DOUBLE)
    expected = welch_p_value(first, second).item()
    assert welch_p_value(scale * first, scale * second).item() == pytest.approx(expected, rel=1e-9)


def test_bad_statistics_are_refused_with_a_reason():
    with pytest.raises(ConfigError, match="t must be a floating-point tensor without NaN"):
        p_value([math.nan], [1.0])
    with pytest.raises(ConfigError, match="df, the degrees of freedom, must be > 0"):
        p_value([1.0], [0.0])
    with pytest.raises(ShapeError, match="must have one shape"):
        p_value([1.0], [1.0, 2.0])


def test_bad_samples_are_refused_with_a_reason():
    with pytest.raises(ShapeError, match="second has one sample, and a variance needs two"):
        welch_p_value(torch.zeros(2, 1), torch.zeros(1, 1))
    with pytest.raises(ShapeError, match="first has 2 samples and second has 3"):
        welch_p_value(torch.zeros(2, 2), torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="first holds 2 values that are NaN"):
        welch_p_value(torch.full((2, 1), math.nan), torch.zeros(2, 1))
