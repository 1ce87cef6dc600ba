"""Heat maps of attention: which weight stands where, in which colour, and what is written beside it."""

from itertools import pairwise

import pytest
import torch

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from drawings import map_of, weights
from matplotlib import colormaps

SENTENCE = ["[CLS]", "a", "film", "[SEP]"]


def labels(axis, which: str) -> list[str]:
    return [text.get_text() for text in getattr(axis, f"get_{which}ticklabels")()]


def test_rows_are_queries_and_columns_keys_counted_from_the_upper_left():
    matrix = np.arange(6.0).reshape(2, 3) / 10
    (axis,) = plots.attention({"soft": matrix}, queries=["up", "low"], keys=["left", "mid", "right"])
    np.testing.assert_array_equal(map_of(axis).get_array(), matrix)
    assert labels(axis, "y") == ["up", "low"] and labels(axis, "x") == ["left", "mid", "right"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("keys", "queries")
    place = axis.transData.transform
    upper, lower = place((0, 0)), place((0, 1))
    left, right = place((0, 0)), place((2, 0))
    assert upper[1] > lower[1] and left[0] < right[0]
    assert list(axis.get_yticks()) == [0, 1] and list(axis.get_xticks()) == [0, 1, 2]


def test_all_panels_have_one_scale_by_the_square_root_of_the_largest_weight():
    axes = plots.attention({"soft": [[0.64, 0.16]], "aligned": [[0.01, 0.0]]})
    first, second = map(map_of, axes)
    blues = colormaps["Blues"]
    # roots as shares of the largest: 1, 1/2, 1/8, 0
    for image, shares in ((first, [1.0, 0.5]), (second, [0.125, 0.0])):
        np.testing.assert_allclose(image.to_rgba(image.get_array())[0], [blues(share) for share in shares])
    (bar,) = (axis for axis in axes[0].figure.axes if axis not in axes)
    assert bar.get_ylabel() == "attention" and bar.get_ylim() == (0, 0.64)
    assert 0 in bar.get_yticks() and len(bar.get_yticks()) >= 3


def test_soft_stands_beside_aligned_and_the_rows_are_named_once():
    first, second = plots.attention({"soft": weights(4, 4), "aligned": weights(4, 4, seed=1)}, queries=SENTENCE)
    assert [first.get_title(), second.get_title()] == ["soft", "aligned"]
    assert labels(first, "y") == SENTENCE and labels(second, "y") == []
    assert labels(first, "x") == labels(second, "x") == SENTENCE
    assert second.get_position().x0 > first.get_position().x1 and second.get_position().y0 == first.get_position().y0


def test_cells_are_squares():
    (axis,) = plots.attention({"soft": weights(6, 18)})
    box = axis.get_window_extent()
    assert box.width / 18 == pytest.approx(box.height / 6)


def test_tokens_without_names_are_numbered():
    (axis,) = plots.attention({"soft": weights(2, 3)})
    assert labels(axis, "y") == ["0", "1"] and labels(axis, "x") == ["0", "1", "2"]


def test_strange_tokens_are_written_as_they_stand():
    tokens = ["$x$", "<script>", "", " ", "a\nb", "antidisestablishmentarianism", "_", "\U0010fffd"]
    (axis,) = plots.attention({"soft": weights(8, 8)}, queries=tokens)
    assert labels(axis, "y") == ["$x$", "<script>", "", "␣", "a↵b", "antidisestabl…", "_", "□"]
    assert not any(text.get_parse_math() for text in axis.get_yticklabels())


@pytest.mark.parametrize("count", [1, 2, 40, 512])
def test_labels_keep_apart_however_many_tokens_there_are(count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    axes = plots.attention({"soft": weights(count, count), "other": weights(count, count)}, queries=["token"] * count)
    figure = axes[0].figure
    assert max(figure.get_size_inches()) < 12.5
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    for which in "xy":
        texts = [t for t in getattr(axes[0], f"get_{which}ticklabels")() if t.get_text()]
        assert len(texts) >= min(count, 20)
        boxes = [text.get_window_extent(renderer) for text in texts]
        for before, box in pairwise(boxes):
            assert not box.count_overlaps([before])
    ticks = axes[0].get_yticks()
    assert ticks[0] == 0 and len(set(np.diff(ticks))) <= 1  # at equal steps


def test_tensors_of_a_graph_are_drawn():
    matrix = torch.rand(2, 2, requires_grad=True)
    (axis,) = plots.attention({"soft": matrix * 1})
    np.testing.assert_allclose(map_of(axis).get_array(), matrix.detach())


@pytest.mark.parametrize(
    ("panels", "tokens", "error", "message"),
    [
        ({"a": [[0.5, float("nan")]]}, None, NonFiniteError, "weights of 'a' hold NaN or infinity"),
        ({"a": [[0.5, -0.1]]}, None, ConfigError, "go down to -0.1: these are no attention weights"),
        ({"a": [0.5, 0.5]}, None, ShapeError, r"must be \[queries, keys\].*got shape \(2,\)"),
        ({"a": np.zeros((0, 3))}, None, ShapeError, r"got shape \(0, 3\)"),
        ({"a": [[0.5]], "b": [[0.5, 0.5]]}, None, ShapeError, "the same tokens; got shapes"),
        ({"a": [[0.5, 0.5]]}, ["one", "two"], ShapeError, "queries of these weights are 1 tokens.* got 2"),
        ({"a": [[0.5]]}, "x", ShapeError, "a list of texts; got 'x'"),
    ],
)
def test_weights_that_cannot_be_are_refused(panels, tokens, error, message):
    with pytest.raises(error, match=message):
        plots.attention(panels, queries=tokens)
