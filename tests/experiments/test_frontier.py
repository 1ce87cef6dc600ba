"""The picture of MMD against accuracy: every point where the results say, read off the artists."""

import math
from dataclasses import replace

import pytest
from scipy import stats
from test_compare import run

from alignattn import cli
from alignattn.errors import DataError
from alignattn.experiments.compare import compare
from alignattn.experiments.frontier import frontier, series
from alignattn.experiments.statistics import paired
from alignattn.results import write

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

ACCURACY = {
    "soft": [80.0, 82.0, 81.0],
    0.1: [81.0, 82.5, 83.0],
    1.0: [70.0, 73.0, 71.5],
    "auto:0.1": [80.5, 82.0, 82.0],
}
DISTANCE = {"soft": [20, 22, 24], 0.1: [5, 6, 7], 1.0: [-2, -1, 0], "auto:0.1": [1, 1, 1]}


def results(**options):
    found = []
    for weight, values in ACCURACY.items():
        for seed, value in enumerate(values):
            measured = {"accuracy": value, "ece": 100 - value, "mmd": DISTANCE[weight][seed]}
            report = {"report": ["accuracy", "ece", "mmd", "step_ratio"]}
            one = run(seed=seed) if weight == "soft" else run("mmd", seed, weight=weight, **options)
            found.append(replace(one, metrics=measured, recipe={**one.recipe, **report}))
    return found


def test_points_stand_where_the_results_say_with_the_error_of_the_paired_difference():
    (comparison,) = compare(results())
    found = series(comparison, "accuracy")
    assert {label: [p.weight for p in points] for label, points in found.items()} == {
        "mmd": ["0.1", "1"],
        "mmd auto": ["0.1"],  # by the share
    }
    for point, weight in zip([*found["mmd"], *found["mmd auto"]], (0.1, 1.0, "auto:0.1"), strict=True):
        assert point.distance == pytest.approx(sum(DISTANCE[weight]) / 3)
        assert point.value == pytest.approx(sum(ACCURACY[weight]) / 3)
        apart = [x - y for x, y in zip(ACCURACY[weight], ACCURACY["soft"], strict=True)]
        assert point.error == pytest.approx(stats.sem(apart))


def test_options_that_differ_are_curves_of_their_own():
    both = [*results(), *[r for r in results(options={"generator": "projections"}) if r.method != "soft"]]
    (comparison,) = compare(both)
    expected = [f"mmd{auto} generator={how}" for auto in ("", " auto") for how in ("model", "projections")]
    assert sorted(series(comparison, "ece")) == sorted(expected)
    axes = frontier(comparison)
    legend = [text.get_text() for text in axes[0].figure.legends[0].get_texts()]
    assert sorted(legend) == sorted([*expected, "soft", "best trade-off"])
    lines = {curve.get_label(): curve.lines[0] for curve in axes[0].containers}
    assert len({line.get_linestyle() for line in lines.values()}) == 4  # of one colour, told apart by their lines
    assert len({line.get_color() for line in lines.values()}) == 1


def test_the_picture_shows_each_metric_its_soft_line_and_the_weights():
    (comparison,) = compare(results())
    axes = frontier(comparison)
    assert [(axis.get_title(), axis.get_ylabel()) for axis in axes] == [
        ("accuracy %", "better →"),
        ("ECE %", "← better"),
    ]
    axis = axes[0]
    curve = next(line for line in axis.lines if line.get_marker() == "o")
    assert list(curve.get_xdata()) == pytest.approx([6, -1])
    assert list(curve.get_ydata()) == pytest.approx([246.5 / 3, 214.5 / 3])
    star = next(line for line in axis.lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == pytest.approx((22, 81))
    assert [text.get_text() for text in axis.texts] == ["0.1", "1", "0.1"]
    ticks = [float(label.get_text().replace("\u2212", "-")) for label in axis.get_xticklabels()]
    assert len(ticks) > 3 and ticks == sorted(ticks) and 0 in ticks


@pytest.mark.parametrize("kept", ["no soft", "no distance", "soft alone"])
def test_without_soft_attention_or_distance_there_is_none(kept):
    some = results()
    if kept == "no soft":
        some = [r for r in some if r.method != "soft"]
    elif kept == "soft alone":
        some = [r for r in some if r.method == "soft"]
    else:
        some = [replace(r, metrics={"accuracy": r.metrics["accuracy"]}) for r in some]
    with pytest.raises(DataError, match="there is no frontier to draw"):
        frontier(compare(some)[0])


def test_differences_that_cancel_out_have_an_error_all_the_same():
    assert paired([1, 2, 3, 4], [2, 1, 4, 3], True).error == pytest.approx(stats.sem([-1, 1, -1, 1]))
    assert paired([2, 3, 4], [1, 2, 3], True).error == 0


def test_two_seeds_give_a_point_without_an_error():
    (comparison,) = compare([r for r in results() if r.seed < 2])
    assert all(math.isnan(p.error) for p in series(comparison, "accuracy")["mmd"])
    axis = frontier(comparison)[0]
    (bars, *_) = (line for line in axis.collections if hasattr(line, "get_segments"))
    assert not [s for s in bars.get_segments() if len(s) and all(map(math.isfinite, s[:, 1]))]  # no bar is drawn


def test_compare_writes_the_picture_and_names_tables_that_have_none(tmp_path, capsys):
    for number, result in enumerate(results()):
        write(result, tmp_path / "one" / f"{number}.json")
    assert cli.main(["compare", str(tmp_path / "one"), "--frontier", str(tmp_path / "f.svg")]) == 0
    assert (tmp_path / "f.svg").read_text().startswith("<?xml") and "wrote" in capsys.readouterr().err
    write(replace(run("ot", 0, 80.0), name="other"), tmp_path / "one" / "other.json")
    assert cli.main(["compare", str(tmp_path / "one"), "--frontier", str(tmp_path / "g.png")]) == 0
    told = capsys.readouterr().err
    assert (tmp_path / "g-1.png").exists() and not (tmp_path / "g-2.png").exists()
    assert "other: there is no frontier to draw" in told
    assert cli.main(["compare", str(tmp_path / "one"), "--metrics", "ece", "--frontier", str(tmp_path / "i.png")]) == 0
    assert (tmp_path / "i-1.png").exists()  # what the table shows is another matter
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path / "one" / "other.json"), "--frontier", str(tmp_path / "h.png")]) == 1
