"""Diagnoses, one or two side by side, as text, Markdown, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from alignattn.diagnosis.result import Diagnosis, HeadDiagnosis
from alignattn.diagnosis.side_by_side import HeadChange, SideBySide
from alignattn.diagnosis.words import interval, number

Told = Diagnosis | SideBySide
Table = list[list[str]]
SHOWN = 10  # heads, unless all are asked for
WORDS = ("layer", "verdict")  # columns that are no numbers


def text(told: Told, *, every_head: bool = False) -> str:
    """For a terminal."""
    return _page(told, every_head, lambda title: f"{title}\n{'=' * len(title)}", _aligned, str)


def markdown(told: Told, *, every_head: bool = False) -> str:
    """For documents."""
    return _page(told, every_head, lambda title: f"## {title}\n", _piped, lambda words: f"- {words}")


def as_csv(told: Told) -> str:
    """One line a head: always all of them."""
    if isinstance(told, Diagnosis):
        lines = [_flat(head) for head in told.heads]
    else:
        lines = [_flat_change(change) for change in told.heads]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_json(told: Told) -> str:
    """Everything, as the file has it; of two, both with what is said about them."""
    if isinstance(told, Diagnosis):
        return told.to_json()
    both = {side: json.loads(getattr(told, side).to_json()) for side in ("before", "after")}
    return json.dumps(both | {"words": told.words}, indent=1, ensure_ascii=False) + "\n"


FORMATS: Mapping[str, Callable[[Told, bool], str]] = {  # the second: whether tables are to have every head
    "text": lambda told, every: text(told, every_head=every),
    "markdown": lambda told, every: markdown(told, every_head=every),
    "csv": lambda told, _: as_csv(told),
    "json": lambda told, _: as_json(told),
}


def layer_table(told: Told) -> Table:
    """A line a layer: means over those of its heads that could be measured."""
    if isinstance(told, Diagnosis):
        rows = [["layer", "heads", "MMD²", "beyond noise", "means", "covariances", "|q|", "|k|", "entropy", "AUC"]]
        for layer, heads in _by_layer(told.heads).items():
            names = ("mean_distance", "covariance_distance", "query_norm", "key_norm", "entropy", "auc")
            first = [number(_mean(h.mmd for h in heads)), str(sum(h.beyond_noise for h in heads))]
            figures = [number(_mean(getattr(h, name) for h in heads), 2) for name in names]
            rows.append([layer, str(len(heads)), *first, *figures])
        return rows
    rows = [["layer", "heads", "MMD² before", "after", "closer", "farther", "AUC before", "after", "entropy before"]]
    rows[0].append("after")
    pairs = [_by_layer(d.heads) for d in (told.before, told.after)]
    for layer in pairs[0]:
        verdicts = [change.verdict for change in told.heads if change.before.layer == layer]
        cells = [layer, str(len(verdicts)), *_means(pairs, layer, "mmd", 4)]
        cells += [str(verdicts.count("closer")), str(verdicts.count("farther"))]
        rows.append([*cells, *_means(pairs, layer, "auc", 2), *_means(pairs, layer, "entropy", 2)])
    return rows


def head_table(told: Told, *, every_head: bool = False) -> Table:
    """Those that differ, or have changed, most; or all in their order."""
    if isinstance(told, Diagnosis):
        columns = ["layer", "head", "MMD²", "noise", "p", "means", "covariances", "|q|", "|k|", "entropy", "AUC"]
        heads = told.heads if every_head else sorted(told.heads, key=lambda head: _largest_first(head.mmd))[:SHOWN]
        return [[*columns, "95 %"], *map(_line, heads)]
    columns = ["layer", "head", "MMD² before", "after", "change", "95 %", "verdict", "AUC before", "after"]
    changes = (
        told.heads if every_head else sorted(told.heads, key=lambda change: _largest_first(abs(change.mmd)))[:SHOWN]
    )
    return [columns, *map(_change_line, changes)]


def _line(head: HeadDiagnosis) -> list[str]:
    figures = (head.mean_distance, head.covariance_distance, head.query_norm, head.key_norm, head.entropy, head.auc)
    first = [head.layer, str(head.head), number(head.mmd), interval(head.noise), number(head.mmd_p, 3)]
    return [*first, *(number(figure, 2) for figure in figures), interval(head.auc_interval, 2)]


def _change_line(change: HeadChange) -> list[str]:
    before, after = change.before, change.after
    first = [after.layer, str(after.head), number(before.mmd), number(after.mmd), number(change.mmd)]
    return [*first, interval(change.interval), change.verdict, number(before.auc, 2), number(after.auc, 2)]


def _means(pairs: Sequence[Mapping[str, list[HeadDiagnosis]]], layer: str, name: str, digits: int) -> list[str]:
    return [number(_mean(getattr(head, name) for head in heads[layer]), digits) for heads in pairs]


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def _largest_first(value: float) -> float:
    """What to sort by; what could not be measured comes last."""
    return math.inf if math.isnan(value) else -value


def _by_layer(heads: Sequence[HeadDiagnosis]) -> dict[str, list[HeadDiagnosis]]:
    found: dict[str, list[HeadDiagnosis]] = {}
    for head in heads:
        found.setdefault(head.layer, []).append(head)
    return found


def _page(
    told: Told,
    every_head: bool,
    heading: Callable[[str], str],
    layout: Callable[[Table], str],
    sentence: Callable[[str], str],
) -> str:
    if isinstance(told, Diagnosis):
        one = told.heads[0]
        title = f"{told.name}: keys and queries in {one.samples} samples, {one.tokens} tokens"
    else:
        title = f"{told.before.name} (before) and {told.after.name} (after)"
    parts = [heading(title), layout(layer_table(told)), "", layout(head_table(told, every_head=every_head))]
    total = len(told.heads)
    if not every_head and total > SHOWN:
        most = "differ" if isinstance(told, Diagnosis) else "changed"
        parts += ["", sentence(f"Shown are {SHOWN} of {total} heads, those that {most} most; --heads shows all.")]
    return "\n".join([*parts, "", *map(sentence, told.words)]) + "\n"


def _aligned(table: Table) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    words = [head in WORDS for head in table[0]]

    def line(row: list[str]) -> str:
        cells = zip(row, widths, words, strict=True)
        return "  ".join(cell.ljust(width) if word else cell.rjust(width) for cell, width, word in cells).rstrip()

    return "\n".join([line(table[0]), "  ".join("-" * width for width in widths), *map(line, table[1:])])


def _piped(table: Table) -> str:
    rule = ["---" if head in WORDS else "---:" for head in table[0]]
    rows = [table[0], rule, *table[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _flat(head: HeadDiagnosis) -> dict[str, Any]:
    values = asdict(head)
    for name in ("noise", "auc_interval"):
        low, high = values.pop(name)
        short = name.removesuffix("_interval")
        values |= {f"{short}_low": low, f"{short}_high": high}
    return values | {"beyond_noise": head.beyond_noise}


def _flat_change(change: HeadChange) -> dict[str, Any]:
    before, after = _flat(change.before), _flat(change.after)
    who = {name: before.pop(name) for name in ("layer", "head")}
    values = {f"before_{k}": v for k, v in before.items()} | {f"after_{k}": after[k] for k in before}
    low, high = change.interval
    return who | values | {"change": change.mmd, "change_low": low, "change_high": high, "verdict": change.verdict}
