"""From settings to a run that is ready: files read, columns, task and labels found, rows encoded.

Every error in the files or the settings is raised here, before anything is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignattn.config import AlignmentConfig, resolve
from alignattn.datasets.reading import sha256
from alignattn.errors import ConfigError
from alignattn.finetune import columns, labels, model, tables
from alignattn.finetune.settings import Settings
from alignattn.models.pretrained import fingerprints, quiet
from alignattn.results import METRICS

REPORTED = {
    "classification": ("accuracy", "ece", "brier", "nll"),
    "multilabel": ("f1", "accuracy", "ece"),
    "regression": ("pearson", "spearman"),
    "tokens": ("f1", "accuracy", "ece"),
}


@dataclass(frozen=True)
class Plan:
    """A run that is ready."""

    settings: Settings
    columns: columns.Columns
    labels: labels.Labels
    tokenizer: Any
    train: list[dict[str, Any]]
    eval: list[dict[str, Any]]
    length: int
    cut: tuple[int, int]  # rows of train and eval that were longer
    processes: int
    inputs: Mapping[str, str]

    @property
    def recipe(self) -> dict[str, Any]:
        """All that was set or found, but for the method, its weight and the seed; no folder of this machine."""
        asked = self.settings
        return {
            "task": self.labels.task,
            "report": [name for name in REPORTED[self.labels.task] if name in METRICS],
            "data": {
                "train": asked.train.name,
                "eval": asked.eval.name,
                "text": list(self.columns.texts),
                "label": self.columns.label,
                "separator": self.labels.separator,
                "labels": list(self.labels.names),
                "max_length": self.length,
            },
            "model": {"name": Path(asked.model).name if Path(asked.model).is_dir() else asked.model},
            "train": {
                **({"epochs": asked.epochs} if asked.steps is None else {"steps": asked.steps}),
                "learning_rate": asked.learning_rate,
                "batch_size": asked.batch_size,
                "precision": asked.precision,
                "processes": self.processes,
            },
        }

    @property
    def alignment(self) -> AlignmentConfig | None:
        """The method with all its options."""
        asked = self.settings
        if asked.method == "none":
            return None
        return resolve(asked.method, asked.weight, "stable", {"seed": asked.seed})

    def decides(self) -> dict[str, Any]:
        """All that decides the outcome, flat, to tell one run from another."""
        recipe, config = self.recipe, self.alignment
        options = {} if config is None else config.acting()
        return {
            "settings": {
                "method": self.settings.method,
                "task": recipe["task"],
                **{name: value for name, value in recipe["data"].items() if name not in ("train", "eval")},
                **recipe["train"],
                "model": recipe["model"]["name"],
                "seed": self.settings.seed,
                **options.pop("matcher", {}),
                **{name: value for name, value in options.items() if name not in ("method", "seed")},
            },
            "inputs": dict(self.inputs),
        }

    def told(self) -> str:
        """What was found, for the user to see before training starts."""
        texts = " and ".join(map(repr, self.columns.texts))
        names = self.labels.names
        which = f", {len(names)} labels ({labels.listed(names)})" if names else ""
        lines = [
            f"Task: {self.labels.task}{which}; text in {texts}, label in {self.columns.label!r}.",
            f"Rows: {len(self.train)} to train on, {len(self.eval)} to evaluate on.",
        ]
        if any(self.cut):
            lines.append(
                f"Cut off at {self.length} tokens: {self.cut[0]} rows in training, {self.cut[1]} in evaluation."
            )
        return "\n".join(lines)


def prepare(settings: Settings, processes: int = 1) -> Plan:
    """Read all that is to be read, and find out all that was not said."""
    if settings.batch_size % processes:
        raise ConfigError(
            f"--batch-size is {settings.batch_size}, which {processes} processes cannot share evenly: it is that of "
            "one update, over all of them."
        )
    train, evaluation = tables.read(settings.train), tables.read(settings.eval)
    found = columns.find(train, settings.text, settings.label)
    for name in (*found.texts, found.label):
        evaluation.require(name)
    space = labels.learn(train, found, settings.task, settings.separator)
    targets = space.encode(train, found), space.encode(evaluation, found)
    texts = labels.texts_of(train, found, space.task), labels.texts_of(evaluation, found, space.task)
    inputs = {
        "training file": sha256(settings.train),
        "evaluation file": sha256(settings.eval),
        **fingerprints(settings.model),
    }
    with quiet():
        tokenizer = model.load_tokenizer(settings.model, space.task)
        length = model.length_limit(settings.model, tokenizer, settings.max_length)
        rows, cut = zip(
            *(model.encode(tokenizer, space.task, t, y, length) for t, y in zip(texts, targets, strict=True)),
            strict=True,
        )
    return Plan(settings, found, space, tokenizer, rows[0], rows[1], length, (cut[0], cut[1]), processes, inputs)
