"""The frontier: how far apart keys and queries are against how good the model is, weight by weight, as a picture.

A panel a metric. Soft attention is the grey line; a point stands at its mean plus the paired difference, with one
standard error of that difference. Points of one method with the same options are joined in the order of their weights,
or of their shares where the weight is chosen while training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from alignattn.config import METHODS
from alignattn.errors import AlignmentError, DataError
from alignattn.experiments.compare import DERIVED, Comparison, Row, metric
from alignattn.experiments.settings import SOFT
from alignattn.weights import write_weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DISTANCE = "mmd"
# Okabe and Ito's, told apart by every kind of colour vision.
COLOURS = dict(zip(METHODS, ("#D55E00", "#0072B2", "#009E73", "#CC79A7"), strict=True))
OTHER, GREY, DARK = "#E69F00", "#999999", "#404040"
LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
COLUMNS = 3
TICKS = (*(-(10**k) for k in (3, 2, 1, 0)), 0, *(n * 10**k for k in range(5) for n in (1, 2, 5)))


@dataclass(frozen=True)
class Point:
    """One kind of attention in one panel."""

    weight: str  # or its share, where it is chosen while training
    distance: float
    value: float
    error: float  # of the difference to soft attention; NaN with too few seeds


def series(comparison: Comparison, name: str) -> dict[str, list[Point]]:
    """The points of a metric by what they have in common but for the weight, in the table's order."""
    found: dict[str, list[Point]] = {}
    for row in comparison.rows:
        cell, distance = row.cells.get(name), row.cells.get(DISTANCE)
        if row.method == SOFT or row.weight is None or cell is None or distance is None or cell.difference is None:
            continue
        value = _soft(comparison, name) + cell.difference.mean
        if math.isfinite(value) and math.isfinite(distance.mean):
            weight = write_weight(row.weight).removeprefix("auto:")
            point = Point(weight, distance.mean, value, cell.difference.error)
            found.setdefault(row.series, []).append(point)
    return found


def frontier(comparison: Comparison) -> "Figure":
    """Draw a comparison that has soft attention and the MMD of keys and queries, a panel for each other metric."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AlignmentError("The frontier needs matplotlib: pip install 'alignattn[plot]'") from error
    names = [n for n in comparison.metrics if not n.startswith(DISTANCE) and n not in DERIVED]
    panels = {name: found for name in names if (found := series(comparison, name))}
    if not panels:
        raise DataError(
            f"{comparison.name}: there is no frontier to draw. It needs soft attention, aligned runs of the same "
            f"seeds, and the metric {DISTANCE!r} of both beside another."
        )
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.4 * columns, 2.9 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    styles = _styles(comparison.rows)
    for axis, (name, found) in zip(grid.flat, panels.items(), strict=False):
        _draw(axis, comparison, name, found, styles)
    for axis in list(grid.flat)[len(panels) :]:
        axis.set_axis_off()
    handles = {
        label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(comparison.name, fontsize=10)
    return figure


def _draw(axis: "Axes", comparison: Comparison, name: str, found: dict[str, list[Point]], styles: Any) -> None:
    for label, points in found.items():
        x, y = [p.distance for p in points], [p.value for p in points]
        bars = [p.error for p in points]  # none is drawn where there is none
        axis.errorbar(x, y, bars, label=label, linewidth=1, markersize=4, capsize=2, elinewidth=0.7, **styles[label])
        for point in points:
            place = (point.distance, point.value)
            axis.annotate(point.weight, place, xytext=(3, 3), textcoords="offset points", fontsize=6, color=DARK)
    soft = _soft(comparison, name)
    axis.axhline(soft, color=GREY, linewidth=1, zorder=0)
    axis.plot([_soft(comparison, DISTANCE)], [soft], "*", color=DARK, markersize=9, label=SOFT, linestyle="none")
    axis.set_xscale("symlog", linthresh=1.0)  # an unbiased estimate may fall below zero
    low, high = axis.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_xlabel(metric(DISTANCE).label, fontsize=8)
    better = {True: " (higher is better)", False: " (lower is better)", None: ""}[metric(name).higher_is_better]
    axis.set_title(f"{metric(name).label}{better}", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _soft(comparison: Comparison, name: str) -> float:
    """Soft attention's own mean."""
    means = [row.cells[name].mean for row in comparison.rows if row.method == SOFT and name in row.cells]
    return means[0] if means else math.nan


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """A colour a method; lines and markers tell its options apart."""
    styles: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.series not in styles:
            colour = COLOURS.get(row.method, OTHER)
            nth = sum(style["color"] == colour for style in styles.values())
            styles[row.series] = {
                "color": colour,
                "linestyle": LINES[nth % len(LINES)],
                "marker": MARKERS[nth % len(MARKERS)],
            }
    return styles
