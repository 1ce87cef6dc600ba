"""What all pictures have in common: a list of axes, nothing left behind, panels that fit, any text as a title."""

import sys
import warnings

import pytest

from alignattn import plots
from alignattn.errors import AlignmentError, ConfigError
from alignattn.plots.colours import KINDS, by_kind

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
pytest.importorskip("sklearn", reason="pip install 'alignattn[demo]'")

import numpy as np
from drawings import BINS, PICTURES, STRANGE, gaussian
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELLED = (
    "clouds",
    "embeddings",
    "neighbourhood",
    "reliability",
    "attention",
    "distance_map",
    "frontier",
)  # a panel for each title


def assert_that_nothing_overlaps_or_is_cut_off(axes) -> None:
    figure = axes[0].figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes]  # colour bars too
    boxes += [legend.get_tightbbox(renderer) for legend in figure.legends]
    for index, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "cut off at a side"
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, "cut off above or below"
        assert not box.count_overlaps(boxes[:index]), "panels overlap"


@pytest.mark.parametrize("kind", PICTURES)
def test_a_list_of_axes_of_one_figure_is_returned(kind):
    axes = PICTURES[kind]({"first": "soft", "second": "mmd 0.1"})
    assert isinstance(axes, list) and all(isinstance(axis, Axes) for axis in axes)
    assert len({axis.figure for axis in axes}) == 1 and isinstance(axes[0].figure, Figure)


@pytest.mark.parametrize("count", [1, 2, 5, 7])
@pytest.mark.parametrize("kind", PICTURES)
def test_panels_are_of_one_size_and_overlap_nowhere(kind, count):
    long = "MAXIMUM MEAN DISCREPANCY, BANDWIDTH FROM THE MEDIAN, "
    titles = ["soft", *(f"{long}{index}" for index in range(1, count))]
    axes = PICTURES[kind](dict(enumerate(titles)))
    assert_that_nothing_overlaps_or_is_cut_off(axes)
    if kind != "received":  # sentences are as wide as they are long
        assert len({tuple(np.round(axis.get_window_extent().size, 3)) for axis in axes}) == 1


def test_the_axes_of_clouds_and_reliability_are_squares():
    pair = (gaussian(7), gaussian(12))
    for axes in (plots.clouds({"a": pair, "b": pair}), plots.reliability({"a": BINS, "b": BINS})):
        for axis in axes:
            assert axis.get_window_extent().width == pytest.approx(axis.get_window_extent().height)


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("text", STRANGE)
def test_any_text_is_a_title_without_a_warning_and_as_it_stands(kind, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = PICTURES[kind]({"first": text, "second": "other"})
        assert_that_nothing_overlaps_or_is_cut_off(axes)


@pytest.mark.parametrize("kind", PANELLED)
def test_a_dollar_is_a_dollar_in_a_title(kind):
    first, *_ = PICTURES[kind]({"first": "$x$ and <script>", "second": "other"})
    assert first.get_title().startswith("$x$ and\n<script>" if kind in ("attention", "distance_map") else "$x$ and")
    assert not first.title.get_parse_math()


@pytest.mark.parametrize("kind", ["received", "curves"])
def test_a_legend_names_every_kind_of_attention_underscores_and_all(kind):
    axes = PICTURES[kind]({"first": "_soft", "second": "$x$"})
    (legend,) = axes[0].figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names[:2] == ["_soft", "$x$"] and not any(text.get_parse_math() for text in legend.get_texts())


def test_a_title_that_never_ends_is_cut_after_three_lines():
    (axis,) = plots.reliability({"word " * 100: BINS})
    lines = axis.get_title().split("\n")
    assert len(lines) == 4 and lines[2].endswith("…") and lines[3].startswith("ECE")


def test_axes_of_the_caller_are_drawn_on():
    figure = Figure(figsize=(6, 6))
    upper, lower = figure.subfigures(2)
    first, second = upper.subplots(1, 2), lower.subplots(1, 2)
    count = len(figure.axes)
    pair = (gaussian(7), gaussian(12))
    assert plots.clouds({"a": pair, "b": pair}, axes=first) == list(first)
    assert plots.reliability({"a": BINS}, axes=second[0]) == [second[0]]
    assert [len(axis.collections) for axis in first] == [2, 2]
    assert len(second[0].containers) == 2 and not second[1].containers
    assert not figure.legends and first[0].get_legend() and not first[1].get_legend()
    assert len(figure.axes) == count


@pytest.mark.parametrize("kind", PICTURES)
def test_too_few_or_too_many_axes_are_refused(kind):
    one = PICTURES[kind]({"first": "soft", "second": "mmd"})
    figure = Figure()
    with pytest.raises(ConfigError, match=f"got {len(one) + 1} axes for {len(one)} panels"):
        PICTURES[kind]({"first": "soft", "second": "mmd"}, axes=figure.subplots(1, len(one) + 1))
    axes = figure.subplots(1, len(one))
    assert PICTURES[kind]({"first": "soft", "second": "mmd"}, axes=axes) == list(np.ravel(axes))
    FigureCanvasAgg(figure).draw()


@pytest.mark.parametrize("kind", PICTURES)
def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AlignmentError, match=rf"{kind}\(\) needs matplotlib: pip install 'alignattn\[plot\]'"):
        PICTURES[kind]({"first": "soft"})
    with pytest.raises(AlignmentError, match=r"save\(\) needs matplotlib"):
        plots.save(None, "a.png")


@pytest.mark.parametrize("draw", [plots.clouds, plots.reliability, plots.attention, plots.distance_map, plots.curves])
def test_nothing_to_draw_is_refused(draw):
    with pytest.raises(ConfigError, match=rf"{draw.__name__}\(\) got no panels"):
        draw({})
    with pytest.raises(ConfigError, match=rf"{draw.__name__}\(\) takes a mapping .*, got list"):
        draw([1])


def test_a_kind_of_attention_has_one_colour_and_no_two_titles_share_one():
    titles = ["soft", "MMD, weight 0.1", "mine", "ct: layer 3", "theirs"]
    colours = by_kind(titles)
    assert [colours[title] for title in ("soft", "MMD, weight 0.1", "ct: layer 3")] == [
        KINDS["soft"],
        KINDS["mmd"],
        KINDS["ct"],
    ]
    assert len(set(colours.values())) == 5
