"""The frontier of a comparison: how far apart keys and queries are against how good the model is, weight by weight.

A panel a metric. Soft attention is the grey line; a point stands at its mean plus the paired difference, with one
standard error of that difference. Points of one method with the same options are joined in the order of their weights,
or of their shares where the weight is chosen while training.
"""

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from alignattn import plots
from alignattn.errors import DataError
from alignattn.experiments.compare import DERIVED, Comparison, metric
from alignattn.experiments.settings import SOFT
from alignattn.plots import Point
from alignattn.weights import write_weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DISTANCE = "mmd"
MOST_CURVES = 8  # of a frontier, unless more were run with several weights


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


def frontier(comparison: Comparison) -> "list[Axes]":
    """Draw a comparison that has soft attention and the MMD of keys and queries, a panel for each other metric."""
    names = [n for n in comparison.metrics if not n.startswith(DISTANCE) and n not in DERIVED]
    panels = {name: found for name in names if (found := series(comparison, name))}
    if not panels:
        raise DataError(
            f"{comparison.name}: there is no frontier to draw. It needs soft attention, aligned runs of the same "
            f"seeds, and the metric {DISTANCE!r} of both beside another."
        )
    labels = {name: metric(name).label for name in panels}
    distance = _soft(comparison, DISTANCE)
    return plots.frontier(
        {labels[name]: found for name, found in panels.items()},
        soft={labels[name]: Point(SOFT, distance, _soft(comparison, name)) for name in panels},
        higher_is_better={labels[name]: metric(name).higher_is_better for name in panels},
        distance=metric(DISTANCE).label,
    )


def of_several_weights(comparison: Comparison) -> Comparison:
    """Where many kinds would crowd a frontier, without those run with one weight alone, unless all are."""
    counts = Counter(row.series for row in comparison.rows if row.method != SOFT)
    several = [name for name, count in counts.items() if count > 1]
    if len(counts) <= MOST_CURVES or not several:
        return comparison
    return replace(comparison, rows=tuple(r for r in comparison.rows if r.method == SOFT or r.series in several))


def _soft(comparison: Comparison, name: str) -> float:
    """Soft attention's own mean."""
    means = [row.cells[name].mean for row in comparison.rows if row.method == SOFT and name in row.cells]
    return means[0] if means else math.nan
