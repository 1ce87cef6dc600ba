"""Sentences and pairs of sentences: fine-tunes any transformers encoder, tested in its domain and out of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignattn.datasets import DATASETS, TextDataset, load
from alignattn.errors import ConfigError, DataError, unknown
from alignattn.experiments.tasks.measuring import classification, distance_when_rebased, key_query_distance, regression
from alignattn.experiments.tasks.task import Measured, Task, shuffled
from alignattn.models.pretrained import fingerprints, load_model, load_tokenizer

EVALUATION_BATCH = 128

Encoded = dict[str, list[int]]
Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which sentences; the first of `evaluate` gives the main metrics."""

    name: str  # of alignattn.datasets
    train: str = "train"
    evaluate: tuple[str, ...] = ("dev",)  # splits of the same, or others as "mnli:dev"
    limit: int | None = None  # the first so many training samples
    max_length: int = 128  # tokens; longer texts are cut
    mmd_samples: int = 256  # of each evaluation set, on which keys and queries are compared

    def __post_init__(self) -> None:
        if not self.evaluate:
            raise ConfigError("data.evaluate names no split.")
        for name, split in (self.parts(self.train), *map(self.parts, self.evaluate)):
            if name not in DATASETS:
                raise unknown("data set", name, DATASETS)
            if split not in DATASETS[name].splits:
                raise unknown(f"split of {name}", split, DATASETS[name].splits)
        for field in ("limit", "max_length", "mmd_samples"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise ConfigError(f"data.{field} must be at least 1, got {getattr(self, field)}.")

    def parts(self, text: str) -> tuple[str, str]:
        """Data set and split that a text such as "dev" or "mnli:dev" stands for."""
        name, _, split = text.rpartition(":")
        return name or self.name, split

    def label(self, position: int) -> str:
        """What stands behind the names of the metrics of an evaluation set; nothing for the main one."""
        name, split = self.parts(self.evaluate[position])
        return "" if position == 0 else split if name == self.name else name


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """Which encoder."""

    name: str  # on the hub, or a folder
    dropout: float | None = None  # everywhere in the encoder, attention included; none given: the model's own
    classifier_dropout: float | None = None

    def __post_init__(self) -> None:
        for field in ("dropout", "classifier_dropout"):
            value = getattr(self, field)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"model.{field} must be in [0, 1), got {value}.")


class TextClassification(Task):
    """Classes of sentences, or a score for each."""

    data_settings: ClassVar[type] = TextData
    model_settings: ClassVar[type] = TextModel

    def read(self, data_dir: Path | None) -> None:
        data = self.data
        self.tokenizer = load_tokenizer(self.model.name)
        splits = _splits(data, data_dir)
        self.classes = splits[0].classes
        for split in splits[1:]:
            if split.classes != self.classes:
                raise ConfigError(f"{split.name} has the classes {split.classes}, {data.name} has {self.classes}.")
        self.training, *self.tests = [_Tokens(split, self.tokenizer, data.max_length) for split in splits]
        if data.limit is not None:
            self.training = self.training.first(data.limit)

    @classmethod
    def inputs(cls, data: Any, model: Any, data_dir: Path | None) -> Mapping[str, str]:
        files = {f"{split.name}/{split.file.name}": split.sha256 for split in _splits(data, data_dir)}
        return {**files, **fingerprints(model.name)}

    @property
    def samples(self) -> int:
        return len(self.training)

    @property
    def evaluation_samples(self) -> int:
        return sum(map(len, self.tests))

    def make_model(self) -> nn.Module:
        return load_model(
            self.model.name,
            outputs=len(self.classes) or 1,
            dropout=self.model.dropout,
            classifier_dropout=self.model.classifier_dropout,
            padding=self.tokenizer.pad_token_id,
        ).to(self.device)

    def batches(self, seed: int) -> Iterator[Batch]:
        for index in shuffled(self.samples, self.train.batch, seed):
            yield self.training.batch(index.tolist(), self.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, label = batch
        logits = model(**inputs).logits.float()
        return F.cross_entropy(logits, label) if self.classes else F.mse_loss(logits[:, 0], label)

    def evaluate(self, model: nn.Module) -> Measured:
        measured, seen = Measured(), {}
        for position, test in enumerate(self.tests):
            on = self.data.label(position)
            order = test.by_length()
            logits = torch.cat([model(**test.batch(part, self.device)[0]).logits.float().cpu() for part in order])
            label = test.labels[[i for part in order for i in part]]
            if self.classes:
                binary = len(self.classes) == 2
                found = classification(logits.double().softmax(-1), label, on=on, binary=binary)
            else:
                found = regression(logits[:, 0], label, on=on)
            some = test.first(self.data.mmd_samples)
            seen[on] = [some.batch(part, self.device)[0] for part in some.by_length()]
            distance = key_query_distance(model, seen[on], call=_fed, on=on)
            for more in (found, distance):
                measured.metrics |= more.metrics
                measured.details |= more.details
        some = self.training.first(self.data.mmd_samples)
        telling = [some.batch(part, self.device)[0] for part in some.by_length()]
        measured.metrics |= distance_when_rebased(model, telling, seen, call=_fed).metrics
        return measured


def _fed(model: nn.Module, batch: dict[str, Tensor]) -> object:
    return model(**batch)


class _Tokens:
    """Sentences as a tokenizer has them, padded batch by batch."""

    def __init__(self, split: TextDataset, tokenizer: Any, max_length: int) -> None:
        columns = [list(column) for column in zip(*split.texts, strict=True)]
        encoded = tokenizer(*columns, truncation=True, max_length=max_length, return_attention_mask=True)
        names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoded]
        self.rows: list[Encoded] = [{n: encoded[n][i] for n in names} for i in range(len(split.texts))]
        self.labels = torch.tensor(split.labels, dtype=torch.long if split.classes else torch.float32)
        self.padding = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": tokenizer.pad_token_type_id,
            "attention_mask": 0,
        }

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, count: int) -> "_Tokens":
        few = object.__new__(_Tokens)
        few.rows, few.labels, few.padding = self.rows[:count], self.labels[:count], self.padding
        return few

    def by_length(self) -> list[list[int]]:
        """Indices of batches for evaluation, texts of like length together."""
        order = sorted(range(len(self)), key=lambda i: len(self.rows[i]["input_ids"]))
        return [order[i : i + EVALUATION_BATCH] for i in range(0, len(order), EVALUATION_BATCH)]

    def batch(self, index: Sequence[int], device: torch.device) -> Batch:
        rows = [self.rows[i] for i in index]
        longest = max(len(row["input_ids"]) for row in rows)
        inputs = {
            name: torch.tensor([row[name] + [self.padding[name]] * (longest - len(row[name])) for row in rows])
            for name in rows[0]
        }
        return {name: tensor.to(device) for name, tensor in inputs.items()}, self.labels[list(index)].to(device)


def _splits(data: TextData, data_dir: Path | None) -> list[TextDataset]:
    """Training data first, then what it is tested on."""
    if data_dir is None:
        raise DataError(f"Where is {data.name}? Name the folder that holds it: --data-dir FOLDER.")
    return [load(*data.parts(part), data_dir) for part in (data.train, *data.evaluate)]
