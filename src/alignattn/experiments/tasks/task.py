"""Task: what the runner asks of an experiment. It owns the data; models are made anew for each run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from alignattn.experiments.settings import TrainSettings

Watch = Callable[[str, Tensor, Tensor], None]  # layer, queries and keys [seeds, h, n, d]


@dataclass
class Measured:
    """What an evaluation brings: numbers for tables, and details for pictures."""

    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """Data read, ready to train models on. Everything random comes from the seeds that its methods are given, or,
    for a model's first weights, from torch's global generator, which the runner seeds.
    """

    data_settings: ClassVar[type]
    model_settings: ClassVar[type]
    train_settings: ClassVar[type] = TrainSettings

    def __init__(self, data: Any, model: Any, train: Any, *, data_dir: Path | None, device: torch.device) -> None:
        self.data, self.model, self.train, self.device = data, model, train, device
        self.read(data_dir)

    @abstractmethod
    def read(self, data_dir: Path | None) -> None:
        """Read the data, once, when the task is made."""

    @classmethod
    @abstractmethod
    def inputs(cls, data: Any, model: Any, data_dir: Path | None) -> Mapping[str, str]:
        """SHA-256 of every file that decides the outcome; a DataError names what is missing."""

    @property
    @abstractmethod
    def samples(self) -> int:
        """Of the training data."""

    @property
    @abstractmethod
    def evaluation_samples(self) -> int:
        """That an evaluation runs through."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A model to train, on the device."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Any]:
        """Training batches without end, on the device; the same ones for the same seed."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The task's own loss."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Measured:
        """Everything that is measured of a trained model, in eval mode and without gradients."""


class SeedsAtOnce(Task):
    """A task small enough for models of many seeds to be trained as one: all data in every step, early stopping.

    Each seed's figures stand in a row of their own, and depend on no other seed.
    """

    edges: tuple[Tensor, Tensor] | None = None  # of a graph: places of queries, and of the keys they attend to

    @abstractmethod
    def make_models(self, seeds: Sequence[int]) -> nn.Module:
        """Models of these seeds, on the device; every parameter has a leading axis of seeds."""

    @abstractmethod
    def losses(self, models: nn.Module, watch: Watch | None = None) -> Tensor:
        """The task's own loss of each seed; `watch` is shown the queries and keys of each layer."""

    @abstractmethod
    def validate(self, models: nn.Module) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of each seed on validation data."""

    @abstractmethod
    def keep_only(self, models: nn.Module, places: Sequence[int]) -> None:
        """Only seeds at these places stay in `models`; their parameters are the same objects, with fewer rows."""

    @abstractmethod
    def only(self, models: nn.Module, place: int) -> nn.Module:
        """The model of one seed alone, to be evaluated."""

    def make_model(self) -> nn.Module:
        return self.make_models((torch.initial_seed(),))

    def batches(self, seed: int) -> Iterator[None]:
        while True:
            yield None

    def loss(self, model: nn.Module, batch: None) -> Tensor:
        return self.losses(model).sum()


def shuffled(samples: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Indices of whole batches, epoch after epoch, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    size = min(batch, samples)
    while True:
        yield from torch.randperm(samples, generator=generator)[: samples // size * size].split(size)
