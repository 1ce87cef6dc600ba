"""The sections of diagnoses: each with its words, a map of layers and heads and a table; several beside each other."""

from collections.abc import Sequence
from functools import partial

from alignattn.report import pictures, svg
from alignattn.report.blocks import Block, Facts, Figure, Folded, Listing, Picture, Section, Table
from alignattn.report.diagnosed import Diagnosis, Head
from alignattn.report.provenance import flat, origin

# Field, head of its column, digits behind the point.
COLUMNS = (
    ("samples", "samples", 0),
    ("tokens", "tokens", 0),
    ("mmd", "MMD²", 4),
    ("noise", "noise", 4),
    ("mmd_p", "p", 3),
    ("mean_distance", "means apart", 3),
    ("covariance_distance", "covariances apart", 3),
    ("query_norm", "|q|", 2),
    ("key_norm", "|k|", 2),
    ("entropy", "entropy", 3),
    ("auc", "AUC", 3),
    ("auc_interval", "AUC, 95 %", 3),
)


def sections(diagnoses: Sequence[Diagnosis], salt: str) -> list[Section]:
    """One for each, and before them, where they are several, one for all."""
    maps = [by_layer(diagnosis) for diagnosis in diagnoses]
    limits = pictures.limits_of(maps)
    found = [_beside_each_other(diagnoses, maps, limits, salt)] if len(diagnoses) > 1 else []
    for number, (diagnosis, layers) in enumerate(zip(diagnoses, maps, strict=True), 1):
        found.append(_section(diagnosis, layers, limits, f"{salt}-{number}"))
    return found


def by_layer(diagnosis: Diagnosis) -> dict[str, list[float]]:
    """MMD² of each head, layers in the order of the file; NaN where it was not measured."""
    rows: dict[str, dict[int, float]] = {}
    for head in diagnosis.heads:
        mmd = head.numbers["mmd"]
        rows.setdefault(head.layer, {})[head.head] = float("nan") if mmd is None else mmd
    return {layer: [row.get(i, float("nan")) for i in range(max(row) + 1)] for layer, row in rows.items()}


def _section(diagnosis: Diagnosis, layers: dict[str, list[float]], limits: tuple[float, float], salt: str) -> Section:
    head = ["layer", "head", *(title for _, title, _ in COLUMNS)]
    rows = [[one.layer, str(one.head), *_cells(one)] for one in diagnosis.heads]
    told = [*flat(diagnosis.settings), *origin([diagnosis.versions], [diagnosis.commit], [diagnosis.machine])]
    blocks: list[Block] = [Listing(diagnosis.words, role="words")] if diagnosis.words else []
    blocks += [
        Figure(
            "MMD² between queries and keys of each head. Layers are numbered in the order of the table.",
            [_picture(diagnosis.name, layers, limits, f"{salt}-map")],
        ),
        Table(f"{diagnosis.name}: every head", head, rows),
        Folded(
            "What was run",
            [Listing([diagnosis.command], code=True), Facts([(name, value) for name, value in told if value])],
        ),
    ]
    return Section(f"Diagnosis: {diagnosis.name}", blocks)


def _beside_each_other(
    diagnoses: Sequence[Diagnosis], maps: Sequence[dict[str, list[float]]], limits: tuple[float, float], salt: str
) -> Section:
    drawn = [
        _picture(diagnosis.name, layers, limits, f"{salt}-all-{number}")
        for number, (diagnosis, layers) in enumerate(zip(diagnoses, maps, strict=True), 1)
    ]
    heads = {(head.layer, head.head): None for diagnosis in diagnoses for head in diagnosis.heads}
    tables = [{(head.layer, head.head): head for head in diagnosis.heads} for diagnosis in diagnoses]
    measures = [("mmd", "MMD²", 4), ("auc", "AUC", 3)]
    titles = [f"{title}, {diagnosis.name}" for _, title, _ in measures for diagnosis in diagnoses]
    rows = []
    for layer, number in heads:
        found = [table.get((layer, number)) for table in tables]
        cells = [
            "–" if one is None else _said(one.numbers[name], digits) for name, _, digits in measures for one in found
        ]
        rows.append([layer, str(number), *cells])
    return Section(
        "Diagnoses beside each other",
        [
            Figure("MMD² between queries and keys of each head, on one scale.", drawn),
            Table("Diagnoses: every head beside each other", ["layer", "head", *titles], rows),
        ],
    )


def _picture(name: str, layers: dict[str, list[float]], limits: tuple[float, float], salt: str) -> Picture:
    draw = partial(pictures.head_map, name, layers, limits, "MMD²")
    return Picture(svg.inline(draw, f"MMD² of {name} by layer and head", salt))


def _cells(head: Head) -> list[str]:
    cells = []
    for name, _, digits in COLUMNS:
        if name in head.intervals:
            low, high = head.intervals[name]
            nothing = low is None or high is None
            cells.append("–" if nothing else f"{_said(low, digits)} to {_said(high, digits)}")
        else:
            cells.append(_said(head.numbers[name], digits))
    return cells


def _said(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−").replace("inf", "∞")
