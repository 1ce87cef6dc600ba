"""What a report is made of, read from paths: result files, comparisons that `compare --format json` printed, diagnoses.

A file that is named must be one of them. In a folder other JSON is passed over, and what names a schema, or is broken,
and cannot be read is left out, with the reason.
"""

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignattn.diagnosis.result import KIND, Diagnosis
from alignattn.errors import AlignmentWarning, DataError
from alignattn.experiments.compare import Comparison
from alignattn.report import compared
from alignattn.report.html import clean
from alignattn.results import Result, files


@dataclass
class Inputs:
    """Everything that was found."""

    results: list[Result] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)  # those read as such, not made of the results
    diagnoses: list[Diagnosis] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # file, and why
    names: dict[int, str] = field(default_factory=dict)  # of the files of results, by id(): results have no hash

    def file_of(self, result: Result) -> str:
        """The name of a result's file."""
        return self.names.get(id(result), "")

    def add(self, values: Any, file: str) -> bool:
        """Take what a JSON file holds; False if it is none of ours, a ValueError if it is and cannot be read."""
        if isinstance(values, list) and values and all(compared.is_comparison(one) for one in values):
            self.comparisons += [compared.read(one) for one in values]
        elif not isinstance(values, dict) or "schema" not in values:
            return False
        elif values.get("kind") == KIND:
            self.diagnoses.append(Diagnosis.from_json(json.dumps(values)))
        else:
            result = Result.from_json(json.dumps(values))
            self.results.append(result)
            self.names[id(result)] = file
        return True

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (self.results or self.comparisons or self.diagnoses)


def read(paths: Iterable[Path]) -> Inputs:
    """All that the paths hold, folders at any depth."""
    paths = list(paths)
    found = Inputs()
    for path in files(paths):
        named = path in paths
        try:
            known = found.add(_json(path), clean(path.name))
            reason = "" if known else "it is neither a result file, nor a comparison, nor a diagnosis"
        except (OSError, ValueError, TypeError, RecursionError) as error:
            known, reason = True, _reason(error)
        if reason and named:
            raise DataError(f"{path} cannot be reported: {reason}.")
        if reason and known:
            warnings.warn(f"Left out of the report: {path}: {reason}.", AlignmentWarning, stacklevel=2)
            found.left_out.append((clean(path.name), reason))
    if found.is_empty():
        where = ", ".join(map(str, paths)) or "no path"
        raise DataError(f"There is nothing to report in {where}: no result file, comparison or diagnosis was found.")
    return found


def _json(path: Path) -> Any:
    return _cleaned(json.loads(path.read_text(encoding="utf-8")))


def _cleaned(value: Any) -> Any:
    """Texts as a page can show them, wherever they stand."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(name): _cleaned(inner) for name, inner in value.items()}
    return [_cleaned(inner) for inner in value] if isinstance(value, list) else value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON (line {error.lineno}: {error.msg})"
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error).rstrip(".")
