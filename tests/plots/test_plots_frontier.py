"""The frontier: points, errors, weights, and the front against every pair compared."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError
from alignattn.plots import Point
from alignattn.plots.colours import KINDS
from alignattn.plots.frontier import front

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

from matplotlib.colors import to_hex

GAN = [Point("0.01", 20.0, 80.0, 0.5), Point("0.1", 5.0, 82.0, 0.25), Point("1", -0.3, 70.0)]
MMD = [Point("0.01", 15.0, 79.0, 0.5), Point("0.1", 2.0, 78.0, 0.25)]
few = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=8)


@given(few, st.booleans())
def test_the_front_is_what_no_other_point_beats(places, higher):
    points = [Point(str(i), float(x), float(y)) for i, (x, y) in enumerate(places)]
    sign = 1 if higher else -1

    def beaten(p: Point) -> bool:
        return any(
            o.distance <= p.distance
            and sign * o.value >= sign * p.value
            and (o.distance < p.distance or sign * o.value > sign * p.value)
            for o in points
        )

    expected = {(p.distance, p.value) for p in points if not beaten(p)}
    found = [(p.distance, p.value) for p in front(points, higher_is_better=higher)]
    assert set(found) == expected and found == sorted(expected)


def test_points_errors_and_weights_stand_where_they_are_told():
    (axis,) = plots.frontier({"accuracy %": {"gan": GAN, "mmd auto": MMD}})
    for curve, points, kind in zip(axis.containers, (GAN, MMD), ("gan", "mmd"), strict=True):
        line, _, (bars,) = curve
        assert list(line.get_xdata()) == [p.distance for p in points]
        assert list(line.get_ydata()) == [p.value for p in points]
        assert to_hex(line.get_color()) == KINDS[kind].lower()
        segments = [s for s in bars.get_segments() if len(s) and all(map(math.isfinite, s[:, 1]))]
        assert [tuple(s[:, 1]) for s in segments] == [
            (p.value - p.error, p.value + p.error) for p in points if not math.isnan(p.error)
        ]
    assert [(text.get_text(), *text.xy) for text in axis.texts] == [
        (p.weight, p.distance, p.value) for p in [*GAN, *MMD]
    ]


def test_the_front_is_drawn_as_steps_and_soft_attention_as_a_star():
    soft = Point("", 25.0, 83.0)
    (axis,) = plots.frontier({"accuracy %": {"gan": GAN, "mmd": MMD}}, soft={"accuracy %": soft})
    broad = max(axis.lines, key=lambda line: line.get_linewidth())
    # nearest and worst first; the last step goes on to the farthest point
    assert list(zip(broad.get_xdata(), broad.get_ydata(), strict=True)) == [
        (-0.3, 70),
        (2, 78),
        (5, 82),
        (25, 83),
        (25, 83),
    ]
    assert broad.get_drawstyle() == "steps-post"
    (star,) = (line for line in axis.lines if line.get_marker() == "*")
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (25, 83)
    (legend,) = axis.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["soft", "gan", "mmd", "best trade-off"]


def test_the_axis_tells_which_way_is_better_and_without_that_there_is_no_front():
    better = {"accuracy %": True, "ECE %": False, "other": None}
    axes = plots.frontier({title: {"gan": GAN} for title in better}, higher_is_better=better)
    assert [axis.get_ylabel() for axis in axes] == ["better →", "← better", ""]
    assert [max(line.get_linewidth() for line in axis.lines) > 4 for axis in axes] == [True, True, False]


def test_distances_below_zero_have_a_place_and_ticks_keep_apart():
    (axis,) = plots.frontier({"a": {"gan": GAN, "mmd": MMD}})
    assert axis.get_xscale() == "symlog" and axis.get_xlim()[0] < -0.3 < 20 < axis.get_xlim()[1]
    ticks = axis.get_xticks()
    assert 0 in ticks and len(ticks) >= 4
    pixels = axis.transData.transform([(tick, 75) for tick in ticks])[:, 0]
    assert min(b - a for a, b in pairwise(pixels)) >= 0.1 * axis.get_window_extent().width


def test_weights_never_cover_each_other():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    crowd = [Point("0.01", 5 + i % 10 / 9, 80 + i // 10) for i in range(60)]
    (axis,) = plots.frontier({"a": {"gan": [*crowd, Point("far", 900.0, 20.0)]}})
    renderer = FigureCanvasAgg(axis.figure).get_renderer()
    axis.figure.draw(renderer)
    boxes = [text.get_window_extent(renderer).shrunk(0.8, 0.6) for text in axis.texts]
    assert 1 < len(boxes) < 60
    for index, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:index])


def test_curves_of_one_method_differ_in_line_and_marker():
    (axis,) = plots.frontier({"a": {"gan": GAN, "gan auto": MMD}})
    first, second = (curve.lines[0] for curve in axis.containers)
    assert first.get_color() == second.get_color()
    assert first.get_linestyle() != second.get_linestyle() and first.get_marker() != second.get_marker()


@pytest.mark.parametrize(
    ("panels", "error", "message"),
    [
        ({"a": {}}, ConfigError, "'a' must be a mapping"),
        ({"a": {"gan": []}}, ConfigError, "with a point or more"),
        ({"a": GAN}, ConfigError, "'a' must be a mapping"),
        ({"a": {"gan": [(1, 2)]}}, ConfigError, "must hold plots.Point, got tuple"),
        ({"a": {"gan": [Point("1", math.nan, 1.0)]}}, NonFiniteError, "which has no place"),
        ({"a": {"gan": [Point("1", 1.0, math.inf)]}}, NonFiniteError, "which has no place"),
        ({}, ConfigError, r"frontier\(\) got no panels"),
    ],
)
def test_points_that_cannot_be_are_refused(panels, error, message):
    with pytest.raises(error, match=message):
        plots.frontier(panels)


@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e9])
def test_one_point_is_drawn_wherever_it_is(distance):
    (axis,) = plots.frontier({"a": {"gan": [Point("1", distance, 1.0)]}})
    low, high = axis.get_xlim()
    assert low < distance < high
