"""PAvPU against arithmetic by hand and scipy's Welch test in naive loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import certain, pavpu, pavpu_of, soft_pavpu, vqa_accuracy

DOUBLE = torch.float64
# Three posterior samples of four predictions over two classes. First class:
#   0.90 0.91 0.92   far from 0.10 0.09 0.08: certain
#   0.20 0.50 0.86   mean 0.52 against 0.48, spread by 0.33: uncertain
# The third and fourth prediction repeat the two.
FIRST = torch.tensor([[0.90, 0.20, 0.90, 0.20], [0.91, 0.50, 0.91, 0.50], [0.92, 0.86, 0.92, 0.86]], dtype=DOUBLE)
FOUR = torch.stack([FIRST, 1 - FIRST], -1)


def random_samples(s=20, n=60, c=5, seed=0, noise=0.7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, c, generator=generator, dtype=DOUBLE)
    logits = logits + noise * torch.randn(s, n, c, generator=generator, dtype=DOUBLE)
    return logits.softmax(-1), torch.randint(0, c, (n,), generator=generator)


def pavpu_by_loops(samples, accuracy_of, threshold):
    counts = dict.fromkeys(("ac", "au", "ic", "iu"), 0.0)
    for i in range(samples.shape[1]):
        mean = samples[:, i].mean(0)
        order = np.argsort(-mean)
        p = stats.ttest_ind(samples[:, i, order[0]], samples[:, i, order[1]], equal_var=False).pvalue
        accuracy, which = accuracy_of(i, order[0]), "c" if p < threshold else "u"
        counts["a" + which] += accuracy
        counts["i" + which] += 1 - accuracy
    return (counts["ac"] + counts["iu"]) / sum(counts.values())


def test_plain_form_of_four_predictions():
    assert certain(FOUR).tolist() == [True, False, True, False]
    # all predict class 0; the labels make one of each: accurate certain, accurate uncertain, and both inaccurate
    n_ac, n_au, n_ic, n_iu = 1, 1, 1, 1
    assert pavpu(FOUR, torch.tensor([0, 0, 1, 1])) == (n_ac + n_iu) / (n_ac + n_au + n_ic + n_iu)
    # right where certain, wrong where uncertain: n_ac = 2, n_iu = 2
    assert pavpu(FOUR, torch.tensor([0, 1, 0, 1])) == 1.0
    # n_au = 2, n_ic = 2
    assert pavpu(FOUR, torch.tensor([1, 0, 1, 0])) == 0.0
    # n_ac = 2, n_au = 1, n_iu = 1
    assert pavpu(FOUR, torch.tensor([0, 0, 0, 1])) == 3 / 4


def test_soft_form_of_four_predictions():
    votes = torch.tensor([[2, 8], [1, 9], [10, 0], [0, 10]])  # of the predicted answer: 2, 1, 10, 0
    acc = [2 / 3, 1 / 3, 1.0, 0.0]
    cer = [1, 0, 1, 0]
    n_ac = sum(a * c for a, c in zip(acc, cer, strict=True))  # 2/3 + 1
    n_iu = sum((1 - a) * (1 - c) for a, c in zip(acc, cer, strict=True))  # 2/3 + 1
    assert soft_pavpu(FOUR, vqa_accuracy(votes)) == pytest.approx((n_ac + n_iu) / 4, abs=1e-15)


def test_three_humans_make_an_answer_right():
    votes = torch.tensor([[0, 1, 2, 3, 10]])
    assert vqa_accuracy(votes)[0].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("s", [2, 20])
def test_agrees_with_scipy_in_loops(seed, threshold, s):
    samples, label = random_samples(s=s, seed=seed)
    plain = pavpu_by_loops(samples.numpy(), lambda i, c: float(label[i] == c), threshold)
    assert pavpu(samples, label, threshold=threshold) == pytest.approx(plain, abs=1e-12)
    share = torch.rand(samples.shape[1:], dtype=DOUBLE)
    soft = pavpu_by_loops(samples.numpy(), lambda i, c: share[i, c].item(), threshold)
    assert soft_pavpu(samples, share, threshold=threshold) == pytest.approx(soft, abs=1e-12)


def test_without_variance_it_is_certain_when_the_means_differ():
    row = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.4, 0.2], [1 / 3, 1 / 3, 1 / 3]], dtype=DOUBLE)
    samples = row.expand(20, 3, 3)
    assert certain(samples).tolist() == [True, False, False]
    # right and certain, wrong and uncertain (class 0 of the tie is predicted), right and uncertain
    assert pavpu(samples, torch.tensor([0, 1, 0])) == pytest.approx(2 / 3)


def test_the_classes_compared_are_those_of_highest_mean_not_of_any_one_sample():
    # means 0.5, 0.3, 0.2; in the first sample the last class leads
    samples = torch.tensor([[[0.3, 0.3, 0.4]], [[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]]], dtype=DOUBLE)
    p = stats.ttest_1samp([0.3, 0.6, 0.6], 0.3).pvalue  # 0.18; the second class does not vary
    assert certain(samples, threshold=p * 1.001).item() and not certain(samples, threshold=p * 0.999).item()


def test_certainty_needs_p_below_the_threshold():
    samples, _ = random_samples()
    counts = [int(certain(samples, threshold=threshold).sum()) for threshold in (1e-6, 0.01, 0.05, 0.5, 0.999)]
    assert counts == sorted(counts) and counts[0] < counts[-1]


@given(st.integers(0, 10_000))
def test_order_of_samples_predictions_and_classes_changes_nothing(seed):
    samples, label = random_samples(s=4, n=6, c=3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    value = pavpu(samples, label)
    draws, order, classes = (torch.randperm(size, generator=generator) for size in (4, 6, 3))
    assert pavpu(samples[draws], label) == value
    assert pavpu(samples[:, order], label[order]) == pytest.approx(value)
    assert pavpu(samples[..., classes], classes.argsort()[label]) == value


def test_batches_joined_are_the_whole():
    samples, label = random_samples()
    certainty = torch.cat([certain(part) for part in samples.split(13, dim=1)])
    hit = (samples.mean(0).argmax(-1) == label).double()
    assert pavpu_of(hit, certainty) == pytest.approx(pavpu(samples, label), abs=1e-15)


def test_soft_form_with_all_or_nothing_accuracy_is_the_plain_one():
    samples, label = random_samples()
    one_hot = torch.nn.functional.one_hot(label, 5).double()
    assert soft_pavpu(samples, one_hot) == pavpu(samples, label)


def test_soft_form_takes_sigmoids_that_do_not_sum_to_one_and_the_plain_form_does_not():
    samples = torch.rand(5, 3, 4)
    assert 0 <= soft_pavpu(samples, torch.rand(3, 4)) <= 1
    with pytest.raises(ConfigError, match="must sum to one"):
        pavpu(samples, torch.tensor([0, 1, 2]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_samples_are_tested_in_float64(dtype):
    samples, label = random_samples()
    samples = samples.to(dtype)
    assert torch.equal(certain(samples.requires_grad_()), certain(samples.detach().double()))
    assert 0 <= pavpu(samples, label) <= 1


LABEL = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("samples", "label", "error", "message"),
    [
        (FOUR[:1], LABEL, ShapeError, "one posterior sample, and a variance needs two"),
        (FOUR[..., :1], LABEL, ShapeError, "samples has one class"),
        (FOUR[:, :0], LABEL[:0], ShapeError, "samples .* is empty"),
        (FOUR[0], LABEL, ShapeError, r"samples must be \[s n c\]"),
        (FOUR * 2 - 1, LABEL, ConfigError, "between 0 and 1"),
        (FOUR / 2, LABEL, ConfigError, "one row sums to 0.5"),
        (FOUR * float("nan"), LABEL, ConfigError, "24 values that are NaN"),
        (FOUR, LABEL[:2], ShapeError, "label has 2 samples and samples has 4"),
        (FOUR, LABEL + 1, ConfigError, "label 2 is out of range"),
    ],
)
def test_bad_input_is_refused_with_a_reason(samples, label, error, message):
    with pytest.raises(error, match=message):
        pavpu(samples, label)


@pytest.mark.parametrize("threshold", [0, 1, -0.1, 5, float("nan")])
def test_threshold_must_be_a_probability(threshold):
    with pytest.raises(ConfigError, match="threshold must lie between 0 and 1"):
        certain(FOUR, threshold=threshold)


def test_bad_accuracies_are_refused_with_a_reason():
    with pytest.raises(ShapeError, match=r"answer_accuracy must be \[n, c\] = \(4, 2\), got \(4, 3\)"):
        soft_pavpu(FOUR, torch.zeros(4, 3))
    with pytest.raises(ConfigError, match="answer_accuracy must lie between 0 and 1, got 3 to 3"):
        soft_pavpu(FOUR, torch.full((4, 2), 3.0))  # votes, not accuracies
    with pytest.raises(ConfigError, match="votes must be >= 0"):
        vqa_accuracy(torch.tensor([[-1, 2]]))
    with pytest.raises(ShapeError, match="certainty must be bool"):
        pavpu_of(torch.ones(2), torch.ones(2))
    with pytest.raises(ShapeError, match="certainty has 3 samples and accuracy has 2"):
        pavpu_of(torch.ones(2), torch.ones(3, dtype=torch.bool))
