"""Accuracy, F1 and Matthews against arithmetic by hand and scikit-learn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import accuracy, f1, matthews

METRICS = [accuracy, f1, matthews]
# TP = 2, FP = 1, FN = 1, TN = 4
PREDICTION = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
LABEL = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0])


def test_by_hand():
    tp, fp, fn, tn = 2, 1, 1, 4
    assert accuracy(PREDICTION, LABEL) == (tp + tn) / 8
    assert f1(PREDICTION, LABEL) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert matthews(PREDICTION, LABEL) == pytest.approx((tp * tn - fp * fn) / math.sqrt(product), abs=1e-15)


def test_the_other_class_as_positive_has_another_f1():
    assert f1(PREDICTION, LABEL, positive=0) == pytest.approx(2 * 4 / (2 * 4 + 1 + 1))


def test_matthews_of_three_classes_by_hand():
    prediction, label = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2, 1])
    # n 4, hits 3; predicted 1, 1, 2 times, true 1, 2, 1 times
    covariance = 4 * 3 - (1 * 1 + 1 * 2 + 2 * 1)
    spread = 4**2 - (1 + 1 + 4)
    assert matthews(prediction, label) == pytest.approx(covariance / spread, abs=1e-15)  # 7 / 10


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=40))
def test_agrees_with_scikit_learn(classes, pairs):
    prediction, label = (torch.tensor([value % classes for value in side]) for side in zip(*pairs, strict=True))
    p, y = prediction.numpy(), label.numpy()
    assert accuracy(prediction, label) == pytest.approx(accuracy_score(y, p), abs=1e-14)
    for positive in range(2):
        expected = f1_score(y == positive, p == positive, zero_division=0)
        assert f1(prediction, label, positive=positive) == pytest.approx(expected, abs=1e-14)
    constant = len(set(p.tolist())) == 1 or len(set(y.tolist())) == 1
    expected = 0.0 if constant else matthews_corrcoef(y, p)
    assert matthews(prediction, label) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30), st.permutations(range(4)))
def test_renaming_classes_and_swapping_sides_changes_no_matthews(pairs, names):
    prediction, label = (torch.tensor(side) for side in zip(*pairs, strict=True))
    value, renamed = matthews(prediction, label), torch.tensor(names)
    assert matthews(renamed[prediction], renamed[label]) == pytest.approx(value, abs=1e-12)
    assert matthews(label, prediction) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("constant", [0, 1])
def test_constant_predictions_have_matthews_zero(constant):
    assert matthews(torch.full_like(LABEL, constant), LABEL) == 0.0
    assert matthews(PREDICTION, torch.full_like(LABEL, constant)) == 0.0
    assert matthews(torch.full_like(LABEL, constant), torch.full_like(LABEL, constant)) == 0.0


def test_f1_without_any_positive_is_zero():
    nothing = torch.zeros(4, dtype=torch.long)
    assert f1(nothing, nothing) == 0.0
    assert f1(torch.ones_like(nothing), nothing) == 0.0
    assert f1(nothing, torch.ones_like(nothing)) == 0.0


def test_opposite_and_equal_predictions_are_the_ends_of_the_range():
    assert [metric(LABEL, LABEL) for metric in METRICS] == pytest.approx([1.0, 1.0, 1.0])
    assert [metric(1 - LABEL, LABEL) for metric in METRICS] == pytest.approx([0.0, 0.0, -1.0])


def test_many_samples_lose_no_precision():
    n = 500_000
    label = torch.arange(n) % 2
    prediction = label.clone()
    prediction[: n // 10] = 1 - prediction[: n // 10]  # 10% wrong, evenly: Matthews 1 - 2 * 0.1
    assert accuracy(prediction, label) == pytest.approx(0.9, abs=1e-15)
    assert matthews(prediction, label) == pytest.approx(0.8, abs=1e-12)


def test_integer_types_may_differ_and_small_ones_do_not_overflow():
    prediction, label = torch.full((300,), 1, dtype=torch.uint8), torch.ones(300, dtype=torch.int64)
    assert accuracy(prediction, label) == 1.0 and f1(prediction, label) == 1.0
    prediction[:100] = 200
    assert matthews(prediction, prediction.long()) == pytest.approx(1.0)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("prediction", "label", "error", "message"),
    [
        (torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long), ShapeError, "prediction .* is empty"),
        (torch.tensor([0, 1]), torch.tensor([0]), ShapeError, "prediction has 2 samples and label has 1"),
        (torch.tensor([0.0]), torch.tensor([0]), ShapeError, "prediction must be integers"),
        (torch.tensor([[0.3, 0.7]]), torch.tensor([0]), ShapeError, "prediction must be"),
        (torch.tensor([0]), torch.tensor([-100]), ConfigError, "label -100 is below zero. Leave out samples"),
        ([0], torch.tensor([0]), ShapeError, "prediction must be a tensor"),
    ],
)
def test_bad_input_is_refused_with_a_reason(metric, prediction, label, error, message):
    with pytest.raises(error, match=message):
        metric(prediction, label)


@pytest.mark.parametrize("positive", [-1, True, 1.0, "1"])
def test_positive_must_be_a_class(positive):
    with pytest.raises(ConfigError, match="positive must be the number of a class"):
        f1(PREDICTION, LABEL, positive=positive)
