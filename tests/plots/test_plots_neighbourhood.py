"""A node's neighbourhood: which edge is how broad, where each neighbour stands, and what is written there."""

from itertools import combinations

import pytest
import torch

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure


def edges_of(axis) -> list:
    """The lines that come in; the last line is the legend's."""
    return axis.lines[:-1]


def written(axis) -> list[str]:
    return [text.get_text() for text in axis.texts]


def test_an_edge_is_as_broad_as_its_weight_on_one_scale_for_all_panels():
    soft, aligned = [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]
    axes = plots.neighbourhood({"soft": soft, "aligned": aligned}, node=5, neighbours=[5, 7, 9])
    widths = np.array([[line.get_linewidth() for line in edges_of(axis)] for axis in axes])
    np.testing.assert_allclose(widths / widths.max(), np.array([soft, aligned]) / 0.8)
    for axis in axes:  # what the legend shows: a third each
        assert axis.lines[-1].get_linewidth() / widths.max() == pytest.approx(1 / 3 / 0.8)


def test_neighbours_stand_clockwise_from_the_top_at_the_same_places_and_edges_end_at_the_node():
    axes = plots.neighbourhood({"a": [0.25] * 4, "b": [0.7, 0.1, 0.1, 0.1]}, node="x", neighbours=["n", "e", "s", "w"])
    for axis in axes:
        starts = [tuple(np.round(np.transpose(line.get_data())[0], 9) + 0.0) for line in edges_of(axis)]
        assert starts == [(0, 1), (1, 0), (0, -1), (-1, 0)]
        assert all(tuple(np.transpose(line.get_data())[1]) == (0, 0) for line in edges_of(axis))


def test_names_and_weights_are_written_and_the_node_s_own_is_itself():
    (axis,) = plots.neighbourhood({"soft": [0.254, 0.746]}, node=7, neighbours=[7, "$x$"])
    assert written(axis) == ["itself\n.25", "$x$\n.75"] and axis.get_xlabel() == "attention of 7"
    assert not any(text.get_parse_math() for text in axis.texts)
    (legend,) = axis.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["shared evenly"]


def test_a_node_is_marked_by_its_class_in_the_middle_and_around():
    (axis,) = plots.neighbourhood(
        {"": [0.2, 0.3, 0.5]}, node=1, neighbours=[2, 3, 4], classes={1: "b", 2: "a", 3: "b", 99: "c"}
    )
    dots = [artist for artist in axis.collections if len(artist.get_offsets())]
    first, second, third, middle = [to_hex(artist.get_facecolor()[0]) for artist in dots]
    assert tuple(np.asarray(dots[3].get_offsets())[0]) == (0, 0)
    assert second == middle != first and third not in (first, second)
    (legend,) = axis.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["shared evenly", "a", "b"]  # none of what is not there


def boxes_in(axis) -> list:
    renderer = FigureCanvasAgg(axis.figure).get_renderer()
    axis.figure.draw(renderer)
    return [text.get_window_extent(renderer) for text in axis.texts]


@pytest.mark.parametrize("size", [None, (2.0, 1.5)])
@pytest.mark.parametrize("name", ["7", "paper 2001", "antidisestablishmentarianism"])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 14, 20, 40, 169])
def test_whatever_is_written_keeps_apart_and_within_the_panel(count, name, size):
    axis = None if size is None else Figure(figsize=size).add_axes((0, 0, 1, 1))
    names = [f"{place} {name}" for place in range(count)]
    panels = {"soft": [1 / count] * count}
    (axis,) = plots.neighbourhood(panels, node=0, neighbours=names, axes=axis)
    assert len(edges_of(axis)) == count
    boxes = boxes_in(axis)
    frame = axis.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)
    assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_names_give_way_to_weights_and_weights_to_nothing_in_all_panels_alike():
    def words(count: int) -> list[list[str]]:
        weights = torch.full((count,), 1 / count)
        axes = plots.neighbourhood({"a": weights, "b": weights}, node=0, neighbours=torch.arange(2000, 2000 + count))
        return [written(axis) for axis in axes]

    for count, expected in ((10, [f"{2000 + place}\n.10" for place in range(10)]), (25, [".04"] * 25), (169, [])):
        assert words(count) == [expected] * 2


@pytest.mark.parametrize(
    ("panels", "neighbours", "error", "message"),
    [
        ({}, [1], ConfigError, "got no panels"),
        ({"a": [0.5, 0.5]}, [1], ShapeError, r"must be \[1\], one for each neighbour.* got shape \(2,\)"),
        ({"a": [[0.5, 0.5]]}, [1, 2], ShapeError, r"a mean of heads; got shape \(1, 2\)"),
        ({"a": [float("nan")]}, [1], NonFiniteError, "weights of 'a' hold NaN or infinity"),
        ({"a": [1.5, -0.5]}, [1, 2], ConfigError, "go down to -0.5: these are no attention weights"),
        ({"a": [0.5, 0.5]}, [1, 1], ConfigError, "a neighbour twice"),
        ({"a": []}, [], ConfigError, "needs neighbours, a list of nodes, one or more"),
        ({"a": [1.0]}, "x", ConfigError, "a list of nodes, one or more; got 'x'"),
    ],
)
def test_neighbourhoods_that_cannot_be_are_refused(panels, neighbours, error, message):
    with pytest.raises(error, match=message):
        plots.neighbourhood(panels, node=0, neighbours=neighbours)
