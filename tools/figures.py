"""Draws docs/figures/*.svg from the result files in results/.

python tools/figures.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from alignattn import plots
from alignattn.experiments.compare import Comparison, compare
from alignattn.experiments.frontier import frontier, series
from alignattn.experiments.settings import SOFT
from alignattn.results import Result
from result_tables import FIGURES, ROOT, at_defaults, current, is_frontier, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = "minilm-mrpc"  # of which the guide shows every picture that result files tell


def drawn() -> "Iterator[tuple[Path, list[Axes]]]":
    """Every picture, with its place."""
    results = current()
    for comparison in compare(results):
        if is_frontier(comparison):
            yield picture(comparison), frontier(of_several_weights(comparison))
    shown = in_order([result for result in at_defaults(results) if result.name == SHOWN])
    yield FIGURES / f"distances-{SHOWN}.svg", plots.distance_map(plots.stored_distances(shown))
    yield FIGURES / f"curves-{SHOWN}.svg", plots.curves(plots.stored_curves(shown))
    yield FIGURES / f"reliability-{SHOWN}.svg", plots.reliability(plots.stored_bins(shown))


def of_several_weights(comparison: Comparison) -> Comparison:
    """Without the kinds that were run with one weight alone: they make no curve, and stand in the table."""
    curves = series(comparison, comparison.metrics[0])
    rows = tuple(row for row in comparison.rows if row.method == SOFT or len(curves.get(row.series, ())) > 1)
    return replace(comparison, rows=rows)


def in_order(results: list[Result]) -> list[Result]:
    """As in the tables."""
    order = [row.method for row in compare(results)[0].rows]
    return sorted(results, key=lambda result: order.index(result.method))


if __name__ == "__main__":
    for path, axes in drawn():
        plots.save(axes, path)
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB")
