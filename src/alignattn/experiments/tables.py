"""Comparisons as text, Markdown, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alignattn.experiments.compare import Cell, Comparison, Row, metric
from alignattn.experiments.paper import table as paper_table
from alignattn.experiments.settings import SOFT
from alignattn.experiments.statistics import LEVEL, POWER

MARKS = {"better": " ▲", "worse": " ▼", "differs": " ◆"}
LEGEND = "▲ better, ▼ worse than soft attention by a paired t-test at 5 %; no mark: cannot tell"

Table = list[list[str]]  # the first row has the heads, the first column the names


def text(comparisons: Sequence[Comparison]) -> str:
    """For a terminal."""
    return _pages(comparisons, lambda title: f"{title}\n{'=' * len(title)}", _aligned, str)


def markdown(comparisons: Sequence[Comparison], level: int = 2) -> str:
    """For documents."""

    def item(note: str) -> str:
        return "- " + note.replace("<", "\\<")  # an error may name a <class>, which HTML would swallow

    return _pages(comparisons, lambda title: f"{'#' * level} {title}\n", piped, item)


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """One line a metric of a kind of attention, also where no run ended well; empty where there is nothing."""
    out = io.StringIO()
    lines = [line for comparison in comparisons for line in _lines(comparison)]
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Everything; null where there is nothing."""
    return json.dumps([_plain(asdict(c)) for c in comparisons], indent=1, ensure_ascii=False, allow_nan=False) + "\n"


FORMATS: Mapping[str, Callable[[Sequence[Comparison]], str]] = {
    "text": text,
    "markdown": markdown,
    "csv": as_csv,
    "json": as_json,
}


def summary(comparison: Comparison) -> Table:
    """Mean ± deviation of every metric, marked where it differs from soft attention, beside the paper's."""
    heads = ["attention", "seeds"]
    for name in comparison.metrics:
        heads.append(metric(name).label)
        if _has_paper(comparison, name):
            heads.append("paper")
    decimals = {name: _paper_decimals(comparison, name) for name in comparison.metrics}
    rows = [heads]
    for row in comparison.rows:
        line = [row.label, str(len(row.seeds)) + (f" ({len(row.failed)} failed)" if row.failed else "")]
        for name in comparison.metrics:
            cell = row.cells.get(name)
            line.append(_spread(cell, metric(name).digits))
            if _has_paper(comparison, name):
                line.append(_paper(cell, decimals[name]))
        rows.append(line)
    return rows


def differences(comparison: Comparison) -> Table:
    """What each kind of attention makes different from soft attention, with the evidence."""
    rows = [["attention", "metric", "difference", "95 % interval", "p", "effect", "verdict"]]
    for row in comparison.rows:
        for name, cell in row.cells.items():
            d, digits = cell.difference, metric(name).digits
            if d is None:
                continue
            interval = "–" if math.isnan(d.low) else f"{_signed(d.low, digits)} to {_signed(d.high, digits)}"
            line = [row.label, metric(name).label, _signed(d.mean, digits), interval, _p(d.p), _number(d.effect, 2)]
            rows.append([*line, d.in_words()])
    return rows


def notes(comparison: Comparison) -> list[str]:
    """What a reader should know beside the tables."""
    every = [cell.difference for row in comparison.rows for cell in row.cells.values() if cell.difference is not None]
    found = ["Mean ± deviation between seeds."]
    if every:
        legend = f"{LEGEND}; ◆ differs" if any(d.verdict == "differs" for d in every) else LEGEND
        found = [f"Mean ± deviation between seeds; {legend}."]
        found.append(
            "Differences are paired over seeds: bootstrap interval (BCa), paired t-test, Cohen's d for pairs. With few "
            "seeds the interval is too narrow, and may leave out zero where the test cannot tell: the test decides."
        )
    elif any(row.method != SOFT for row in comparison.rows):
        found.append("No differences: soft attention has no finished run of the same seed.")
    if any(d.more_seeds is not None for d in every):
        found.append(
            "How many seeds more would tell: as many as find the difference seen, were it the true one, "
            f"in {100 * POWER:g} % of cases."
        )
    if comparison.tests:
        tests = "1 test" if comparison.tests == 1 else f"{comparison.tests} tests"
        found.append(
            f"Of {tests} about {comparison.tests * LEVEL:.2g} would find a difference by chance where there is none. "
            "P-values adjusted for it (Holm, by metric) are in the CSV and JSON forms."
        )
    found += _unpaired(comparison)
    if comparison.paper and any(_has_paper(comparison, name) for name in comparison.metrics):
        source = paper_table(comparison.paper["table"])
        model = comparison.paper.get("model") or source.get("model", "")
        found.append(f"The paper's values: {source['table']}, {model}.")
    found += [f"Failed: {row.label}, {error}" for row in comparison.rows for error in row.failed]
    return found


