"""Comparison of results: each kind of attention beside soft attention and beside the paper, paired over seeds.

Results that differ in data, model or training are never compared: each such group is a table of its own.
"""

import json
import math
import statistics as plain
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alignattn.config import METHODS
from alignattn.errors import ConfigError, DataError, unknown
from alignattn.experiments.paper import PaperValue, paper_value
from alignattn.experiments.settings import SOFT
from alignattn.experiments.statistics import Difference, holm, paired
from alignattn.results import METRICS, Metric, Result
from alignattn.weights import Auto, read_weight, write_weight

DERIVED = ("step_ratio",)  # made here, of two results


@dataclass(frozen=True)
class Cell:
    """One metric of one kind of attention."""

    mean: float
    deviation: float  # between seeds; NaN with one
    seeds: int
    paper: PaperValue | None = None
    difference: Difference | None = None  # to soft attention
    p_holm: float = math.nan  # the difference's p, adjusted for the number of kinds in the table


@dataclass(frozen=True)
class Row:
    """One kind of attention."""

    label: str
    series: str  # the label without its weight: what a curve over weights has in common
    method: str
    preset: str | None
    weight: float | str | None
    seeds: tuple[int, ...]
    failed: tuple[str, ...]  # first lines of the errors
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Comparison:
    """One table: everything about it but the kind of attention is the same."""

    name: str
    model: str
    description: str
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    paper: Mapping[str, Any] | None = None  # where the paper's values stand, as the recipe says it
    commands: tuple[str, ...] = ()

    @property
    def tests(self) -> int:
        """How many tests were made."""
        cells = (cell for row in self.rows for cell in row.cells.values())
        return sum(cell.difference is not None and not math.isnan(cell.difference.p) for cell in cells)


@dataclass
class _Kind:
    """The results of one kind of attention, by seed."""

    results: dict[int, Result] = field(default_factory=dict)
    failed: dict[int, Result] = field(default_factory=dict)

    def any(self) -> Result:
        return next(iter((self.results or self.failed).values()))

    def measured(self) -> set[str]:
        return {name for result in self.results.values() for name in result.metrics}


def compare(results: Iterable[Result], metrics: Sequence[str] | None = None) -> list[Comparison]:
    """One table for each group of comparable results; `metrics` are those to show, else what the recipe reports."""
    for one in metrics or ():
        metric(one)  # refuses what is none
    groups = _groups(results)
    if not groups:
        raise DataError("There are no results to compare.")
    measured = {name for kinds in groups.values() for kind in kinds.values() for name in kind.measured()}
    for one in metrics or ():
        if measured and one not in measured and one not in DERIVED:
            has = ", ".join([*sorted(measured), *DERIVED])
            raise ConfigError(f"No result has the metric {one!r}. There are: {has}.")
    return [_compare(name, kinds, metrics) for name, kinds in _ordered(groups)]


def behind(results: Iterable[Result]) -> list[list[list[Result]]]:
    """The results behind each row of each table that `compare` makes of them, by seed, failed ones last."""
    tables = (kinds for _, kinds in _ordered(_groups(results)))
    return [[[*_by_seed(kind.results), *_by_seed(kind.failed)] for kind in kinds] for kinds in tables]


def metric(name: str) -> Metric:
    """How to read a metric, also one on other data: "accuracy@noisy"."""
    base, _, on = name.partition("@")
    if base not in METRICS:
        raise unknown("metric", base, METRICS)
    found = METRICS[base]
    return replace(found, label=f"{found.label}, {on}") if on else found


def _groups(results: Iterable[Result]) -> dict[str, dict[str, _Kind]]:
    """By what must be equal, then by kind of attention."""
    groups: dict[str, dict[str, _Kind]] = {}
    for result in sorted(results, key=_age):  # of two that are alike the newer counts
        kind = groups.setdefault(_group(result), {}).setdefault(_kind(result), _Kind())
        into, other = (kind.failed, kind.results) if result.failed else (kind.results, kind.failed)
        into[result.seed] = result
        other.pop(result.seed, None)
    return groups


def _ordered(groups: Mapping[str, Mapping[str, _Kind]]) -> list[tuple[str, list[_Kind]]]:
    """Tables by their names, and their rows in order."""
    names = _names(groups)
    tables = sorted(groups, key=lambda group: names[group])
    return [(names[g], sorted(groups[g].values(), key=lambda kind: _order(kind.any()))) for g in tables]


