"""From the tables of a TOML file to frozen settings: every key known, every value of its type."""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from alignattn.errors import ConfigError, DataError, unknown

S = TypeVar("S")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file; a DataError names it where it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}") from error


def build(kind: type[S], values: Any, where: str) -> S:
    """Settings of a dataclass from a table; `where` is the table's name, for errors."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a table, got {values!r}.")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass, which mypy cannot ask for
    for name in values:
        if name not in known:
            raise unknown(f"key in {where}:", name, known)
    missing = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING and n not in values]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}.")
    return kind(**{name: convert(value, hints[name], f"{where}.{name}") for name, value in values.items()})


def convert(value: Any, hint: Any, where: str) -> Any:
    """A value of TOML as the type that a setting has: whole numbers serve as floats, lists become tuples."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        if value is None and len(choices) < len(get_args(hint)):
            return None
        for choice in choices:
            try:
                return convert(value, choice, where)
            except ConfigError:
                continue
        raise ConfigError(f"{where} must be {' or '.join(_in_words(c) for c in choices)}, got {value!r}.")
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(item, get_args(hint)[0], where) for item in value)
    if _fits(value, origin or hint):
        return float(value) if hint is float else value
    raise ConfigError(f"{where} must be {_in_words(hint)}, got {value!r}.")


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables laid over tables, key by key; where both have a table, those are merged in turn."""
    merged = dict(below)
    for name, value in above.items():
        inner = merged.get(name)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[name] = merge(inner, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`train.steps=10` as the table it stands for; what is no TOML value is taken as text."""
    path, equals, value = text.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"An override is written KEY=VALUE, such as train.steps=100; got {text!r}.")
    try:
        parsed: Any = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for name in reversed(names):
        parsed = {name: parsed}
    return dict(parsed)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is Mapping or getattr(kind, "__name__", "") == "Mapping":
        return isinstance(value, Mapping)
    return isinstance(value, kind)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"a list, each {_in_words(get_args(hint)[0])}"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, "a table")
