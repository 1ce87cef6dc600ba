"""Draws docs/figures/*.svg from the result files in results/, and those of one head or a graph from results/pictures.

python tools/figures.py
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignattn import plots
from alignattn.experiments import graph_pictures
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
    for name, told in stored("pictures"):
        layer = plots.distances.short_names([told["layer"]])[0]
        titles = {kind: f"{kind}: MMD² {mmd:.2f}" for kind, mmd in told["mmd"].items()}
        clouds = {titles[kind]: (cloud["query"], cloud["key"]) for kind, cloud in told["clouds"].items()}
        yield FIGURES / f"clouds-{name}.svg", plots.clouds(clouds)
        tokens = told["tokens"]
        shown = {f"{kind}: layer {layer}, head {told['head']}": some[0] for kind, some in told["attention"].items()}
        yield FIGURES / f"attention-{name}.svg", plots.attention(shown, queries=tokens[0])
        yield FIGURES / f"received-{name}.svg", plots.received(told["attention"], sentences=tokens)


def of_graphs() -> "Iterator[tuple[Path, list[Axes]]]":
    """Embeddings by class and a neighbourhood, soft and aligned (tools/graph_pictures.py)."""
    for name, told in stored("graph pictures"):
        for picture_of, axes in graph_pictures.draw(told).items():
            yield FIGURES / f"{picture_of}-{name}.svg", axes


def stored(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is stored for pictures of one kind, by the names of the files."""
    for file in sorted((ROOT / "results" / "pictures").glob("*.json")):
        told = json.loads(file.read_text())
        if told["kind"] == kind:
            yield file.stem, told


def in_order(results: list[Result]) -> list[Result]:
    """As in the tables."""
    order = [row.method for row in compare(results)[0].rows]
    return sorted(results, key=lambda result: order.index(result.method))


if __name__ == "__main__":
    for path, axes in chain(drawn(), of_one_head(), of_graphs()):
        plots.save(axes, path)
        print(f"wrote {path.relative_to(ROOT)}, {path.stat().st_size / 1000:.0f} kB")
