"""ECE, reliability bins, Brier score and likelihood against arithmetic by hand, naive loops and scikit-learn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss

from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import brier_score, expected_calibration_error, negative_log_likelihood, reliability_bins

METRICS = [expected_calibration_error, reliability_bins, brier_score, negative_log_likelihood]
FOUR = torch.tensor([[0.95, 0.05], [0.97, 0.03], [0.35, 0.65], [0.25, 0.75]], dtype=torch.float64)
FOUR_LABELS = torch.tensor([0, 1, 1, 1])  # right, wrong, right, right


def random_problem(n=200, c=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    probability = (2 * torch.randn(n, c, generator=generator, dtype=torch.float64)).softmax(-1)
    return probability.to(dtype), torch.randint(0, c, (n,), generator=generator)


def ece_by_loops(probability, label, bins):
    groups = [[] for _ in range(bins)]
    for row, y in zip(probability.tolist(), label.tolist(), strict=True):
        confidence = max(row)
        inside = [g for g in range(bins) if g / bins <= confidence < (g + 1) / bins]
        groups[inside[0] if inside else bins - 1].append((confidence, row.index(confidence) == y))
    total = 0.0
    for group in groups:
        if group:
            conf = sum(c for c, _ in group) / len(group)
            acc = sum(hit for _, hit in group) / len(group)
            total += len(group) / len(label) * abs(acc - conf)
    return 100 * total


def test_ece_of_four_samples():
    # bin [0.9, 1.0]: 0.95 right, 0.97 wrong: acc 1/2, conf 0.96, gap 0.46, weight 2/4
    # bin [0.6, 0.7): 0.65 right: gap 0.35, weight 1/4;    bin [0.7, 0.8): 0.75 right: gap 0.25, weight 1/4
    expected = 100 * (2 / 4 * 0.46 + 1 / 4 * 0.35 + 1 / 4 * 0.25)
    assert expected == pytest.approx(38.0)
    assert expected_calibration_error(FOUR, FOUR_LABELS) == pytest.approx(expected, abs=1e-12)


def test_reliability_bins_of_four_samples():
    bins = reliability_bins(FOUR, FOUR_LABELS)
    assert bins.edges.tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert bins.count.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0, 2]
    assert bins.confidence[[6, 7, 9]].tolist() == pytest.approx([0.65, 0.75, (0.95 + 0.97) / 2])
    assert bins.accuracy[[6, 7, 9]].tolist() == pytest.approx([1.0, 1.0, 1 / 2])
    empty = bins.count == 0
    assert bins.confidence[empty].isnan().all() and bins.accuracy[empty].isnan().all()


def test_two_confidences_in_one_bin_may_cancel_and_in_two_bins_do_not():
    probability = torch.tensor([[0.55, 0.45], [0.65, 0.35]], dtype=torch.float64)
    label = torch.tensor([0, 1])  # right, wrong
    # one bin: acc 1/2, conf 0.6;    ten bins: (|1 - 0.55| + |0 - 0.65|) / 2
    assert expected_calibration_error(probability, label, bins=1) == pytest.approx(100 * abs(1 / 2 - 0.6))
    assert expected_calibration_error(probability, label) == pytest.approx(100 * (0.45 + 0.65) / 2)


@pytest.mark.parametrize(("confidence", "index"), [(0.5, 5), (0.6, 6), (0.7, 7), (0.9, 9), (1.0, 9), (0.8999, 8)])
def test_a_bin_holds_its_lower_edge_and_the_last_one_also_one(confidence, index):
    probability = torch.tensor([[confidence, 1 - confidence]], dtype=torch.float64)
    count = reliability_bins(probability, torch.tensor([0])).count
    assert count.nonzero().flatten().tolist() == [index]


def test_certain_and_right_is_zero_and_certain_and_wrong_is_hundred_percent():
    probability = torch.eye(3, dtype=torch.float64)
    assert expected_calibration_error(probability, torch.tensor([0, 1, 2])) == 0.0
    assert expected_calibration_error(probability, torch.tensor([1, 2, 0])) == 100.0


def test_of_equal_probabilities_the_first_class_is_predicted():
    probability = torch.tensor([[0.5, 0.5]])
    assert reliability_bins(probability, torch.tensor([0])).accuracy[5] == 1.0
    assert reliability_bins(probability, torch.tensor([1])).accuracy[5] == 0.0


@pytest.mark.parametrize("bins", [1, 7, 10, 15])
@pytest.mark.parametrize("c", [2, 4])
def test_ece_is_that_of_naive_loops(bins, c):
    probability, label = random_problem(c=c, seed=bins)
    expected = ece_by_loops(probability, label, bins)
    assert expected_calibration_error(probability, label, bins=bins) == pytest.approx(expected, abs=1e-10)


def test_brier_score_by_hand():
    probability = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]], dtype=torch.float64)
    label = torch.tensor([0, 2])
    first, second = (0.7 - 1) ** 2 + 0.2**2 + 0.1**2, 0.5**2 + (0.5 - 1) ** 2
    assert brier_score(probability, label) == pytest.approx((first + second) / 2, abs=1e-15)
    assert brier_score(torch.eye(2), torch.tensor([1, 0])) == 2.0
    assert brier_score(torch.eye(2), torch.tensor([0, 1])) == 0.0


def test_brier_score_leaves_its_input_alone():
    probability, label = random_problem(n=5)
    before = probability.clone()
    brier_score(probability, label)
    assert torch.equal(probability, before)


def test_negative_log_likelihood_by_hand():
    probability = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)
    expected = -(math.log(0.5) + math.log(0.25)) / 2
    assert negative_log_likelihood(probability, torch.tensor([0, 1])) == pytest.approx(expected, abs=1e-15)


def test_an_impossible_label_has_infinite_negative_log_likelihood_and_a_sure_one_zero():
    assert negative_log_likelihood(torch.eye(2), torch.tensor([0, 0])) == math.inf
    sure = negative_log_likelihood(torch.eye(2), torch.tensor([0, 1]))
    assert sure == 0.0 and math.copysign(1, sure) == 1


@pytest.mark.parametrize("seed", range(3))
def test_brier_and_likelihood_agree_with_scikit_learn(seed):
    probability, label = random_problem(seed=seed)
    classes = list(range(4))
    brier = brier_score_loss(label.numpy(), probability.numpy(), labels=classes, scale_by_half=False)
    assert brier_score(probability, label) == pytest.approx(brier, abs=1e-12)
    loss = log_loss(label.numpy(), probability.numpy(), labels=classes)
    assert negative_log_likelihood(probability, label) == pytest.approx(loss, abs=1e-12)


def test_two_classes_have_twice_scikit_learns_binary_brier_score():
    probability, label = random_problem(c=2)
    binary = brier_score_loss(label.numpy(), probability[:, 1].numpy(), pos_label=1)
    assert brier_score(probability, label) == pytest.approx(2 * binary, abs=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 5))
def test_order_of_samples_changes_nothing_and_ranges_hold(seed, n, c):
    probability, label = random_problem(n, c, seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for metric, top in ((expected_calibration_error, 100), (brier_score, 2), (negative_log_likelihood, math.inf)):
        value = metric(probability, label)
        assert -1e-12 <= value <= top + 1e-9
        assert metric(probability[order], label[order]) == pytest.approx(value, abs=1e-9)
    assert reliability_bins(probability, label).count.sum() == n


@given(st.integers(0, 10_000))
def test_the_calibration_gap_is_at_least_that_of_the_means(seed):
    probability, label = random_problem(50, 3, seed)
    confidence, prediction = probability.max(-1)
    gap = 100 * abs((prediction == label).double().mean() - confidence.mean()).item()
    assert expected_calibration_error(probability, label) >= gap - 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", [expected_calibration_error, brier_score, negative_log_likelihood])
def test_low_precision_input_is_computed_in_float64(metric, dtype):
    probability, label = random_problem(n=2000, dtype=dtype)
    assert metric(probability, label) == pytest.approx(metric(probability.double(), label), abs=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("integer", [torch.int32, torch.int64, torch.uint8])
def test_probabilities_with_a_gradient_and_any_integer_labels_are_taken(metric, integer):
    probability, label = random_problem(n=5)
    result = metric(probability.requires_grad_(), label.to(integer))
    assert isinstance(result, float) or not result.confidence.requires_grad


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("probability", "label", "error", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), ShapeError, "is empty"),
        (torch.tensor([0.5, 0.5]), torch.tensor([0]), ShapeError, r"must be \[n c\], got shape \(2,\)"),
        (torch.tensor([[1, 0]]), torch.tensor([0]), ShapeError, "floating point, got torch.int64"),
        ([[1.0, 0.0]], torch.tensor([0]), ShapeError, "must be a tensor .* got list"),
        (torch.tensor([[1.2, -0.2]]), torch.tensor([0]), ConfigError, "between 0 and 1, got -0.2 to 1.2"),
        (torch.tensor([[0.5, 0.6]]), torch.tensor([0]), ConfigError, "one row sums to 1.1"),
        (torch.tensor([[0.5, 0.5], [0.2, 0.2]]), torch.tensor([0, 0]), ConfigError, "one row sums to 0.4"),
        (torch.tensor([[float("nan"), 1.0]]), torch.tensor([0]), ConfigError, "1 values that are NaN"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), ConfigError, "label 2 is out of range: there are 2 classes"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), ConfigError, "label -1 is below zero"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), ShapeError, "label must be integers"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([True]), ShapeError, "label must be integers"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), ShapeError, "label has 2 samples and probability has 1"),
    ],
)
def test_bad_input_is_refused_with_a_reason(metric, probability, label, error, message):
    with pytest.raises(error, match=message):
        metric(probability, label)


def test_the_advice_to_take_a_softmax_helps():
    logits, label = torch.tensor([[3.0, -1.0]]), torch.tensor([0])
    with pytest.raises(ConfigError, match="Logits need a softmax first"):
        brier_score(logits, label)
    assert brier_score(logits.softmax(-1), label) > 0


@pytest.mark.parametrize("bins", [0, -1, 2.5, True, "10"])
@pytest.mark.parametrize("metric", [expected_calibration_error, reliability_bins])
def test_bins_must_be_a_whole_number(metric, bins):
    with pytest.raises(ConfigError, match="bins must be a whole number > 0"):
        metric(FOUR, FOUR_LABELS, bins=bins)