def _by_seed(results: Mapping[int, Result]) -> list[Result]:
    return [result for _, result in sorted(results.items())]


def _compare(name: str, kinds: list[_Kind], wanted: Sequence[str] | None) -> Comparison:
    soft = next((kind for kind in kinds if kind.any().method == SOFT), None)
    everything = [result for kind in kinds for result in (*kind.results.values(), *kind.failed.values())]
    newest = max(everything, key=_age)  # says what is shown: a recipe's report may have changed since the first run
    metrics = tuple(dict.fromkeys(wanted or newest.recipe.get("report") or ("accuracy",)))
    reference = newest.recipe.get("paper")
    rows = _rows(kinds, soft, metrics, reference)
    commands = tuple(dict.fromkeys(result.command for kind in kinds for result in kind.results.values()))
    model = str((newest.recipe.get("model") or {}).get("name", ""))
    return Comparison(name, model, str(newest.recipe.get("description", "")), metrics, tuple(rows), reference, commands)


def _rows(
    kinds: list[_Kind], soft: _Kind | None, metrics: tuple[str, ...], reference: Mapping[str, Any] | None
) -> list[Row]:
    labels = _labels([kind.any() for kind in kinds])
    columns: dict[str, list[Cell | None]] = {}
    for one in metrics:
        cells = [_cell(one, kind, soft, reference) for kind in kinds]
        adjusted = holm([c.difference.p if c is not None and c.difference is not None else math.nan for c in cells])
        columns[one] = [None if c is None else replace(c, p_holm=p) for c, p in zip(cells, adjusted, strict=True)]
    rows = []
    for i, (kind, label) in enumerate(zip(kinds, labels, strict=True)):
        result = kind.any()
        rows.append(
            Row(
                label=label.text(),
                series=label.series(),
                method=result.method,
                preset=result.preset,
                weight=result.weight,
                seeds=tuple(sorted(kind.results)),
                failed=tuple(f"seed {s}: {_first_line(r.error)}" for s, r in sorted(kind.failed.items())),
                cells={one: cell for one in metrics if (cell := columns[one][i]) is not None},
            )
        )
    return rows


def _cell(name: str, kind: _Kind, soft: _Kind | None, reference: Mapping[str, Any] | None) -> Cell | None:
    values, baseline = _values(name, kind, soft), _values(name, soft, soft) if soft else {}
    paper = paper_value(reference, name, kind.any().method) if reference else None
    if not values:
        return None if paper is None else Cell(math.nan, math.nan, 0, paper)
    both = sorted(values.keys() & baseline.keys())
    difference = None
    if both and kind is not soft:
        better = metric(name).higher_is_better
        difference = paired([values[seed] for seed in both], [baseline[seed] for seed in both], better)
    return Cell(*_mean_and_deviation(list(values.values())), len(values), paper, difference)


def _mean_and_deviation(values: list[float]) -> tuple[float, float]:
    if not all(map(math.isfinite, values)):
        return sum(values), math.nan  # NaN or infinite, as their mean
    # Both are exact inside, so that the order is of no account, and no sum overflows.
    return float(plain.mean(values)), plain.stdev(values) if len(values) > 1 else math.nan


def _values(name: str, kind: _Kind, soft: _Kind | None) -> dict[int, float]:
    """A metric by seed."""
    if name != "step_ratio":
        return {seed: r.metrics[name] for seed, r in kind.results.items() if name in r.metrics}
    ratios = {}
    for seed, result in kind.results.items():
        base = soft.results.get(seed) if soft else None
        if base is None or base.machine != result.machine:  # times of two machines say nothing about attention
            continue
        if base.times.get("step") and "step" in result.times:
            ratios[seed] = result.times["step"] / base.times["step"]
    return ratios


def _group(result: Result) -> str:
    """What must be equal for results to be compared."""
    decisive = {key: result.recipe.get(key) for key in ("task", "data", "model", "train")}
    return json.dumps({"name": result.name, **decisive, "inputs": dict(result.inputs)}, sort_keys=True, default=str)


def _kind(result: Result) -> str:
    return json.dumps([result.method, result.preset, result.weight, _options(result)], sort_keys=True, default=str)


def _age(result: Result) -> tuple[str, str]:
    """Sorts by time; what ended in one second by its content, so that the order of the files is of no account."""
    content = [result.seed, result.command, result.recipe, result.metrics, result.times, result.error]
    return result.finished, json.dumps(content, sort_keys=True, default=str)


