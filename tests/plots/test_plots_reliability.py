"""Reliability diagrams: heights of bars and strips, and the error in the title."""

import json

import pytest
import torch

from alignattn import plots
from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import expected_calibration_error, reliability_bins

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

from drawings import BINS
from matplotlib.colors import to_hex


def probabilities(seed: int, *, n: int = 400, c: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, generator=generator).softmax(-1), torch.randint(c, (n,), generator=generator)


def test_bars_are_accuracies_and_gaps_reach_to_the_confidence():
    (axis,) = plots.reliability({"soft": BINS})
    accuracy, gap = axis.containers
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in accuracy] == [
        (0.25, 0.25, 0.5),
        (0.75, 0.25, 0.7),
    ]
    for bar, low, high in zip(gap, (0.4, 0.7), (0.5, 0.9), strict=True):
        box = bar.get_bbox()
        assert (box.ymin, box.ymax) == pytest.approx((low, high))
    assert [to_hex(bar.patches[0].get_facecolor()) for bar in (accuracy, gap)] == ["#0072b2", "#e69f00"]
    (diagonal,) = axis.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert axis.get_xlim() == axis.get_ylim() == (0, 1)


def test_the_strip_counts_the_samples():
    (axis,) = plots.reliability({"soft": BINS})
    (strip,) = axis.child_axes
    assert [bar.get_height() for bar in strip.containers[0]] == [0, 10, 0, 30]
    assert strip.get_xlim() == axis.get_xlim()


def test_the_title_tells_the_calibration_error():
    # (10 · |0.5 - 0.4| + 30 · |0.7 - 0.9|) / 40 = 7/40
    (axis,) = plots.reliability({"soft": BINS})
    assert axis.get_title() == "soft\nECE 17.50 %  (n = 40)"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [1, 7, 10])
def test_the_error_is_that_of_the_metric_and_survives_json(seed, bins):
    probability, label = probabilities(seed)
    groups = vars(reliability_bins(probability, label, bins=bins))
    stored = json.loads(json.dumps({name: value.tolist() for name, value in groups.items()}))
    error = expected_calibration_error(probability, label, bins=bins)
    for axis in plots.reliability({"tensors": groups, "lists": stored}):
        assert axis.get_title().split("\n")[1] == f"ECE {error:.2f} %  (n = 400)"
        heights = [bar.get_height() for bar in axis.containers[0]]
        assert heights == [value for value in stored["accuracy"] if value == value]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"count": [0, 0, 0, 0]}, ConfigError, "hold no samples"),
        ({"count": [0, -1, 0, 30]}, ConfigError, "count >= 0"),
        ({"count": [0, 10, 30]}, ShapeError, "one value for each bin, and one edge more"),
        ({"edges": [0, 0.25, 0.5, 0.75]}, ShapeError, "one edge more"),
        ({"edges": [0, 0.5, 0.25, 0.75, 1]}, ConfigError, "must rise from 0 to 1"),
        ({"edges": [0, 25, 50, 75, 100]}, ConfigError, "must rise from 0 to 1"),
        ({"accuracy": [0, 50.0, 0, 70.0]}, ConfigError, r"accuracy of a bin with samples lies in \[0, 1\]"),
        ({"confidence": [0.1, float("nan"), 0.1, 0.9]}, ConfigError, "confidence of a bin with samples"),
        ({"count": 3}, ShapeError, "one value for each bin"),
    ],
)
def test_bins_that_cannot_be_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        plots.reliability({"a": BINS | change})


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match=r"'a' lack accuracy, edges. They need count, confidence, accuracy, edges"):
        plots.reliability({"a": {"count": [1], "confidence": [1.0]}})
    with pytest.raises(ConfigError, match=r"reliability\(\) got no panels"):
        plots.reliability({})


def test_the_bins_of_the_metric_are_refused_with_advice_that_works():
    bins = reliability_bins(*probabilities(0))
    with pytest.raises(ConfigError, match=r"got ReliabilityBins. For an object, vars\(bins\)"):
        plots.reliability({"a": bins})
    assert plots.reliability({"a": vars(bins)})
