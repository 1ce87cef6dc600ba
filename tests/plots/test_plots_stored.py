"""Pictures from result files: seeds put together, and what does not belong together refused."""

from dataclasses import replace

import pytest

from alignattn import plots
from alignattn.errors import DataError
from alignattn.metrics import reliability_bins
from alignattn.plots.stored import pooled_bins
from alignattn.results import Result

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
import torch
from drawings import map_of

EDGES = [0, 0.5, 1]


def result(method="soft", seed=0, weight=None, **details) -> Result:
    return Result(
        name="digits",
        recipe={},
        method=method,
        preset=None,
        weight=weight,
        reduction=None,
        alignment=None,
        seed=seed,
        metrics={},
        details=details,
        times={},
        peak_memory={},
        inputs={},
        versions={},
        commit=None,
        machine={},
        command="",
        finished="",
        error=None,
    )


def test_curves_are_one_run_a_seed_and_soft_attention_has_no_alignment_loss():
    runs = [
        result("ot", 0, 0.1, curve=[[10, 2.0, 0.2], [20, 1.0, 0.1]]),
        result("soft", 1, curve=[[10, 2.2, 0.0], [20, 1.1, 0.0]]),
        result("soft", 0, curve=[[10, 2.0, 0.0], [20, 1.3, 0.0]]),
        result("gan", 0, "auto:0.2", curve=[[10, 2.0, 0.2], [20, 1.0, 0.1]]),
    ]
    found = plots.stored_curves(runs)
    assert list(found) == ["soft", "ot 0.1", "gan auto:0.2"]
    assert found["soft"] == {"step": [10, 20], "task_loss": [[2.2, 1.1], [2.0, 1.3]]}
    assert found["ot 0.1"] == {"step": [10, 20], "task_loss": [[2.0, 1.0]], "alignment_loss": [[0.2, 0.1]]}
    task, align = plots.curves(found)
    np.testing.assert_allclose(task.lines[0].get_ydata(), [2.1, 1.2])
    assert len(task.lines) == 3 and len(align.lines) == 2


def test_distances_are_means_over_seeds():
    runs = [
        result(seed=0, mmd={"0": [1.0, 2.0], "1": [0.0, 0.0]}),
        result(seed=1, mmd={"0": [3.0, 4.0], "1": [0.0, 1.0]}),
    ]
    found = plots.stored_distances(runs)
    assert found == {"soft": {"0": [2.0, 3.0], "1": [0.0, 0.5]}}
    (axis,) = plots.distance_map(found)
    np.testing.assert_array_equal(map_of(axis).get_array(), [[2, 3], [0, 0.5]])


def test_bins_hold_the_samples_of_all_seeds():
    nan = float("nan")
    runs = [
        result(
            seed=0, reliability={"count": [0, 10], "confidence": [nan, 0.8], "accuracy": [nan, 0.5], "edges": EDGES}
        ),
        result(
            seed=1, reliability={"count": [0, 30], "confidence": [nan, 0.6], "accuracy": [nan, 0.9], "edges": EDGES}
        ),
    ]
    bins = plots.stored_bins(runs)["soft"]
    # (10 · 0.8 + 30 · 0.6) / 40 and (10 · 0.5 + 30 · 0.9) / 40
    assert bins["count"] == [0, 40] and bins["edges"] == EDGES
    assert bins["confidence"] == [pytest.approx(nan, nan_ok=True), pytest.approx(0.65)]
    assert bins["accuracy"] == [pytest.approx(nan, nan_ok=True), pytest.approx(0.8)]
    (axis,) = plots.reliability({"soft": bins})
    assert axis.get_title() == "soft\nECE 15.00 %  (n = 40)"


def test_pooled_bins_are_those_of_all_samples_together():
    generator = torch.Generator().manual_seed(0)
    seeds = []
    for _ in range(3):
        probabilities = (3 * torch.randn(200, 3, generator=generator)).softmax(-1)
        seeds.append((probabilities, torch.randint(3, (200,), generator=generator)))
    one_by_one = [{k: v.tolist() for k, v in vars(reliability_bins(p, y, bins=5)).items()} for p, y in seeds]
    together = vars(reliability_bins(torch.cat([p for p, _ in seeds]), torch.cat([y for _, y in seeds]), bins=5))
    found = pooled_bins(one_by_one, "soft")
    for name, expected in together.items():
        np.testing.assert_allclose(found[name], expected.tolist(), rtol=1e-5)


def test_curves_have_the_steps_where_all_runs_have_a_number():
    nan = float("nan")
    runs = [
        result("ot", 0, 0.1, curve=[[1, 1.0, 0.1], [2, 2.0, 0.2], [3, nan, 0.3], [4, 4.0, 0.4], [6, 9.0, nan]]),
        result("ot", 1, 0.1, curve=[[1, 3.0, 0.5], [2, 6.0, 0.6], [3, 7.0, 0.7], [5, 8.0, 0.8], [6, 9.0, 0.9]]),
    ]
    expected = {"step": [1, 2], "task_loss": [[1.0, 2.0], [3.0, 6.0]], "alignment_loss": [[0.1, 0.2], [0.5, 0.6]]}
    assert plots.stored_curves(runs) == {"ot 0.1": expected}


def test_other_data_are_asked_for_by_name():
    runs = [result(mmd={"0": [1.0]}, **{"mmd@test": {"0": [2.0]}})]
    assert plots.stored_distances(runs, on="test") == {"soft": {"0": [2.0]}}
    with pytest.raises(DataError, match=r"holds no 'mmd@mnli'. Its details: mmd, mmd@test"):
        plots.stored_distances(runs, on="mnli")


def test_failed_runs_are_left_out():
    runs = [result(mmd={"0": [1.0]}), replace(result(seed=1), error="diverged")]
    assert plots.stored_distances(runs) == {"soft": {"0": [1.0]}}
    with pytest.raises(DataError, match="no finished results"):
        plots.stored_distances(runs[1:])


@pytest.mark.parametrize(
    ("draw", "runs", "message"),
    [
        (plots.stored_curves, [result(), result()], "two results of 'soft' with seed 0"),
        (plots.stored_curves, [result(), replace(result(seed=1), name="other")], "several recipes, digits, other"),
        (plots.stored_curves, [result()], "'soft' hold no curve"),
        (plots.stored_curves, [result(curve=[[1, 2, 3]]), result(seed=1, curve=[[2, 2, 3]])], "after other steps"),
        (plots.stored_distances, [result(mmd={"0": [1]}), result(seed=1, mmd={"1": [1]})], "other layers or heads"),
        (
            plots.stored_bins,
            [result(reliability={"edges": [0, 1]}), result(seed=1, reliability={"edges": EDGES})],
            "other bins",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(draw, runs, message):
    with pytest.raises(DataError, match=message):
        draw(runs)
