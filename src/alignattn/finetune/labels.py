"""Tasks, and the labels of each: found in the training file, which alone says what labels there are.

| task | a label | label space |
|---|---|---|
| classification | a name or number | the names in the training file, sorted; numbers by value |
| multilabel | a list, or names with a separator between them | likewise |
| regression | a finite number | - |
| tokens | a list with one name for each token, or names with spaces between them | likewise |
"""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignattn.errors import ConfigError, DataError
from alignattn.finetune.columns import TAGS, Columns
from alignattn.finetune.tables import Table

TASKS = ("classification", "multilabel", "regression", "tokens")
SEPARATORS = ("|", ";", ",")
MANY = 100  # labels: more are named as meant by --task, or they are taken for something that is no label


@dataclass(frozen=True)
class Labels:
    """A task and its label space."""

    task: str
    names: tuple[str, ...] = ()  # none for regression
    separator: str | None = None  # of several labels in one cell

    def encode(self, table: Table, columns: Columns) -> list[Any]:
        """The labels of a table: a class, a 0/1 vector, a number, or a class for each token."""
        values = _parsed(self.task, table, columns, self.separator)
        if self.task == "regression":
            return values
        index = {name: i for i, name in enumerate(self.names)}
        encoded: list[Any] = []
        for line, value in zip(table.lines, values, strict=True):
            names = [value] if self.task == "classification" else value
            for name in names:
                if name not in index:
                    raise DataError(
                        f"{table.path}, line {line}, has the label {name!r}, which the training file never has. It "
                        f"has: {listed(self.names)}."
                    )
            numbers = [index[name] for name in names]
            if self.task == "classification":
                encoded.append(numbers[0])
            elif self.task == "tokens":
                encoded.append(numbers)
            else:
                encoded.append([float(i in numbers) for i in range(len(self.names))])
        return encoded


def learn(table: Table, columns: Columns, task: str | None = None, separator: str | None = None) -> Labels:
    """The label space of the training file; the task is told from its label column where it is not given."""
    task = task or _task_of(table, columns)
    if task == "tokens" and len(columns.texts) > 1:
        raise ConfigError("Token classification takes one text column, not two.")
    if task == "multilabel" and separator is None:
        separator = _separator(table.column(columns.label))
    values = _parsed(task, table, columns, separator)
    if task == "regression":
        return Labels(task)
    seen = set(values) if task == "classification" else {name for names in values for name in names}
    if len(seen) < (1 if task == "multilabel" else 2):
        raise DataError(
            f"{table.path} has {'no label' if not seen else f'only the label {next(iter(seen))!r}'} in the column "
            f"{columns.label!r}: there is nothing to learn."
        )
    return Labels(task, tuple(sorted(seen, key=_order)), separator)


def texts_of(table: Table, columns: Columns, task: str) -> list[tuple[str, ...]] | list[list[str]]:
    """For each row its texts, one or two; for token classification, its tokens."""
    if task == "tokens":
        name = columns.texts[0]
        return [_tokens(table, line, name, v) for line, v in zip(table.lines, table.column(name), strict=True)]
    cells = [table.column(name) for name in columns.texts]
    for name, column in zip(columns.texts, cells, strict=True):
        for line, value in zip(table.lines, column, strict=True):
            if value is None or isinstance(value, list | dict):
                raise DataError(f"{table.path}, line {line}, has no text in the column {name!r}: {value!r}.")
    return [tuple(str(value) for value in row) for row in zip(*cells, strict=True)]


def _task_of(table: Table, columns: Columns) -> str:
    cells, texts = table.column(columns.label), table.column(columns.texts[0])
    if any(isinstance(cell, list) for cell in cells):
        return "tokens" if all(isinstance(text, list) for text in texts) else "multilabel"
    if columns.label.lower() in TAGS and all(
        isinstance(c, str) and isinstance(t, str) and len(c.split()) == len(t.split())
        for c, t in zip(cells, texts, strict=True)
    ):
        return "tokens"
    if 2 * sum(_is_fraction(cell) for cell in cells) > len(cells):
        return "regression"
    values = {str(cell).strip() for cell in cells}
    if len(values) > MANY:
        raise ConfigError(
            f"The label column {columns.label!r} of {table.path} has {len(values)} different values. Say what it is: "
            "--task classification, multilabel, regression or tokens."
        )
    if all(_number(value) is not None for value in values) and any(_is_fraction(cell) for cell in cells):
        return "regression"
    return "classification"


