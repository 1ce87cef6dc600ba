"""The sections of diagnoses: each with its words, a map of layers and heads and a table; several beside each other."""

import math
from collections.abc import Callable, Sequence

from alignattn.diagnosis.result import ROUNDING, Diagnosis, HeadDiagnosis, Interval
from alignattn.diagnosis.side_by_side import SideBySide, compare_diagnoses
from alignattn.diagnosis.words import interval, number
from alignattn.errors import DataError
from alignattn.report import pictures
from alignattn.report.blocks import Block, Facts, Figure, Folded, Listing, Paragraph, Section, Table
from alignattn.report.provenance import flat, origin

# Field, head of its column, digits behind the point.
COLUMNS = (
    ("mmd", "MMD²", 4),
    ("noise", "noise, 95 %", 4),
    ("mmd_p", "p", 3),
    ("mean_distance", "means apart", 3),
    ("covariance_distance", "covariances apart", 3),
    ("query_norm", "|q|", 2),
    ("key_norm", "|k|", 2),
    ("entropy", "entropy", 3),
    ("auc", "AUC", 3),
    ("auc_interval", "AUC, 95 %", 3),
    ("samples", "samples", 0),
    ("tokens", "tokens", 0),
)
VERDICT = "against noise"
MAP = "MMD² between queries and keys of each head{scale}. A dot: within noise, chance alone gives as much."


def sections(diagnoses: Sequence[Diagnosis], salt: str) -> list[Section]:
    """One for each, and before them, where they are several, one for all."""
    highest = pictures.highest_of(_by_layer(diagnosis, _distance) for diagnosis in diagnoses)
    found = [_section(diagnosis, highest, f"{salt}-{number}") for number, diagnosis in enumerate(diagnoses, 1)]
    return [_beside_each_other(diagnoses, highest, salt), *found] if len(diagnoses) > 1 else found


def _section(diagnosis: Diagnosis, highest: float | None, salt: str) -> Section:
    head = ["layer", "head", COLUMNS[0][1], VERDICT, *(title for _, title, _ in COLUMNS[1:])]
    rows = []
    for one in diagnosis.heads:
        distance, *cells = (_cell(getattr(one, name), digits) for name, _, digits in COLUMNS)
        rows.append([one.layer, str(one.head), distance, _verdict(one), *cells])
    told = [*flat(diagnosis.settings), *origin([diagnosis.versions], [diagnosis.commit], [])]
    blocks: list[Block] = [Listing(diagnosis.words, role="words")] if diagnosis.words else []
    blocks += _maps([diagnosis], highest, f"{salt}-map")
    blocks.append(Table(f"{diagnosis.name}: every head", head, rows))
    facts = Facts([(name, value) for name, value in told if value])
    typed = [Listing([diagnosis.command], code=True)] if diagnosis.command else []
    blocks.append(Folded("What was run", [*typed, facts]))
    return Section(f"Diagnosis: {diagnosis.name}", blocks)


def _beside_each_other(diagnoses: Sequence[Diagnosis], highest: float | None, salt: str) -> Section:
    compared = _compared(diagnoses)
    blocks: list[Block] = []
    if compared is not None:
        blocks.append(Listing(compared.words, role="words"))
    blocks += _maps(diagnoses, highest, f"{salt}-all")
    blocks.append(_table(diagnoses, compared))
    if compared is not None:
        first, second = (diagnosis.name for diagnosis in diagnoses)
        blocks.append(
            Paragraph(
                f"A change is that from {first} to {second}, the order of their files; its 95 % are those of the noise "
                "between samples.",
                "subtitle",
            )
        )
    return Section("Diagnoses beside each other", blocks)


def _compared(diagnoses: Sequence[Diagnosis]) -> SideBySide | None:
    """What changed from one to the other; None where they are more than two, or have other layers or heads."""
    if len(diagnoses) != 2:
        return None
    try:
        return compare_diagnoses(*diagnoses)
    except DataError:
        return None


def _table(diagnoses: Sequence[Diagnosis], compared: SideBySide | None) -> Table:
    by_place = [{(head.layer, head.head): head for head in diagnosis.heads} for diagnosis in diagnoses]
    changes = {(change.before.layer, change.before.head): change for change in compared.heads} if compared else {}
    head = ["layer", "head", *(f"MMD², {diagnosis.name}" for diagnosis in diagnoses)]
    head += ["change", "95 %", "verdict"] if compared else []
    head += [f"AUC, {diagnosis.name}" for diagnosis in diagnoses]
    rows = []
    for layer, number_of_head in {place: None for heads in by_place for place in heads}:
        found = [heads.get((layer, number_of_head)) for heads in by_place]
        row = [layer, str(number_of_head), *("–" if one is None else _cell(one.mmd, 4) for one in found)]
        if compared:
            change = changes[layer, number_of_head]
            row += [_cell(change.mmd, 4), _cell(change.interval, 4), change.verdict]
        rows.append([*row, *("–" if one is None else _cell(one.auc, 3) for one in found)])
    return Table("Diagnoses: every head beside each other", head, rows)


def _maps(diagnoses: Sequence[Diagnosis], highest: float | None, salt: str) -> list[Block]:
    drawn = []
    for place, diagnosis in enumerate(diagnoses, 1):
        distances = _by_layer(diagnosis, _distance)
        if any(math.isfinite(value) for row in distances.values() for value in row):
            limits = _by_layer(diagnosis, _limit)
            drawn.append(
                pictures.distance_map(diagnosis.name, distances, f"{salt}-{place}", highest=highest, noise=limits)
            )
    caption = MAP.format(scale=", on one scale" if len(drawn) > 1 else "")
    return [Figure(caption, drawn, large=True)] if drawn else []


def _by_layer(diagnosis: Diagnosis, value: Callable[[HeadDiagnosis], float]) -> dict[str, list[float]]:
    """A value of each head, layers in the order of the file; NaN where it is not known."""
    rows: dict[str, dict[int, float]] = {}
    for head in diagnosis.heads:
        rows.setdefault(head.layer, {})[head.head] = value(head)
    return {layer: [row.get(i, math.nan) for i in range(max(row) + 1)] for layer, row in rows.items()}


def _distance(head: HeadDiagnosis) -> float:
    return head.mmd if math.isfinite(head.mmd) else math.nan


def _limit(head: HeadDiagnosis) -> float:
    """The end of the noise on that side of zero where the head is: |MMD²| is within it, or not, as MMD² is."""
    limit = (head.noise[1] if head.mmd >= 0 else -head.noise[0]) + ROUNDING
    return limit if math.isfinite(limit) else math.nan


def _verdict(head: HeadDiagnosis) -> str:
    if math.isnan(head.mmd) or any(map(math.isnan, head.noise)):
        return "–"
    return "beyond" if head.beyond_noise else "within" if head.within_noise else "below"


def _cell(value: float | Interval, digits: int) -> str:
    if isinstance(value, tuple):
        return "–" if any(map(math.isnan, value)) else interval(value, digits)
    return number(value, digits)
