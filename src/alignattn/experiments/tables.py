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
from alignattn.experiments.statistics import LEVEL

MARKS = {"better": " ▲", "worse": " ▼", "differs": " ◆"}
LEGEND = "▲ better, ▼ worse than soft attention by a paired t-test at 5 %; no mark: cannot tell"

Table = list[list[str]]  # the first row has the heads, the first column the names


def text(comparisons: Sequence[Comparison]) -> str:
    """For a terminal."""
    return _pages(comparisons, lambda title: f"{title}\n{'=' * len(title)}", _aligned)


def markdown(comparisons: Sequence[Comparison], level: int = 2) -> str:
    """For documents."""
    return _pages(comparisons, lambda title: f"{'#' * level} {title}\n", piped)


def as_csv(comparisons: Sequence[Comparison]) -> str:
    """One line a cell; empty where there is nothing."""
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
    rows = [heads]
    for row in comparison.rows:
        line = [row.label, str(len(row.seeds)) + (f" ({len(row.failed)} failed)" if row.failed else "")]
        for name in comparison.metrics:
            cell = row.cells.get(name)
            line.append(_spread(cell, metric(name).digits))
            if _has_paper(comparison, name):
                line.append(_paper(cell))
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
    found = [
        f"Mean ± deviation between seeds; {LEGEND}.",
        "Differences are paired over seeds: bootstrap interval (BCa), paired t-test, Cohen's d for pairs.",
    ]
    if comparison.tests:
        chance = comparison.tests * LEVEL
        found.append(
            f"Of {comparison.tests} tests about {chance:.1f} would find a difference by chance where there is none. "
            "P-values adjusted for it (Holm, by metric) are in the CSV and JSON forms."
        )
    if comparison.paper:
        name, _, model = comparison.paper.partition(":")
        source = paper_table(name)
        found.append(f"The paper's values: {source['table']}, {model or source.get('model', '')}.")
    found += [f"Failed: {row.label}, {error}" for row in comparison.rows for error in row.failed]
    return found


def _pages(comparisons: Sequence[Comparison], heading: Callable[[str], str], layout: Callable[[Table], str]) -> str:
    pages = []
    for comparison in comparisons:
        title = comparison.name + (f", {comparison.model}" if comparison.model else "")
        parts = [heading(title), layout(summary(comparison))]
        if len(found := differences(comparison)) > 1:
            parts += ["", layout(found)]
        pages.append("\n".join([*parts, "", *notes(comparison)]))
    return "\n\n".join(pages) + "\n"


def _aligned(table: Table) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    words = {i for i, head in enumerate(table[0]) if head in ("attention", "metric", "verdict")}

    def line(row: list[str]) -> str:
        cells = [c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(table[0]), "  ".join("-" * width for width in widths), *map(line, table[1:])])


def piped(table: Table) -> str:
    """A table of Markdown."""
    words = ("attention", "metric", "verdict", "recipe", "")
    rule = ["---" if head in words else "---:" for head in table[0]]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in [table[0], rule, *table[1:]]
    )


def _lines(comparison: Comparison) -> list[dict[str, Any]]:
    lines = []
    for row in comparison.rows:
        for name, cell in row.cells.items():
            lines.append(_line(comparison, row, name, cell))
    return lines


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
    spread = "" if math.isnan(cell.deviation) else f" ± {cell.deviation:.{digits}f}"
    return f"{_number(cell.mean, digits)}{spread}{mark}"


def _paper(cell: Cell | None) -> str:
    if cell is None or cell.paper is None:
        return "–"
    return f"{cell.paper.mean:g}" + (f" ± {cell.paper.deviation:g}" if cell.paper.deviation is not None else "")


def _number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"


def _signed(value: float, digits: int) -> str:
    rounded = f"{value:+.{digits}f}"
    return rounded.replace("-", "−") if float(rounded) else f"{0:.{digits}f}"


def _p(value: float) -> str:
    return "–" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
