"""One line of a file becomes sentences and a label, or says why not.

Quotes are characters like any other: the official tables know no quoting, and a reader of CSV swallows rows there.
Sentences stay as they are written, outer spaces included.
"""

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from reprlib import repr as short

from alignattn.datasets.registry import DatasetSpec

Cells = Mapping[str, str]
Sample = tuple[tuple[str, ...], int | float]


class RowError(Exception):
    """The line is no row of the data set."""


class LeftOut(Exception):  # noqa: N818  (no error: the format says so)
    """The line is one that the data set leaves out."""


def decoded(line: bytes) -> str:
    """The line as text."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8, byte {error.start + 1} of the line is 0x{line[error.start]:02x}") from error


def read_sample(spec: DatasetSpec, cells_of: Callable[[str], Cells], line: str) -> Sample:
    """Sentences and label of one line; `RowError` where there are none, `LeftOut` where none are wanted."""
    for why, pattern in spec.odd_lines.items():
        if pattern.fullmatch(line):
            raise LeftOut(why)
    if not line:
        raise RowError("empty line")
    cells = cells_of(line)
    label = _label(spec, cells[spec.label])  # first: nobody minds the sentences of a row that is left out
    for name in spec.sentences:
        if not cells[name].strip():
            raise RowError(f"{name} is empty")
    return tuple(cells[name] for name in spec.sentences), label


def _label(spec: DatasetSpec, text: str) -> int | float:
    if text in spec.left_out:
        raise LeftOut(spec.left_out[text])
    if spec.classes:
        if text not in spec.labels:
            raise RowError(f"{spec.label} is {short(text)}, expected one of {', '.join(spec.labels)}")
        return spec.labels[text]
    least, greatest = spec.scores
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not least <= score <= greatest:  # nor is NaN
        raise RowError(f"{spec.label} is {short(text)}, expected a number from {least:g} to {greatest:g}")
    return score


def object_cells(spec: DatasetSpec) -> Callable[[str], Cells]:
    """How to read the lines of a `.jsonl` file."""
    return partial(_object, (*spec.sentences, spec.label))


def _object(keys: tuple[str, ...], line: str) -> Cells:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError(f"invalid JSON: {error}") from error
    if not isinstance(values, dict):
        raise RowError(f"JSON holds a {type(values).__name__}, expected an object")
    for key in keys:
        if key not in values:
            raise RowError(f"no key {key!r}, found {textwrap.shorten(', '.join(values), 200)}")
        if not isinstance(values[key], str):
            raise RowError(f"{key} is {short(values[key])}, expected text")
        try:
            values[key].encode()
        except UnicodeEncodeError as error:  # JSON can write one; no tokenizer reads it
            raise RowError(f"{key} holds half of a surrogate pair, which is no character") from error
    return values


def table_cells(spec: DatasetSpec, header: str | None) -> Callable[[str], Cells]:
    """How to read the lines of a table with this header line, or without one; `RowError` if the header is not its."""
    if header is None:
        return partial(_cells, spec, spec.columns)
    columns = tuple(header.split(spec.separator))
    found = textwrap.shorten(", ".join(columns), 400)
    missing = [name for name in (*spec.sentences, spec.label) if name not in columns]
    if missing:
        raise RowError(f"the header lacks the column {', '.join(missing)}. Found: {found}.")
    foreign = [name for name in spec.foreign if name in columns]
    if foreign:
        raise RowError(f"the header names {', '.join(foreign)}, as another data set does. Found: {found}.")
    return partial(_cells, spec, columns)


def _cells(spec: DatasetSpec, columns: tuple[str, ...], line: str) -> Cells:
    most = -1 if spec.separator == "\t" else len(columns) - 1
    cells = line.split(spec.separator, most)
    if len(cells) != len(columns):
        cells = _without_votes(spec, columns, cells)
    return dict(zip(columns, cells, strict=True))


def _without_votes(spec: DatasetSpec, columns: tuple[str, ...], cells: list[str]) -> list[str]:
    """The row with its annotators' labels blanked, if it is only of them that it has more or fewer.

    In GLUE's SNLI, train.tsv names label1 alone, where one row in ten has five of them before its gold_label.
    """
    named = [index for index, column in enumerate(columns) if column in spec.votes]
    surplus = len(cells) - len(columns)
    if named and 0 <= len(named) + surplus <= len(spec.votes):
        end = named[-1] + 1 + surplus
        if all(vote in spec.labels or vote == "" for vote in cells[named[0] : end]):
            return cells[: named[0]] + [""] * len(named) + cells[end:]
    raise RowError(f"expected {len(columns)} columns, found {len(cells)}")