def _parsed(task: str, table: Table, columns: Columns, separator: str | None) -> list[Any]:
    name = columns.label
    cells = table.column(name)
    if task == "tokens":
        return _tags(table, columns, cells)
    parsed: list[Any] = []
    for line, cell in zip(table.lines, cells, strict=True):
        where = f"{table.path}, line {line},"
        if cell is None or (isinstance(cell, str) and not cell.strip() and task != "multilabel"):
            raise DataError(f"{where} has no label in the column {name!r}.")
        if task == "regression":
            number = _number(cell)
            if number is None:
                raise DataError(f"{where} has {cell!r} in the label column {name!r}, and regression needs a number.")
            parsed.append(number)
        elif task == "multilabel":
            parsed.append(_several(cell, separator))
        elif isinstance(cell, list | dict):
            raise DataError(f"{where} has several labels in the column {name!r}. Is it --task multilabel or tokens?")
        else:
            parsed.append(str(cell).strip())
    return parsed


def _tags(table: Table, columns: Columns, cells: Sequence[Any]) -> list[list[str]]:
    texts = texts_of(table, columns, "tokens")
    tags = [_tokens(table, line, columns.label, cell) for line, cell in zip(table.lines, cells, strict=True)]
    for line, tokens, found in zip(table.lines, texts, tags, strict=True):
        if len(tokens) != len(found):
            raise DataError(f"{table.path}, line {line}, has {len(tokens)} tokens and {len(found)} labels for them.")
    return tags


def _tokens(table: Table, line: int, name: str, cell: Any) -> list[str]:
    found = _as_list(cell)
    if found is None:
        found = cell.split() if isinstance(cell, str) else []
    if not found or any(isinstance(token, list | dict) or token is None for token in found):
        raise DataError(f"{table.path}, line {line}, has no list of tokens in the column {name!r}: {cell!r}.")
    return [str(token) for token in found]


def _several(cell: Any, separator: str | None) -> list[str]:
    found = _as_list(cell)
    if found is None:
        found = str(cell).split(separator) if separator else [cell]
    return list(dict.fromkeys(name for name in (str(part).strip() for part in found) if name))


def _as_list(cell: Any) -> list[Any] | None:
    """A list, or one that stands in a cell of text as JSON or as Python writes it."""
    if isinstance(cell, str) and cell.strip().startswith("[") and cell.strip().endswith("]"):
        try:
            cell = ast.literal_eval(cell.strip())
        except (ValueError, SyntaxError):
            return None
    return cell if isinstance(cell, list) else None


def _separator(cells: Sequence[Any]) -> str | None:
    """The first of the usual ones that the column has."""
    return next((s for s in SEPARATORS if any(isinstance(cell, str) and s in cell for cell in cells)), None)


def _number(cell: Any) -> float | None:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and not isinstance(cell, bool) else None


def _is_fraction(cell: Any) -> bool:
    """A number that is written with a point or an exponent: 3.5, 4.0, 1e-3."""
    return isinstance(cell, float) or (isinstance(cell, str) and _number(cell) is not None and not _is_whole(cell))


def _is_whole(cell: str) -> bool:
    try:
        int(cell)
    except ValueError:
        return False
    return True


def _order(name: str) -> tuple[int, float, str]:
    number = _number(name)
    return (1, 0.0, name) if number is None else (0, number, name)


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names with commas between them, the first few."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def id2label(labels: Labels) -> Mapping[int, str]:
    """For the model's config."""
    return dict(enumerate(labels.names))
