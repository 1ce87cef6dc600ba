"""Draws docs/figures/*.svg from the result files in results/, and those of one head from results/pictures.

python tools/figures.py
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from alignattn import plots
from alignattn.experiments.compare import compare
from alignattn.experiments.frontier import frontier, of_several_weights
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


def of_one_head() -> "Iterator[tuple[Path, list[Axes]]]":
    """Its keys and queries, and what it attends to, in two checkpoints (tools/head_pictures.py)."""
    for file in sorted((ROOT / "results" / "pictures").glob("*.json")):
        told = json.loads(file.read_text())
        layer = plots.distances.short_names([told["layer"]])[0]
        titles = {name: f"{name}: MMD² {mmd:.2f}" for name, mmd in told["mmd"].items()}
        clouds = {titles[name]: (cloud["query"], cloud["key"]) for name, cloud in told["clouds"].items()}
        yield FIGURES / f"clouds-{file.stem}.svg", plots.clouds(clouds)
        tokens = told["tokens"]
        shown = {f"{name}: layer {layer}, head {told['head']}": some[0] for name, some in told["attention"].items()}
        yield FIGURES / f"attention-{file.stem}.svg", plots.attention(shown, queries=tokens[0])
        yield FIGURES / f"received-{file.stem}.svg", plots.received(told["attention"], sentences=tokens)


def in_order(results: list[Result]) -> list[Result]:
    """As in the tables."""
    order = [row.method for row in compare(results)[0].rows]
    return sorted(results, key=lambda result: order.index(result.method))


if __name__ == "__main__":
    for path, axes in chain(drawn(), of_one_head()):
        plots.save(axes, path)
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB")