def _unpaired(comparison: Comparison) -> list[str]:
    """Whose differences leave out seeds that are in the means."""
    found = []
    for row in comparison.rows:
        counts = {(cell.difference.seeds, cell.seeds) for cell in row.cells.values() if cell.difference is not None}
        for pairs, seeds in sorted(counts):
            if pairs < seeds:
                which = "those that soft attention has too"
                found.append(f"{row.label}: differences are over {pairs} of its {seeds} seeds, {which}.")
    return found


def _pages(
    comparisons: Sequence[Comparison],
    heading: Callable[[str], str],
    layout: Callable[[Table], str],
    note: Callable[[str], str],
) -> str:
    pages = []
    for comparison in comparisons:
        title = comparison.name + (f", {comparison.model}" if comparison.model else "")
        parts = [heading(title), layout(summary(comparison))]
        if len(found := differences(comparison)) > 1:
            parts += ["", layout(found)]
        pages.append("\n".join([*parts, "", *map(note, notes(comparison))]))
    return "\n\n".join(pages) + "\n"


def _aligned(table: Table) -> str:
    table = _room_for_marks(table)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    words = {i for i, head in enumerate(table[0]) if head in ("attention", "metric", "verdict")}

    def line(row: list[str]) -> str:
        cells = [c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(table[0]), "  ".join("-" * width for width in widths), *map(line, table[1:])])


def _room_for_marks(table: Table) -> Table:
    """Blanks in place of marks, so that numbers stand under each other."""
    marks = tuple(MARKS.values())
    marked = {i for row in table for i, cell in enumerate(row) if cell.endswith(marks)}
    return [[c if i not in marked or c.endswith(marks) else f"{c}  " for i, c in enumerate(row)] for row in table]


def piped(table: Table) -> str:
    """A table of Markdown."""
    words = ("attention", "metric", "verdict", "recipe", "")
    rule = ["---" if head in words else "---:" for head in table[0]]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [table[0], rule, *table[1:]]
    )


def _lines(comparison: Comparison) -> list[dict[str, Any]]:
    nothing = Cell(math.nan, math.nan, 0)
    return [
        _line(comparison, row, name, row.cells.get(name, nothing))
        for row in comparison.rows
        for name in comparison.metrics
    ]


def _line(comparison: Comparison, row: Row, name: str, cell: Cell) -> dict[str, Any]:
    d, paper = cell.difference, cell.paper
    values = {
        "recipe": comparison.name,
        "model": comparison.model,
        "attention": row.label,
        "method": row.method,
        "preset": row.preset,
        "weight": row.weight,
        "metric": name,
        "seeds": cell.seeds,
        "failed": len(row.failed),
        "mean": cell.mean,
        "deviation": cell.deviation,
        "paper": paper and paper.mean,
        "paper_deviation": paper and paper.deviation,
        "paired_seeds": d and d.seeds,
        "difference": d and d.mean,
        "low": d and d.low,
        "high": d and d.high,
        "p": d and d.p,
        "p_holm": cell.p_holm,
        "effect": d and d.effect,
        "verdict": d and d.verdict,
        "more_seeds": d and d.more_seeds,
    }
    return {key: "" if value is None or _is_nan(value) else value for key, value in values.items()}


def _has_paper(comparison: Comparison, name: str) -> bool:
    return any(name in row.cells and row.cells[name].paper is not None for row in comparison.rows)


def _spread(cell: Cell | None, digits: int) -> str:
    if cell is None or not cell.seeds:
        return "–"
    mark = MARKS.get(cell.difference.verdict, "") if cell.difference else ""
    mean = "NaN" if math.isnan(cell.mean) else _number(cell.mean, digits)
    spread = "" if math.isnan(cell.deviation) else f" ± {cell.deviation:.{digits}f}"
    return f"{mean}{spread}{mark}"


def _paper(cell: Cell | None, decimals: int) -> str:
    if cell is None or cell.paper is None:
        return "–"
    deviation = "" if cell.paper.deviation is None else f" ± {cell.paper.deviation:g}"
    return f"{cell.paper.mean:.{decimals}f}{deviation}"


def _paper_decimals(comparison: Comparison, name: str) -> int:
    """As the paper prints a column: 77.0 beside 77.3."""
    papers = [row.cells[name].paper for row in comparison.rows if name in row.cells]
    return max((len(str(paper.mean).partition(".")[2]) for paper in papers if paper is not None), default=0)


def _number(value: float, digits: int) -> str:
    """A dash for NaN, and never minus zero."""
    if math.isnan(value):
        return "–"
    rounded = f"{value:.{digits}f}"
    return rounded.replace("-", "−") if float(rounded) else f"{0:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    return f"+{number}" if (number := _number(value, digits))[0] not in "–−" and float(number) else number


def _p(value: float) -> str:
    return "–" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"  # as in result files
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
