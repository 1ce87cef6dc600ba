"""The paper's figures, as data: paper_values/*.toml, one file a table."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignattn.errors import unknown
from alignattn.experiments.reading import read_toml

FOLDER = Path(__file__).parent.parent / "paper_values"
OUT_OF_DOMAIN = ("domain",)  # tables with columns for data that their models were not trained on


@dataclass(frozen=True)
class PaperValue:
    """A cell of a table of the paper, in percent."""

    mean: float
    deviation: float | None  # None: the paper gives none


def paper_value(reference: Mapping[str, Any], metric: str, method: str) -> PaperValue | None:
    """The cell for a metric and method, or None; out of domain `accuracy@mnli` stands in the column of MNLI."""
    name, _, on = metric.partition("@")
    if on and reference["table"] not in OUT_OF_DOMAIN:
        return None  # the column is of models that were trained on that data
    cells = table(reference["table"])["cells"]
    if reference.get("model"):
        cells = cells.get(reference["model"], {})
    cell = cells.get(on or reference["column"], {}).get(name, {}).get(method)
    return None if cell is None else PaperValue(cell["mean"], cell.get("deviation"))


@functools.cache
def table(name: str) -> dict[str, Any]:
    """A whole table."""
    path = FOLDER / f"{name}.toml"
    if not path.is_file():
        raise unknown("table of the paper", name, [file.stem for file in sorted(FOLDER.glob("*.toml"))])
    return read_toml(path)
