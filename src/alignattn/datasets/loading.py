"""From a data set's name and a folder to its sentences and labels, with a count of everything that was left out.

A row that cannot be read is left out with a warning, or is an error when `strict`. More than 1 % of such rows (more
than half, in a file of fewer than 100 rows) is always an error: the file is then another than it should be.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from alignattn.datasets.reading import numbered_lines, sha256
from alignattn.datasets.registry import DATASETS, DatasetSpec
from alignattn.datasets.rows import Cells, LeftOut, RowError, decoded, object_cells, read_sample, table_cells
from alignattn.errors import AlignmentWarning, ConfigError, DataError, unknown

NAMED = 10  # malformed rows that a message names


@dataclass(frozen=True)
class Malformed:
    """A row that could not be read."""

    line: int  # in the file, from 1, the header counted
    reason: str


@dataclass(frozen=True, kw_only=True)
class TextDataset:
    """Sentences and labels of one split, and where they come from."""

    name: str
    split: str
    texts: list[tuple[str, ...]] = field(repr=False)  # one or two sentences, as written
    labels: list[int] | list[float] = field(repr=False)  # floats where there are no classes
    classes: tuple[str, ...]  # names of the labels 0, 1, ...; empty: the labels are scores
    file: Path
    sha256: str  # of the file as stored
    left_out: dict[str, int]  # rows that the format says to leave out: how many, by why
    malformed: tuple[Malformed, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.texts)


def load(name: str, split: str, folder: str | os.PathLike[str], *, strict: bool = False) -> TextDataset:
    """Read one split of a data set.

    Args:
        name: one of `DATASETS`.
        split: one of `DATASETS[name].splits`.
        folder: holds the official files, directly or in the usual subfolders; each may be packed (`.gz`).
        strict: a malformed row is an error instead of a warning.

    Raises:
        ConfigError: no such data set or split.
        DataError: no such file, or one that is not what it should be.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    spec = DATASETS[name]
    if split not in spec.splits:
        hint = " The published test file carries no labels." if split == "test" else ""
        raise ConfigError(f"{unknown(f'split of {name}', split, spec.splits)}{hint}")
    file = _find(name, split, Path(folder))

    texts: list[tuple[str, ...]] = []
    labels: list[float] = []
    left_out: Counter[str] = Counter()
    malformed: list[Malformed] = []
    lines = numbered_lines(file)
    cells_of = _reader(spec, file, lines)
    for number, line in lines:
        try:
            text, label = read_sample(spec, cells_of, decoded(line))
        except LeftOut as why:
            left_out[str(why)] += 1
        except RowError as reason:
            malformed.append(Malformed(number, str(reason)))
        else:
            texts.append(text)
            labels.append(label)

    rows = len(texts) + left_out.total() + len(malformed)
    if malformed:
        report = _report(file, malformed, rows)
        if len(malformed) > rows * (0.01 if rows >= 100 else 0.5):
            raise DataError(f"{report}\nThis looks like another format than that of {name}.")
        if strict:
            raise DataError(report)
    if not texts:
        reasons = "".join(f", {count} left out ({why})" for why, count in left_out.items())
        raise DataError(f"{file} holds no sample of {name}: {rows} rows{reasons}, {len(malformed)} malformed.")
    if malformed:
        warnings.warn(f"{report}\nThey are left out.", AlignmentWarning, stacklevel=2)
    return TextDataset(
        name=name,
        split=split,
        texts=texts,
        labels=labels,
        classes=spec.classes,
        file=file,
        sha256=sha256(file),
        left_out=dict(left_out),
        malformed=tuple(malformed),
    )


def _find(name: str, split: str, folder: Path) -> Path:
    """The first of the split's files that is there: by name, then by subfolder, unpacked before packed."""
    if not folder.is_dir():
        raise DataError(f"{folder} is {'not a folder' if folder.exists() else 'missing'}: it should hold {name}.")
    spec = DATASETS[name]
    candidates = [
        folder / subfolder / f"{file}{suffix}"
        for file in spec.files[split]
        for subfolder in ("", *spec.folders)
        for suffix in ("", ".gz")
    ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    other = "".join(f" {path} is not a file." for path in candidates if path.exists())
    raise DataError(
        f"No file for {split} of {name} in {folder}. Looked for {' or '.join(spec.files[split])} (or .gz of it), there "
        f"and in {', '.join(spec.folders)}.{other} Splits of {name}: {', '.join(spec.splits)}."
    )


def _reader(spec: DatasetSpec, file: Path, lines: Iterator[tuple[int, bytes]]) -> Callable[[str], Cells]:
    """How to read a line of the file; takes the header off `lines` where there is one."""
    if file.name.removesuffix(".gz").endswith(".jsonl"):
        return object_cells(spec)
    if spec.columns:
        return table_cells(spec, header=None)
    number, line = next(lines)
    try:
        return table_cells(spec, decoded(line))
    except RowError as error:
        raise DataError(f"{file}:{number}: {error}") from error


def _report(file: Path, malformed: list[Malformed], rows: int) -> str:
    named = "".join(f"\n  {file}:{row.line}: {row.reason}" for row in malformed[:NAMED])
    more = f"\n  and {len(malformed) - NAMED} more" if len(malformed) > NAMED else ""
    return f"{len(malformed)} of {rows} rows of {file} are malformed:{named}{more}"
