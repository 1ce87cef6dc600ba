"""Pearson and Spearman against arithmetic by hand and scipy."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from alignattn.errors import AlignmentWarning, ConfigError, ShapeError
from alignattn.metrics import pearson, spearman

METRICS = [pearson, spearman]
DOUBLE = torch.float64


def test_pearson_by_hand():
    prediction = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)  # less the mean 2: -1, 0, 1
    target = torch.tensor([1.0, 5.0, 3.0], dtype=DOUBLE)  # less the mean 3: -2, 2, 0
    expected = (-1 * -2 + 0 * 2 + 1 * 0) / (math.sqrt(1 + 0 + 1) * math.sqrt(4 + 4 + 0))  # 1 / 2
    assert pearson(prediction, target) == pytest.approx(expected, abs=1e-15)


def test_spearman_with_ties_by_hand():
    prediction = torch.tensor([10.0, 20.0, 20.0, 40.0], dtype=DOUBLE)  # ranks 1, 2.5, 2.5, 4: -1.5, 0, 0, 1.5
    target = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=DOUBLE)  # ranks 1, 2, 4, 3: -1.5, -0.5, 1.5, 0.5
    expected = (1.5 * 1.5 + 1.5 * 0.5) / math.sqrt((2 * 1.5**2) * (2 * 1.5**2 + 2 * 0.5**2))
    assert spearman(prediction, target) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_agrees_with_scipy(seed, ties):
    generator = torch.Generator().manual_seed(seed)
    prediction = torch.randn(100, generator=generator, dtype=DOUBLE)
    target = prediction + 3 * torch.randn(100, generator=generator, dtype=DOUBLE)
    if ties:
        prediction, target = prediction.round(), target.round()
    x, y = prediction.numpy(), target.numpy()
    assert pearson(prediction, target) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-13)
    assert spearman(prediction, target) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-13)


NUMBERS = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=30)


@given(NUMBERS, st.floats(0.1, 10), st.floats(-10, 10))
def test_symmetric_blind_to_scale_and_odd_in_each_side(pairs, scale, shift):
    prediction, target = (torch.tensor(side, dtype=DOUBLE) for side in zip(*pairs, strict=True))
    assume(len(prediction.unique()) > 1 and len(target.unique()) > 1)
    for metric in METRICS:
        value = metric(prediction, target)
        assert -1 <= value <= 1
        assert metric(target, prediction) == pytest.approx(value, abs=1e-12)
        assert metric(scale * prediction + shift, target) == pytest.approx(value, abs=1e-9)
        assert metric(-prediction, target) == pytest.approx(-value, abs=1e-12)
    assert spearman(prediction**3, target) == pytest.approx(spearman(prediction, target), abs=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_very_small_and_very_large_numbers(scale):
    prediction, target = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE), torch.tensor([1.0, 5.0, 3.0], dtype=DOUBLE)
    assert pearson(scale * prediction, target) == pytest.approx(0.5, abs=1e-12)


def test_a_large_offset_leaves_the_correlation():
    prediction, target = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE), torch.tensor([1.0, 5.0, 3.0], dtype=DOUBLE)
    assert pearson(prediction + 2**30, target) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e300, -3.7])
def test_a_constant_side_is_nan_with_a_warning_that_names_it(metric, value):
    constant, other = torch.full((7,), value, dtype=DOUBLE), torch.arange(7.0)
    with pytest.warns(AlignmentWarning, match="undefined, NaN: all 7 values of prediction are equal"):
        assert math.isnan(metric(constant, other))
    with pytest.warns(AlignmentWarning, match="all 7 values of target are equal"):
        assert math.isnan(metric(other, constant))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_any_real_type_is_computed_in_float64(metric, dtype):
    prediction = torch.tensor([1, 2, 4, 8, 9], dtype=dtype)
    target = torch.tensor([2.0, 1.0, 5.0, 5.0, 7.0], requires_grad=True)
    expected = metric(prediction.double(), target.double())
    assert metric(prediction, target) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("prediction", "target", "error", "message"),
    [
        (torch.zeros(0), torch.zeros(0), ShapeError, "prediction .* is empty"),
        (torch.zeros(1), torch.zeros(1), ShapeError, "at least two samples"),
        (torch.zeros(2), torch.zeros(3), ShapeError, "prediction has 2 samples and target has 3"),
        (torch.zeros(2, 1), torch.zeros(2), ShapeError, r"must be \[n\], got shape \(2, 1\)"),
        (torch.tensor([0.0, float("nan")]), torch.zeros(2), ConfigError, "prediction holds 1 values that are NaN"),
        (torch.zeros(2), torch.tensor([0.0, float("inf")]), ConfigError, "target holds 1 values"),
        (torch.tensor([True, False]), torch.zeros(2), ShapeError, "real numbers, got torch.bool"),
    ],
)
def test_bad_input_is_refused_with_a_reason(metric, prediction, target, error, message):
    with pytest.raises(error, match=message):
        metric(prediction, target)
