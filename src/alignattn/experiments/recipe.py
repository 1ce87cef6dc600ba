"""A recipe: data, model, training, alignment and seeds of an experiment, in TOML.

A recipe holds only what differs from the defaults, which stand in the settings classes, or from the recipe that it
`extends`. The shipped ones are found by name, others by path.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alignattn.config import AlignmentConfig
from alignattn.errors import ConfigError, unknown
from alignattn.experiments.reading import build, convert, merge, read_toml
from alignattn.experiments.settings import SOFT, AlignSettings
from alignattn.experiments.tasks import TASKS
from alignattn.results import METRICS
from alignattn.weights import write_weight

FOLDER = Path(__file__).parent.parent / "recipes"
REPORT = ("accuracy", "ece", "mmd", "step_ratio")
TABLES = ("data", "model", "train", "align", "paper")


@dataclass(frozen=True, kw_only=True)
class PaperReference:
    """Where the paper's values for a recipe stand."""

    table: str  # a file of paper_values
    column: str
    model: str = ""  # where a table has several


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An experiment, resolved: nothing is left to be looked up."""

    name: str
    description: str
    task: str
    data: Any  # the task's
    model: Any
    train: Any  # the task's: TrainSettings, but for tasks that train another way
    align: AlignSettings
    seeds: tuple[int, ...]
    report: tuple[str, ...]  # metrics that tables show
    paper: PaperReference | None = None

    def settings(self) -> dict[str, Any]:
        """As plain data, for a result file; folders by their last name, since their place is nobody's business."""
        values = asdict(self)
        values["model"] = {
            key: Path(value).name if isinstance(value, str) and value and Path(value).is_dir() else value
            for key, value in values["model"].items()
        }
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    def runs(self) -> list["Run"]:
        """Every run: the methods of one seed stand together, so that an interrupted sweep has whole pairs."""
        runs = []
        for seed in self.seeds:
            for method in self.align.methods:
                weights: Iterable[float | str | None] = self.align.weights or (None,)
                for weight in (None,) if method == SOFT else weights:
                    config = self.align.config(method, weight)
                    runs.append(Run(self, method, None if config is None else config.told_weight, seed))
        return runs


@dataclass(frozen=True)
class Run:
    """One model trained with one kind of attention from one seed."""

    recipe: Recipe
    method: str
    weight: float | str | None  # None for soft attention; "auto:0.1" where it is chosen while training
    seed: int

    @property
    def label(self) -> str:
        """For people."""
        weight = "" if self.weight is None else f" {write_weight(self.weight)}"
        return f"{self.recipe.name}: {self.method}{weight}, seed {self.seed}"

    def digest(self, inputs: Mapping[str, str]) -> str:
        """Stands for all that decides the outcome: what is equal in this need not be run again."""
        recipe = self.recipe.settings()
        config = self.recipe.align.config(self.method, self.weight)
        decisive = {name: recipe[name] for name in ("task", "data", "model", "train")} | {
            "method": self.method,
            "seed": self.seed,
            "alignment": None if config is None else self._alignment(config),
            "inputs": dict(sorted(inputs.items())),
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=repr).encode()).hexdigest()[:12]

    def _alignment(self, config: AlignmentConfig) -> dict[str, Any]:
        align = self.recipe.align
        rebased = {"rebase": True} if align.rebase else {}  # younger than many a result: unset, it leaves no trace
        return {**config.acting(), "ramp": align.ramp, **rebased}

    def file(self, inputs: Mapping[str, str]) -> Path:
        """Of its result, relative to the folder of all results."""
        weight = "" if self.weight is None else f"-{write_weight(self.weight)}".replace(":", "-")
        return Path(self.recipe.name) / f"{self.method}{weight}-seed{self.seed}-{self.digest(inputs)}.json"


def shipped() -> dict[str, str]:
    """Names of the recipes that come with the package, with their descriptions."""
    return {path.stem: _tables(path)["description"] for path in sorted(FOLDER.glob("*.toml"))}


def load(name: str, overrides: Iterable[Mapping[str, Any]] = ()) -> Recipe:
    """A recipe by its name or path, with tables of overrides laid over it."""
    path = _find(name)
    values = _tables(path)
    for override in overrides:
        values = merge(values, override)
    values.setdefault("seeds", 5)
    return _resolve(path.stem, values)


def seed_list(value: Any) -> tuple[int, ...]:
    """Seeds as a recipe has them: a list, or a number of seeds from 0 on."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = list(range(value))
    seeds: tuple[int, ...] = convert(value, tuple[int, ...], "seeds")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds must be a number >= 1, or a list of different numbers >= 0; got {value!r}.")
    return seeds


def _resolve(name: str, values: dict[str, Any]) -> Recipe:
    known = ("description", "task", "seeds", "report", *TABLES)
    for key in values:
        if key not in known:
            raise unknown(f"key in recipe {name!r}:", key, known)
    task = convert(values.get("task", ""), str, "task")
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    kinds = TASKS[task]
    return Recipe(
        name=name,
        description=convert(values.get("description", ""), str, "description"),
        task=task,
        data=build(kinds.data_settings, values.get("data", {}), "data"),
        model=build(kinds.model_settings, values.get("model", {}), "model"),
        train=build(kinds.train_settings, values.get("train", {}), "train"),
        align=build(AlignSettings, values.get("align", {}), "align"),
        seeds=seed_list(values["seeds"]),
        report=_known_metrics(convert(values.get("report", REPORT), tuple[str, ...], "report")),
        paper=build(PaperReference, values["paper"], "paper") if "paper" in values else None,
    )


def _known_metrics(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name.partition("@")[0] not in METRICS:
            raise unknown("metric in report:", name, METRICS)
    return names


def _find(name: str) -> Path:
    names = [path.stem for path in sorted(FOLDER.glob("*.toml"))]
    if name in names:
        return FOLDER / f"{name}.toml"
    if name.endswith(".toml") or Path(name).is_file():
        return Path(name)
    raise unknown("recipe", name, [*names, "the path of a .toml file"])


def _tables(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in below:
        raise ConfigError(f"{path} extends itself.")
    values = read_toml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    base_path = beside if beside.is_file() else _find(str(base))
    return merge(_tables(base_path, (*below, path.resolve())), values)
