"""A comparison that `alignattn compare --format json` printed, read back: null stands for what could not be told."""

import math
from collections.abc import Mapping
from typing import Any

from alignattn.experiments.compare import Cell, Comparison, Row, metric
from alignattn.experiments.paper import PaperValue
from alignattn.experiments.statistics import Difference
from alignattn.results import NOT_FINITE


def is_comparison(values: Any) -> bool:
    """Whether it looks like one."""
    return isinstance(values, Mapping) and {"name", "metrics", "rows"} <= values.keys()


def read(values: Mapping[str, Any]) -> Comparison:
    """The comparison; a ValueError says what is wrong with it."""
    try:
        for name in values["metrics"]:
            metric(name)  # refuses what is none
        return Comparison(
            name=str(values["name"]),
            model=str(values["model"]),
            description=str(values["description"]),
            metrics=tuple(values["metrics"]),
            rows=tuple(_row(row) for row in values["rows"]),
            paper=values.get("paper"),
            commands=tuple(map(str, values.get("commands", ()))),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is a comparison that cannot be read: {type(error).__name__} {error}") from error


def _row(values: Mapping[str, Any]) -> Row:
    return Row(
        **{name: values[name] for name in ("label", "series", "method", "preset", "weight")},
        seeds=tuple(values["seeds"]),
        failed=tuple(map(str, values["failed"])),
        cells={str(name): _cell(cell) for name, cell in values["cells"].items()},
    )


def _cell(values: Mapping[str, Any]) -> Cell:
    paper, difference = values["paper"], values["difference"]
    return Cell(
        mean=_number(values["mean"]),
        deviation=_number(values["deviation"]),
        seeds=int(values["seeds"]),
        paper=None if paper is None else PaperValue(**paper),
        difference=None if difference is None else _difference(difference),
        p_holm=_number(values["p_holm"]),
    )


def _difference(values: Mapping[str, Any]) -> Difference:
    kept = ("seeds", "verdict", "more_seeds")
    fields: dict[str, Any] = {name: value if name in kept else _number(value) for name, value in values.items()}
    return Difference(**fields)


def _number(value: Any) -> float:
    return math.nan if value is None else NOT_FINITE[value] if value in NOT_FINITE else float(value)
