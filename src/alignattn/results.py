"""The result file: all that is known of one run, so that every figure can be traced and every run repeated.

JSON, one file a run, with the number of its schema. It is written whole or not at all: to a hidden file beside it
first, then renamed. A run that failed leaves a file too, with the reason in place of metrics; a run that was
interrupted leaves none. JSON knows no NaN and no infinity: those stand as the strings "NaN", "Infinity", "-Infinity".
"""

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from alignattn.errors import AlignmentWarning, DataError
from alignattn.files import write_whole

SCHEMA = 1


@dataclass(frozen=True)
class Metric:
    """How a metric is to be read."""

    label: str
    higher_is_better: bool | None  # None: neither
    digits: int = 2  # behind the point, in tables


# In percent, as the paper has them: all shares, correlations and ECE. "accuracy@noisy" is "accuracy" on other data.
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy %", higher_is_better=True),
    "f1": Metric("F1 %", higher_is_better=True),
    "matthews": Metric("Matthews %", higher_is_better=True),
    "pearson": Metric("Pearson %", higher_is_better=True),
    "spearman": Metric("Spearman %", higher_is_better=True),
    "rmse": Metric("RMSE", higher_is_better=False, digits=4),
    "exact_match": Metric("exact match %", higher_is_better=True),
    "pavpu": Metric("PAvPU %", higher_is_better=True),
    "ece": Metric("ECE %", higher_is_better=False),
    "brier": Metric("Brier", higher_is_better=False, digits=4),
    "nll": Metric("NLL", higher_is_better=False, digits=4),
    "mmd": Metric("MMD²", higher_is_better=False),  # unbiased, median bandwidth, summed over heads and layers
    "mmd_apart": Metric("MMD², own pairs left out", higher_is_better=False),  # a token's query against its own key
    "mmd_rebased": Metric("MMD², rebased", higher_is_better=False),  # after alignattn.rebase, which no output feels
    "mmd_unit": Metric("MMD², unit kernel", higher_is_better=False, digits=3),  # likewise, the paper's kernel
    "step_ratio": Metric("step / soft", higher_is_better=False),
}
_FLAT_LIST = re.compile(
    r"\[\n[^\[\]{}]*\n\s*\]"
)  # a list of numbers or texts, one a line: JSON has no line end in a text
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: what was asked for, what came out, and where."""

    name: str  # of the recipe
    recipe: Mapping[str, Any]  # resolved: defaults and overrides in it
    method: str  # "soft", or the method of alignment
    preset: str | None  # None for soft attention, as the next three
    weight: float | str | None  # "auto:0.1": chosen while training
    reduction: str | None
    alignment: Mapping[str, Any] | None  # every option, resolved
    seed: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # "accuracy", or "accuracy@noisy": see METRICS above
    details: Mapping[str, Any] = field(default_factory=dict)  # what pictures need: reliability bins, curves
    times: Mapping[str, float] = field(default_factory=dict)  # seconds: "train", "evaluate", "step"
    peak_memory: Mapping[str, Any] = field(default_factory=dict)  # "bytes", and "of" which memory
    inputs: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of data and weights that were read
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None  # of alignattn, with "+" where the working tree differed from it
    machine: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    finished: str = ""  # time, UTC, ISO 8601
    error: str | None = None  # why it failed

    @property
    def failed(self) -> bool:
        """Whether the run ended with an error."""
        return self.error is not None

    def to_json(self) -> str:
        """The file's text; equal results give equal texts."""
        values = {"schema": SCHEMA} | {f.name: _encode(getattr(self, f.name)) for f in fields(self)}
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
        return _FLAT_LIST.sub(lambda found: re.sub(r"\s*\n\s*", " ", found.group()), text) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The result in a file's text; a ValueError says what is wrong with it."""
        values = json.loads(text)
        if not isinstance(values, dict) or "schema" not in values:
            raise ValueError("it is not a result file: it names no schema")
        schema = values.pop("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise ValueError(f"its schema is {schema!r}, which is no version")
        if schema > SCHEMA:
            raise ValueError(f"its schema is {schema} and this alignattn reads up to {SCHEMA}: install a newer one")
        known = {f.name: f for f in fields(cls)}
        if strangers := sorted(values.keys() - known.keys()):
            raise ValueError(f"it has unknown fields: {', '.join(strangers)}")
        for name, kinds in _KINDS.items():
            if name not in values:
                raise ValueError(f"it lacks {name!r}")
            if not isinstance(values[name], kinds) or (isinstance(values[name], bool)):
                raise ValueError(f"its {name!r} is {values[name]!r}")
        values |= {name: _decode(values[name]) for name in ("metrics", "details", "times")}
        for group in ("metrics", "times"):
            for name, value in values[group].items():
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ValueError(f"its {group} have {value!r} for {name!r}, which is no number")
        return cls(**values)


_NUMBER, _NONE = (int, float), type(None)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "recipe": (dict,),
    "method": (str,),
    "preset": (str, _NONE),
    "weight": (*_NUMBER, str, _NONE),
    "reduction": (str, _NONE),
    "alignment": (dict, _NONE),
    "seed": (int,),
    "metrics": (dict,),
    "details": (dict,),
    "times": (dict,),
    "peak_memory": (dict,),
    "inputs": (dict,),
    "versions": (dict,),
    "commit": (str, _NONE),
    "machine": (dict,),
    "command": (str,),
    "finished": (str,),
    "error": (str, _NONE),
}


def write(result: Result, path: Path) -> None:
    """Write a result file, whole or not at all."""
    write_whole(path, result.to_json())


def read(path: Path) -> Result:
    """Read one result file; a DataError names it and says what is wrong."""
    try:
        return Result.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a result: {_reason(error)}.") from error


def read_all(paths: Iterable[Path]) -> list[Result]:
    """The results in files and, at any depth, in folders; those that cannot be read are named in a warning."""
    results = []
    for path in files(paths):
        try:
            results.append(read(path))
        except DataError as error:
            warnings.warn(f"Skipped: {error}", AlignmentWarning, stacklevel=2)
    return results


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Files as they are named and, of folders, every JSON file at any depth that is not hidden; each once."""
    seen = set()
    for path in paths:
        if not path.exists():
            raise DataError(f"There is no file or folder {path}.")
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in found:
            if file.resolve() not in seen and not file.name.startswith("."):
                seen.add(file.resolve())
                yield file


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(k): _encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {k: _decode(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_decode(v) for v in value]
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON (line {error.lineno}: {error.msg})"
    if isinstance(error, UnicodeDecodeError):
        return "it is no text"
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
