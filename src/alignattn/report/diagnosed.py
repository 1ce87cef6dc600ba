"""A diagnosis, read from its JSON file: one entry a head, and what it says in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alignattn.results import NOT_FINITE

SCHEMA = 1
REQUIRED = ("name", "heads", "words", "settings", "versions", "commit", "command")
NUMBERS = (
    "samples",
    "tokens",
    "mmd",
    "mmd_p",
    "mean_distance",
    "covariance_distance",
    "query_norm",
    "key_norm",
    "entropy",
    "auc",
)
INTERVALS = ("noise", "auc_interval")


@dataclass(frozen=True)
class Head:
    """What is known of one head; a number is None where it could not be measured."""

    layer: str
    head: int
    numbers: Mapping[str, float | None]
    intervals: Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Diagnosis:
    """Of one model on some data."""

    name: str
    heads: tuple[Head, ...]
    words: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    command: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)


def read(values: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis in a file's values; a ValueError says what is wrong with it."""
    schema = values.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise ValueError(f"its schema is {schema!r}, which is no version")
    if schema > SCHEMA:
        raise ValueError(f"its schema is {schema} and this alignattn reads up to {SCHEMA}: install a newer one")
    if missing := [name for name in REQUIRED if name not in values]:
        raise ValueError(f"it lacks {', '.join(map(repr, missing))}")
    if not isinstance(values["heads"], list) or not values["heads"]:
        raise ValueError("it has no heads")
    words = values["words"]
    return Diagnosis(
        name=str(values["name"]),
        heads=tuple(_head(head) for head in values["heads"]),
        words=tuple(map(str, words)) if isinstance(words, list) else (str(words),),
        settings=_mapping(values, "settings"),
        versions=_mapping(values, "versions"),
        commit=None if values["commit"] is None else str(values["commit"]),
        command=str(values["command"]),
        machine=_mapping(values, "machine"),
    )


def _head(values: Any) -> Head:
    if not isinstance(values, Mapping) or "layer" not in values or not isinstance(values.get("head"), int):
        raise ValueError(f"one of its heads names no layer and head: {values!r}")
    numbers = {name: _number(values.get(name), name) for name in NUMBERS}
    intervals = {name: _interval(values.get(name), name) for name in INTERVALS}
    return Head(str(values["layer"]), values["head"], numbers, intervals)


def _number(value: Any, name: str) -> float | None:
    if isinstance(value, str) and value in NOT_FINITE:
        value = NOT_FINITE[value]
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"one of its heads has {value!r} for {name!r}, which is no number")
    return None if math.isnan(value) else value


def _interval(value: Any, name: str) -> tuple[float | None, float | None]:
    if value is None:
        return None, None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"one of its heads has {value!r} for {name!r}, which is no interval")
    return _number(value[0], name), _number(value[1], name)


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"its {name!r} is {found!r}")
    return found