def _order(result: Result) -> tuple[Any, ...]:
    methods = (SOFT, *METHODS)
    place = methods.index(result.method) if result.method in methods else len(methods)
    weight = read_weight(result.weight) if isinstance(result.weight, str) else result.weight or 0.0
    number = weight.share if isinstance(weight, Auto) else weight
    return place, result.method, result.preset or "", isinstance(weight, Auto), number, _kind(result)


@dataclass(frozen=True)
class _Label:
    """The name of a row."""

    method: str
    weight: str
    options: tuple[str, ...] = ()

    def text(self) -> str:
        return " ".join(filter(None, (self.method, self.weight, *self.options)))

    def series(self) -> str:
        chosen = "auto" if self.weight.startswith("auto") else ""
        return " ".join(filter(None, (self.method, chosen, *self.options)))


def _labels(results: list[Result]) -> list[_Label]:
    """The method and weight; the preset where the table has several; options that differ where these are alike."""
    presets = {result.preset for result in results if result.preset is not None}
    options = [_options(result) for result in results]
    labels = []
    for result, own in zip(results, options, strict=True):
        parts = []
        if result.weight is not None:
            if len(presets) > 1:
                parts.append(str(result.preset))
            # Not those that the presets themselves set otherwise: the preset's name says it.
            like = (result.method, result.preset)
            alike = [other for r, other in zip(results, options, strict=True) if (r.method, r.preset) == like]
            parts += _unlike_most(own, alike)
        weight = "" if result.weight is None else write_weight(result.weight)
        labels.append(_Label(result.method, weight, tuple(parts)))
    return labels


def _options(result: Result) -> dict[str, Any]:
    """All that is set about an alignment, flat, and as it is in a file: no tuples."""
    if result.alignment is None:
        return {}
    alignment = json.loads(json.dumps(dict(result.alignment), default=str))
    matcher = alignment.pop("matcher", {})
    told = ["method", "preset", "weight", *([] if str(result.weight).startswith("auto") else ["first_weight"])]
    flat = {name: value for name, value in alignment.items() if name not in told}
    beside = result.recipe.get("align") or {}  # what a recipe does around `align`
    unset = {"until_met": False, "max_tokens": None, "every": 1}  # do nothing, and leave no trace in a file
    return {
        **unset,
        **flat,
        **matcher,
        "ramp": float(beside.get("ramp", 0.0)),
        "rebase": bool(beside.get("rebase", False)),
    }


def _apart(own: Mapping[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """What is not the same in all."""
    return [f"{k}={v}" for k, v in own.items() if any(k not in other or other[k] != v for other in others)]


def _unlike_most(own: Mapping[str, Any], others: list[dict[str, Any]]) -> list[str]:
    """What is not as in most of them, nor, where there is no most, the same in all."""
    parts = []
    for name, value in own.items():
        having = [other for other in others if name in other or name != "first_weight"]  # of weights that are chosen
        alike = sum(name in other and other[name] == value for other in having)
        if alike < len(having) and 2 * alike <= len(having):
            parts.append(f"{name}={value}")
    return parts


def _names(groups: Mapping[str, Mapping[str, _Kind]]) -> dict[str, str]:
    """The recipes' names, with what sets groups of one name apart."""
    firsts = {group: next(iter(kinds.values())).any() for group, kinds in groups.items()}
    names = {}
    for group, result in firsts.items():
        alike = [_flat(other.recipe) for other in firsts.values() if other.name == result.name]
        apart = _apart(_flat(result.recipe), alike)
        names[group] = f"{result.name} ({', '.join(apart)})" if apart else result.name
    counts = Counter(names.values())
    same = {name: [g for g in groups if names[g] == name] for name, count in counts.items() if count > 1}
    for name, those in same.items():  # equal settings, other data or weights
        inputs = {group: {k: v[:8] for k, v in sorted(firsts[group].inputs.items())} for group in those}
        for group, own in inputs.items():
            apart = _apart(own, list(inputs.values()))
            names[group] = f"{name} [{', '.join(apart) or 'other inputs'}]"
    return names


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    tables = {key: recipe.get(key) or {} for key in ("data", "model", "train")}
    flat = {f"{table}.{key}": value for table, values in tables.items() for key, value in values.items()}
    return {"task": recipe.get("task"), **flat}


def _first_line(error: str | None) -> str:
    return next(iter(str(error).strip().splitlines()), "")
