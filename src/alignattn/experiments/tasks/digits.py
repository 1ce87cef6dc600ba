"""Handwritten digits, 8 × 8 pixels, that come with scikit-learn: a small vision transformer, patches as tokens."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alignattn.errors import AlignmentError, ConfigError
from alignattn.experiments.tasks.measuring import classification, distance_when_rebased, key_query_distance
from alignattn.experiments.tasks.task import Measured, Task, shuffled
from alignattn.models.vision import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class DigitsData:
    """1,797 digits, split once for all seeds."""

    test: int = 500  # held out
    noise: float = 0.3  # deviation of the Gaussian noise on the noisy digits; pixels are in [0, 1]
    split_seed: int = 0

    def __post_init__(self) -> None:
        if not 10 <= self.test <= 1700:
            raise ConfigError(f"data.test must be between 10 and 1700 of the 1797 digits, got {self.test}.")
        if self.noise < 0:
            raise ConfigError(f"data.noise must be >= 0, got {self.noise}.")


@dataclass(frozen=True, kw_only=True)
class DigitsModel:
    """The vision transformer."""

    patch: int = 2  # 8 / patch squared tokens
    width: int = 32
    heads: int = 4
    layers: int = 3

    def __post_init__(self) -> None:
        if self.patch not in (1, 2, 4):
            raise ConfigError(f"model.patch must divide 8 and leave several tokens: 1, 2 or 4; got {self.patch}.")
        if min(self.width, self.heads, self.layers) < 1 or self.width % self.heads:
            raise ConfigError(
                f"model.width must be a multiple of model.heads, all >= 1; got {self.width} and {self.heads}."
            )


class Digits(Task):
    """Which digit it is, and how well that is told when the picture is noisy."""

    data_settings: ClassVar[type] = DigitsData
    model_settings: ClassVar[type] = DigitsModel

    def read(self, data_dir: Path | None) -> None:
        data, device = self.data, self.device
        images, labels = _digits()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(data.split_seed))
        images, labels = images[order], labels[order]
        noise = torch.randn(images[: data.test].shape, generator=torch.Generator().manual_seed(data.split_seed + 1))
        self.test_images, self.test_labels = images[: data.test].to(device), labels[: data.test].to(device)
        self.noisy_images = self.test_images + data.noise * noise.to(device)
        self.images, self.labels = images[data.test :].to(device), labels[data.test :].to(device)

    @classmethod
    def inputs(cls, data: Any, model: Any, data_dir: Path | None) -> Mapping[str, str]:
        images, labels = _digits()
        return {"digits": hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()}

    @property
    def samples(self) -> int:
        return len(self.labels)

    @property
    def evaluation_samples(self) -> int:
        return 2 * len(self.test_labels)

    def make_model(self) -> nn.Module:
        m = self.model
        return VisionTransformer(patch=m.patch, width=m.width, heads=m.heads, layers=m.layers).to(self.device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in shuffled(self.samples, self.train.batch, seed):
            index = index.to(self.device)
            yield self.images[index], self.labels[index]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Measured:
        measured = classification(model(self.test_images).softmax(-1), self.test_labels)
        noisy = classification(model(self.noisy_images).softmax(-1), self.test_labels, on="noisy")
        distance = key_query_distance(model, [self.test_images])
        rebased = distance_when_rebased(model, [self.images], {"": [self.test_images]})
        for more in (noisy, distance, rebased):
            measured.metrics |= more.metrics
            measured.details |= more.details
        return measured


def _digits() -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise AlignmentError("The digits need scikit-learn: pip install 'alignattn[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
