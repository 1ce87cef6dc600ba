r"""Rows of a file, each with the line it stands in: CSV, TSV, JSON lines, Parquet; all but Parquet also gzipped.

CSV is quoted as RFC 4180 has it: a quoted cell may hold commas, doubled quotes and line ends. TSV knows no quoting, as
in GLUE: a quote is a character like any other, and every line end ends a row. Text is UTF-8, with or without a byte
order mark.
"""

import csv
import gzip
import importlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignattn.datasets.reading import numbered_lines
from alignattn.errors import DataError, unknown

Row = tuple[int, dict[str, Any]]  # its line, and its cells by column


@dataclass(frozen=True)
class Table:
    """A file that was read: its columns, its rows, and where each row begins."""

    path: Path
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    lines: list[int]

    def column(self, name: str) -> list[Any]:
        """The cells of a column."""
        self.require(name)
        for line, row in zip(self.lines, self.rows, strict=True):
            if name not in row:
                raise DataError(f"{self.path}, line {line}, has no {name!r}.")
        return [row[name] for row in self.rows]

    def require(self, name: str) -> None:
        """An error where there is no such column."""
        if name not in self.columns:
            hint = str(unknown("column", name, self.columns)).partition("Did you mean")
            near = f" Did you mean{hint[2]}" if hint[1] else ""
            raise DataError(f"{self.path} has no column {name!r}. It has: {', '.join(self.columns)}.{near}")


def read(path: Path) -> Table:
    """Read a file as its name says."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = bool(suffixes) and suffixes[-1] == ".gz"
    kind = (suffixes[-2] if len(suffixes) > 1 else "") if packed else (suffixes[-1] if suffixes else "")
    if kind not in READERS or (packed and kind == ".parquet"):
        raise DataError(
            f"{path} is of no kind that can be read. Its name must end in .csv, .tsv, .jsonl (each also with .gz) or "
            ".parquet."
        )
    if path.is_dir():
        raise DataError(f"{path} is a folder, and should be a file.")
    rows = list(READERS[kind](path))
    if not rows:
        raise DataError(f"{path} is empty: it has no rows.")
    columns = tuple(dict.fromkeys(name for _, row in rows for name in row))
    return Table(path, columns, [row for _, row in rows], [line for line, _ in rows])


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # of a long document in one cell
    try:
        packed = path.suffix.lower() == ".gz"
        with gzip.open(path) if packed else path.open("rb") as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            reader = csv.reader(text, strict=True)
            header, start = None, 1
            for cells in reader:
                line, start = start, reader.line_num + 1
                if not any(cell.strip() for cell in cells):
                    continue
                if header is None:
                    header = _header(path, cells)
                else:
                    yield line, _row(path, line, header, cells)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}.") from error
    except csv.Error as error:
        raise DataError(f"{path}, line {start}, cannot be read as CSV: {error}.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is truncated or corrupt: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _tsv(path: Path) -> Iterator[Row]:
    header = None
    for line, text in _text_lines(path):
        if header is None:
            header = _header(path, text.split("\t"))
        elif text:
            yield line, _row(path, line, header, text.split("\t"))


def _json_lines(path: Path) -> Iterator[Row]:
    lines = _text_lines(path)
    for line, text in lines:
        if not text:
            continue
        if line == 1 and text.lstrip().startswith("["):  # one list of all rows
            yield from _json_list(path, "\n".join([text, *(rest for _, rest in lines)]))
            return
        yield line, _object(path, line, text)


def _json_list(path: Path, text: str) -> Iterator[Row]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, row {number}, is no JSON object with a name for each cell.")
        yield number, row


def _object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line}, cannot be read as JSON: {error}.") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {line}, is no JSON object with a name for each cell.")
    return row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'alignattn[parquet]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}.") from error
    return enumerate(rows, start=1)


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".csv": _csv,
    ".tsv": _tsv,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
}


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    for line, found in numbered_lines(path):
        try:
            yield line, found.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {line}, is not UTF-8: byte {error.start + 1} is 0x{found[error.start]:02x}."
            ) from error


def _header(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path} has two columns {twice[0]!r}. Its first line must name each column once.")
    return names


def _row(path: Path, line: int, header: list[str], cells: list[str]) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(f"{path}, line {line}, has {len(cells)} cells, and the first line names {len(header)} columns.")
    return dict(zip(header, cells, strict=True))
