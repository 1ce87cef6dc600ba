"""What alignment does, in two minutes and without a download: a small vision transformer on handwritten digits.

Soft attention and the four methods start from the same weights and see the same batches, from several seeds. It is the
recipe `digits`, run, compared, drawn and reported: what it prints, its result files say. Its graph face is the recipe
`blocks`, a GAT on a graph that is made of a seed, in a minute.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from alignattn import plots
from alignattn.capture import QueryKey, Tap
from alignattn.errors import AlignmentError
from alignattn.experiments import graph_pictures
from alignattn.experiments import recipe as recipes
from alignattn.experiments.compare import Comparison, compare
from alignattn.experiments.pool import processes
from alignattn.experiments.recipe import Run
from alignattn.experiments.runner import carry_out, one_after_another, sweep
from alignattn.experiments.settings import SOFT
from alignattn.experiments.tables import text
from alignattn.experiments.tasks.digits import Digits
from alignattn.experiments.tasks.graph import NodeClassification
from alignattn.experiments.training import Place, Trained, train
from alignattn.files import write_whole
from alignattn.report.build import report
from alignattn.results import Result
from alignattn.weights import write_weight

SHOWN = "mmd"  # beside soft attention, in the pictures
CLOUD, NODES = 400, 100  # tokens, or nodes, of each cloud: the graph's face is to take a minute, t-SNE included
SEEDS, GRAPH_SEEDS = 5, 3


def run(
    out: Path,
    *,
    seeds: int | None = None,
    steps: int | None = None,
    workers: int | None = None,
    graph: bool = False,
) -> str:
    """Train, compare and draw; leaves everything in a folder and returns what there is to say."""
    seeds = seeds or (GRAPH_SEEDS if graph else SEEDS)
    train_settings = {} if steps is None else {"steps": steps}
    recipe = recipes.load("blocks" if graph else "digits", [{"seeds": seeds, "train": train_settings}])
    # One thread each: products this small only wait for a second one.
    place = Place(device="cpu", threads=1, command=_command(seeds, steps, graph=graph))
    workers = workers or min(2, os.cpu_count() or 1)
    plan = sweep(recipe, place, out)
    outcome = carry_out(plan, processes(workers) if workers > 1 else one_after_another)
    if outcome.failed and not outcome.finished:
        raise AlignmentError(f"Every run failed. The first: {outcome.failed[0].error}")
    comparisons = compare([*outcome.finished, *outcome.failed])
    table = text(comparisons)
    write_whole(out / "table.txt", table)
    pictures = _draw(out, recipe.runs(), place, outcome.finished)
    page = out / "report.html"
    write_whole(page, report([out / recipe.name], "Alignment attention: the demo"))
    files = "\n".join(f"  {path}" for path in (out / recipe.name, out / "table.txt", *pictures, page))
    return "\n".join([table, in_words(comparisons[0]), "", "Left behind:", files])


def in_words(comparison: Comparison) -> str:
    """What the table shows, and no more."""
    lines = []
    for name, good, bad in (
        ("accuracy", "more accurate", "less accurate"),
        ("accuracy@noisy", "more accurate on noisy digits", "less accurate on noisy digits"),
        ("ece", "better calibrated", "worse calibrated"),
        ("mmd", "keys and queries closer together", "keys and queries further apart"),
    ):
        for verdict, words in (("better", good), ("worse", bad)):
            differences = {row.method: row.cells[name].difference for row in comparison.rows if name in row.cells}
            told = [method for method, d in differences.items() if d is not None and d.verdict == verdict]
            if told:
                lines.append(f"  {words} than soft attention: {', '.join(told)}")
    if not lines:
        return "With these seeds nothing can be told apart from soft attention."
    return "\n".join(["What the tests above tell:", *lines, "Of the rest these runs cannot tell."])


def _draw(out: Path, runs: list[Run], place: Place, results: list[Result]) -> list[Path]:
    """Clouds of keys and queries, and reliability, of soft attention and one method from the first seed.

    Of a graph also embeddings by class, and what the node attends to whose attention they differ in most.
    """
    seed = runs[0].seed
    shown = [run for method in (SOFT, SHOWN) for run in runs if run.method == method and run.seed == seed]
    trained = {run.method: train(run, place) for run in shown}  # results keep no weights: a moment's work again
    layer, head = _widest_gap(next(r for r in results if r.method == SOFT and r.seed == seed))
    titles = {
        run.method: run.method if run.weight is None else f"{run.method} {write_weight(run.weight)}" for run in shown
    }
    clouds = {f"{titles[m]}: layer {layer}, head {head}": _cloud(t, layer, head) for m, t in trained.items()}
    bins = {
        titles[result.method]: result.details["reliability"]
        for result in sorted(results, key=lambda result: result.method != SOFT)
        if result.seed == seed and result.method in titles
    }
    pictures = {"clouds.png": plots.clouds(clouds), "reliability.png": plots.reliability(bins)}
    if isinstance(next(iter(trained.values())).task, NodeClassification):
        drawn = graph_pictures.draw(graph_pictures.tell({titles[m]: t for m, t in trained.items()}))
        pictures |= {f"{name}.png": axes for name, axes in drawn.items()}
    for name, axes in pictures.items():
        plots.save(axes, out / name)
    return [out / name for name in pictures]


def _widest_gap(soft: Result) -> tuple[int, int]:
    """Layer and head in which soft attention leaves keys and queries furthest apart."""
    layers = enumerate(soft.details["mmd"].values())
    gaps = {(layer, head): gap for layer, heads in layers for head, gap in enumerate(heads)}
    return max(gaps, key=lambda place: gaps[place])


@torch.no_grad()
def _cloud(trained: Trained, layer: int, head: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head on held-out digits or nodes."""
    record = _record(trained, layer)
    query, key = (side[:, head].flatten(0, 1) for side in (record.query, record.key))
    most = NODES if isinstance(trained.task, NodeClassification) else CLOUD
    chosen = torch.randperm(len(query), generator=torch.Generator().manual_seed(0))[:most]
    return query[chosen], key[chosen]


def _record(trained: Trained, layer: int) -> QueryKey:
    if isinstance(trained.task, NodeClassification):
        return trained.task.queries_and_keys(trained.model)[layer]
    assert isinstance(trained.task, Digits)
    found: list[QueryKey] = []
    tap = Tap(trained.model, watch=found.append, always=True, layers=layer)
    try:
        trained.model(trained.task.test_images)
    finally:
        tap.remove()
    return found[0]


def _command(seeds: int, steps: int | None, *, graph: bool) -> str:
    face = " --graph" if graph else ""
    return f"alignattn demo{face} --seeds {seeds}" + ("" if steps is None else f" --steps {steps}")
