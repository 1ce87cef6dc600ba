"""A diagnosis as a value and as a file: JSON, with a schema of its own, written whole or not at all."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, cast

from alignattn.errors import DataError
from alignattn.files import write_whole
from alignattn.results import NOT_FINITE

KIND = "diagnosis"
SCHEMA = 1
ROUNDING = 1e-6  # of a mean of kernels
Interval = tuple[float, float]


@dataclass(frozen=True)
class HeadDiagnosis:
    """Keys and queries of one head. NaN: too few samples or tokens to tell."""

    layer: str  # name of the attention module, with #1, #2 where it is called several times
    head: int
    samples: int  # with two tokens or more on both sides: those that mmd is a mean over
    tokens: int  # valid queries of all samples
    mmd: float  # squared, unbiased, median bandwidth, mean over samples
    noise: Interval  # 2.5 and 97.5 % of the same when keys and queries change places at random within samples
    mmd_p: float  # how often it is then as large
    mean_distance: float  # in pooled deviations
    covariance_distance: float  # in pooled covariances, 0 to 2
    query_norm: float  # mean length
    key_norm: float
    entropy: float  # of attention: 1 all keys alike, 0 one key alone
    auc: float  # of a held-out classifier: 0.5 cannot tell keys from queries
    auc_interval: Interval  # 95 %
    mmd_error: float = math.nan  # standard error of mmd between samples

    @property
    def beyond_noise(self) -> bool:
        """Whether keys and queries differ by more than chance would have them differ."""
        return self.mmd > self.noise[1] + ROUNDING

    @property
    def within_noise(self) -> bool:
        """Whether chance alone gives as much: neither beyond its interval nor below it, where keys have met queries."""
        return self.noise[0] - ROUNDING <= self.mmd <= self.noise[1] + ROUNDING

    @property
    def share_of_means(self) -> float:
        """Of the distance, to first order that of two Gaussians, what a shift of all keys would remove."""
        if not self.mean_distance:
            return 0.0
        if math.isinf(self.mean_distance):
            return 1.0
        return self.mean_distance**2 / (self.mean_distance**2 + self.covariance_distance**2 / 4)


@dataclass(frozen=True)
class Diagnosis:
    """All heads of one model, what it comes to in plain words, and where it comes from."""

    name: str  # of the model or checkpoint
    heads: list[HeadDiagnosis]
    words: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # seed, permutations, tokens kept, what was read
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None  # of alignattn
    command: str = ""

    def to_json(self) -> str:
        """The file's text; equal diagnoses give equal texts."""
        values = {"kind": KIND, "schema": SCHEMA} | {f.name: getattr(self, f.name) for f in fields(self)}
        values["heads"] = [{f.name: getattr(head, f.name) for f in fields(head)} for head in self.heads]
        return json.dumps(_encoded(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The diagnosis in a file's text; a ValueError says what is wrong with it."""
        values = json.loads(text)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise ValueError("its kind is not 'diagnosis'")
        schema = values.pop("schema", None)
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise ValueError(f"its schema is {schema!r}, which is no version")
        if schema > SCHEMA:
            raise ValueError(f"its schema is {schema} and this alignattn reads up to {SCHEMA}: install a newer one")
        del values["kind"]
        _check(values, _KINDS, "it")
        if not values["heads"]:
            raise ValueError("it has no heads")
        if strangers := [word for word in values["words"] if not isinstance(word, str)]:
            raise ValueError(f"it has {strangers[0]!r} among its words")
        values["heads"] = [_head(i, head) for i, head in enumerate(values["heads"])]
        return cls(**values)


_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "heads": (list,),
    "words": (list,),
    "settings": (dict,),
    "versions": (dict,),
    "commit": (str, type(None)),
    "command": (str,),
}
_HEAD_KINDS: Mapping[str, tuple[type, ...]] = {
    f.name: (list,) if f.type is Interval else (int, float) if f.type is float else (cast(type, f.type),)
    for f in fields(HeadDiagnosis)
}


def write(diagnosis: Diagnosis, path: Path) -> None:
    """Write a diagnosis, whole or not at all."""
    try:
        write_whole(path, diagnosis.to_json())
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error


def read(path: Path) -> Diagnosis:
    """Read a diagnosis; a DataError names the file and says what is wrong."""
    try:
        return Diagnosis.from_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason = f"it is no JSON (line {error.lineno}: {error.msg})"
    except UnicodeDecodeError:
        reason = "it is no text"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise DataError(f"{path} cannot be read as a diagnosis: {reason}.")


def _head(number: int, values: Any) -> HeadDiagnosis:
    who = f"its head {number}"
    if not isinstance(values, dict):
        raise ValueError(f"{who} is {values!r}")
    values = {name: _decoded(value) if name != "layer" else value for name, value in values.items()}
    _check(values, _HEAD_KINDS, who)
    for name in ("noise", "auc_interval"):
        pair = values[name]
        if len(pair) != 2 or not all(isinstance(end, int | float) for end in pair):
            raise ValueError(f"{who} has {pair!r} for {name!r}, which is no interval")
        values[name] = tuple(pair)
    return HeadDiagnosis(**values)


def _check(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], who: str) -> None:
    if strangers := sorted(values.keys() - kinds.keys()):
        raise ValueError(f"{who} has unknown fields: {', '.join(strangers)}")
    for name, allowed in kinds.items():
        if name not in values:
            raise ValueError(f"{who} lacks {name!r}")
        if not isinstance(values[name], allowed) or isinstance(values[name], bool):
            raise ValueError(f"{who} has {values[name]!r} for {name!r}")


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"  # as in result files
    if isinstance(value, Mapping):
        return {str(key): _encoded(inner) for key, inner in value.items()}
    return [_encoded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(inner) for inner in value]
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value
