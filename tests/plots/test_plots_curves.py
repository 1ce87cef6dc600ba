"""Training curves: lines and bands against means and standard errors of scipy."""

import pytest
from scipy import stats

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.colours import KINDS

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from matplotlib.colors import to_hex

RUNS = np.array([[2.0, 1.0, 0.5], [2.2, 1.4, 0.9], [1.8, 1.2, 0.4]])


def test_both_losses_have_a_panel_and_each_kind_a_line_where_it_has_one():
    task, align = plots.curves(
        {"soft": {"task_loss": [3, 2, 1]}, "ot 0.1": {"task_loss": [3, 2.5, 2], "alignment_loss": [0.3, 0.2, 0.1]}},
        steps=[10, 20, 30],
    )
    assert [task.get_title(), align.get_title()] == ["loss of the task", "loss of the alignment, weighted"]
    soft, aligned = task.lines
    for line, values, kind in (
        (soft, [3, 2, 1], "soft"),
        (aligned, [3, 2.5, 2], "ot"),
        (*align.lines, [0.3, 0.2, 0.1], "ot"),
    ):
        assert list(line.get_xdata()) == [10, 20, 30] and list(line.get_ydata()) == values
        assert to_hex(line.get_color()) == KINDS[kind].lower()
    (legend,) = task.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["soft", "ot 0.1"]


def test_several_runs_are_their_mean_in_a_band_of_one_standard_error():
    (axis,) = plots.curves({"soft": {"task_loss": RUNS}})
    (line,) = axis.lines
    np.testing.assert_allclose(line.get_ydata(), RUNS.mean(0))
    assert list(line.get_xdata()) == [1, 2, 3]
    corners = axis.collections[0].get_paths()[0].vertices
    for look in range(3):
        at = corners[corners[:, 0] == look + 1][:, 1]
        error = stats.sem(RUNS[:, look])
        assert (at.min(), at.max()) == pytest.approx((RUNS[:, look].mean() - error, RUNS[:, look].mean() + error))


def test_steps_of_a_kind_of_its_own_win_and_other_names_are_drawn_too():
    (axis,) = plots.curves({"a": {"step": [5], "my_loss": [1.0]}, "b": {"my_loss": [2.0]}}, steps=[7])
    assert axis.get_title() == "my loss"
    assert [(line.get_xdata()[0], line.get_ydata()[0], line.get_marker()) for line in axis.lines] == [
        (5, 1, "o"),
        (7, 2, "o"),
    ]


def test_kinds_of_one_colour_are_told_apart_by_their_lines():
    (axis,) = plots.curves({f"ot {weight}": {"task_loss": [1, 2]} for weight in (0.1, 1)})
    first, second = axis.lines
    assert first.get_color() == second.get_color() and first.get_linestyle() != second.get_linestyle()


@pytest.mark.parametrize(
    ("kinds", "steps", "error", "message"),
    [
        ({"a": {"task_loss": [1, float("nan")]}}, None, NonFiniteError, "'task_loss' of 'a' hold NaN"),
        ({"a": {"task_loss": [1, 2]}}, [1], ShapeError, "one step for each look"),
        ({"a": {"task_loss": [1, 2], "alignment_loss": [1]}}, None, ShapeError, "one step for each look"),
        ({"a": {"task_loss": []}}, None, ShapeError, "one or more"),
        ({"a": {"task_loss": [[[1]]]}}, None, ShapeError, r"got shape \(1, 1, 1\)"),
        ({"a": {"task_loss": [1, 2]}}, [2, 1], ConfigError, "must rise"),
        ({"a": {}}, None, ConfigError, "no values to draw"),
        ({"a": [1, 2]}, None, ConfigError, "Curves of 'a' must be a mapping"),
    ],
)
def test_curves_that_cannot_be_are_refused(kinds, steps, error, message):
    with pytest.raises(error, match=message):
        plots.curves(kinds, steps=steps)
