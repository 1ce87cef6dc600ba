"""The section of one comparison: the tables that `alignattn compare` prints, pictures, every run, and what was run."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from alignattn.errors import AlignmentError, DataError
from alignattn.experiments.compare import Comparison, Row, metric
from alignattn.experiments.frontier import frontier, of_several_weights
from alignattn.experiments.settings import SOFT
from alignattn.experiments.tables import differences, notes, summary
from alignattn.plots.stored import Course, mean_distances, pooled_bins
from alignattn.report import pictures, svg
from alignattn.report.blocks import Block, Figure, Folded, Listing, Paragraph, Picture, Section, Table
from alignattn.report.provenance import what_was_run
from alignattn.results import Result

MOST_DRAWN = 6  # kinds of attention in a figure of panels

Kind = tuple[Row, Sequence[Result]]  # a row, and the runs behind it


def section(
    comparison: Comparison, behind: Sequence[Sequence[Result]], file_of: Callable[[Result], str], salt: str
) -> Section:
    """`behind` holds the results of each row; all empty where the comparison was read from a file of its own."""
    head, *rows = summary(comparison)
    blocks: list[Block] = [Table(f"{comparison.name}: mean ± deviation over seeds", head, rows)]
    failed = [(row.label, reason) for row in comparison.rows for reason in row.failed]
    if failed:
        count = "1 run failed" if len(failed) == 1 else f"{len(failed)} runs failed"
        blocks.append(Paragraph(f"{count}:", "alarm"))
        blocks.append(Listing([f"{label}, {reason}" for label, reason in failed]))
    head, *rows = differences(comparison)
    if rows:
        told = sum(row[-1] in ("better", "worse", "differs") for row in rows)
        title = f"Differences to soft attention: {told} of {len(rows)} told apart"
        table = Table(f"{comparison.name}: differences to soft attention", head, rows)
        blocks.append(Folded(title, [table], paper=False))
    # What failed stands above already, with the reason.
    blocks.append(Folded("How to read it", [Listing([n for n in notes(comparison) if not n.startswith("Failed: ")])]))
    kinds = list(zip(comparison.rows, behind, strict=True))
    blocks += _figures(comparison, kinds, salt)
    results = [result for those in behind for result in those]
    if results:
        blocks.append(Folded(f"Every run: {len(results)}", [_runs(comparison, kinds, file_of)], paper=False))
    blocks.append(what_was_run(results, comparison.commands))
    name, description = comparison.name, comparison.description
    about = f"{description[:1].upper()}{description[1:]}" if description else ""
    return Section(name, blocks, about + (f" (model: {comparison.model})" if comparison.model else ""))


def _runs(comparison: Comparison, kinds: Sequence[Kind], file_of: Callable[[Result], str]) -> Table:
    names = [name for name in comparison.metrics if name != "step_ratio"]
    head = ["attention", "seed", *(metric(name).label for name in names), "training s", "state", "file"]
    rows = []
    for row, results in kinds:
        for result in results:
            values = [_value(result.metrics.get(name), metric(name).digits) for name in names]
            state = (result.error or "").strip().splitlines()
            first = f"failed: {state[0]}" if state else "failed" if result.failed else "finished"
            rows.append(
                [row.label, str(result.seed), *values, _value(result.times.get("train"), 1), first, file_of(result)]
            )
    return Table(f"{comparison.name}: every run", head, rows)


def _figures(comparison: Comparison, kinds: Sequence[Kind], salt: str) -> list[Block]:
    """Every picture that the results hold the numbers for; one that cannot be drawn says why."""
    blocks: list[Block] = []
    shown = [(row, [r for r in results if not r.failed]) for row, results in representative(kinds)]
    left = len(kinds) - len(shown)
    rest = f" Shown are soft attention and one kind for each method; {left} more are in the table." if left > 0 else ""
    makers = {
        "the frontier": partial(_frontier, comparison, f"{salt}-f"),
        "reliability": partial(_reliability, shown, f"{salt}-r", rest),
        "MMD² by head": partial(_map, shown, f"{salt}-m", rest),
        "training": partial(_curves, shown, f"{salt}-c", rest),
    }
    for name, make in makers.items():
        try:
            figure = make()
        except (AlignmentError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            # `details` of a result file are free in form: what is malformed must not cost the tables.
            blocks.append(Paragraph(f"The picture of {name} cannot be drawn: {error}", "alarm"))
        else:
            blocks += [figure] if figure is not None else []
    return blocks


def representative(kinds: Sequence[Kind]) -> list[Kind]:
    """All kinds if they are few, else of each method that with most seeds, and of such that with the shortest label."""
    kinds = [kind for kind in kinds if any(not result.failed for result in kind[1])]
    if len(kinds) <= MOST_DRAWN:
        return kinds
    best: dict[str, Kind] = {}
    for kind in kinds:
        row = kind[0]
        known = best.get(row.method)
        if known is None or (-len(row.seeds), len(row.label)) < (-len(known[0].seeds), len(known[0].label)):
            best[row.method] = kind
    return [kind for kind in kinds if best[kind[0].method] is kind]


def _frontier(comparison: Comparison, salt: str) -> Figure | None:
    shown = of_several_weights(comparison)
    left = len(comparison.rows) - len(shown.rows)
    rest = (
        f" Left out, for they make no curve, are the {left} kinds run with one weight; the table has them."
        if left
        else ""
    )
    try:
        drawing = svg.inline(partial(frontier, shown), f"{comparison.name}: each metric against MMD²", salt)
    except DataError:  # there is none: no aligned runs, no soft attention, no MMD
        return None
    return Figure(
        "The frontier: how far apart keys and queries are against how good the model is. Numbers are weights, or "
        "shares of the gradient where the weight is chosen; bars are one standard error of the difference to soft "
        f"attention.{rest}",
        [Picture(drawing)],
        wide=True,
    )


def _reliability(shown: Sequence[Kind], salt: str, rest: str) -> Figure | None:
    panels = {
        row.label: pooled_bins(groups, row.label)
        for row, results in shown
        if (groups := [result.details["reliability"] for result in results if "reliability" in result.details])
    }
    caption = (
        "Accuracy by confidence, the samples of all seeds together. Seeds that err to opposite sides cancel here, so "
        f"the ECE above a panel may lie below the table's mean over seeds.{rest}"
    )
    return Figure(caption, pictures.reliability(panels, salt)) if panels else None


def _map(shown: Sequence[Kind], salt: str, rest: str) -> Figure | None:
    panels = {
        row.label: mean_distances(tables, row.label)
        for row, results in shown
        if (tables := [result.details["mmd"] for result in results if result.details.get("mmd")])
    }
    highest = pictures.highest_of(panels.values())
    drawn = [
        pictures.distance_map(label, table, f"{salt}-{number}", highest=highest)
        for number, (label, table) in enumerate(panels.items(), 1)
    ]
    caption = f"MMD² between queries and keys of each head, mean over seeds, on one scale.{rest}"
    return Figure(caption, drawn, large=True) if drawn else None


def _curves(shown: Sequence[Kind], salt: str, rest: str) -> Figure | None:
    panels: dict[str, dict[str, list[Course]]] = {}
    for row, results in shown:
        for result in results:
            for name, course in _courses(result).items():
                panels.setdefault(name, {}).setdefault(row.label, []).append(course)
    drawn = pictures.curves(panels, salt)
    caption = f"How training went, mean over seeds, in a band of one standard error.{rest}"
    return Figure(caption, drawn) if drawn else None


def _courses(result: Result) -> dict[str, Course]:
    """What was logged in a run, by name."""
    curve = result.details.get("curve") or []
    steps = [entry[0] for entry in curve]
    lines = {"task_loss": [entry[1] for entry in curve]}
    if result.method != SOFT:  # whose is no loss, but zeros
        lines["alignment_loss"] = [entry[2] for entry in curve]
    figures = result.details.get("figures") or {}
    if "alignment_mmd" in figures:
        lines["alignment_mmd"] = figures["alignment_mmd"]
    return {name: (steps, values) for name, values in lines.items() if values}


def _value(value: float | None, digits: int) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}".replace("-", "−").replace("inf", "∞")
