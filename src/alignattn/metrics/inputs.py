"""What a metric may be given, checked before anything is computed.

Every metric is computed in float64, and without gradient.
"""

from typing import Any

import torch
from torch import Tensor

from alignattn.errors import ConfigError, ShapeError

SLACK = 1e-2  # by which probabilities may miss one: those of half precision do by 3e-3, also when cast up later


def check_tensor(name: str, value: Any, shape: str) -> None:
    """A tensor with as many dimensions as `shape`, "n c" say, has letters, and none of them empty."""
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} must be a tensor [{shape}], got {type(value).__name__}.")
    if value.ndim != len(shape.split()):
        raise ShapeError(f"{name} must be [{shape}], got shape {tuple(value.shape)}.")
    if value.numel() == 0:
        raise ShapeError(f"{name} [{shape}] is empty: shape {tuple(value.shape)}. A metric needs at least one sample.")


def check_length(name: str, length: int, other: str, expected: int) -> None:
    """As many of one as of the other."""
    if length != expected:
        raise ShapeError(f"{name} has {length} samples and {other} has {expected}. Give one for each.")


def check_real(name: str, value: Any, shape: str) -> None:
    """Integers or floating point, finite."""
    check_tensor(name, value, shape)
    if value.dtype == torch.bool or value.is_complex():
        raise ShapeError(f"{name} must be real numbers, got {value.dtype}.")
    if not bool(value.isfinite().all()):
        raise ConfigError(f"{name} holds {int((~value.isfinite()).sum())} values that are NaN or infinite.")


def check_scores(name: str, value: Any, shape: str) -> None:
    """Floating point, each between zero and one."""
    check_tensor(name, value, shape)
    if not value.is_floating_point():
        raise ShapeError(f"{name} must be floating point, got {value.dtype}.")
    check_real(name, value, shape)
    low, high = value.min().item(), value.max().item()
    if low < 0 or high > 1 + SLACK:
        raise ConfigError(f"{name} must lie between 0 and 1, got {low:.6g} to {high:.6g}. Logits need a softmax first.")


def check_probabilities(name: str, value: Any, shape: str) -> None:
    """Scores whose last dimension sums to one."""
    check_scores(name, value, shape)
    total = value.detach().sum(-1, dtype=torch.float64)
    worst = total.flatten()[(total - 1).abs().argmax()].item()
    if abs(worst - 1) > SLACK:
        raise ConfigError(
            f"{name} [{shape}] must sum to one over c, and one row sums to {worst:.6g}. Logits need a softmax first."
        )


def check_labels(name: str, value: Any, classes: int | None = None) -> None:
    """Integers [n], none below zero, and below `classes` where that is known."""
    check_tensor(name, value, "n")
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise ShapeError(f"{name} must be integers, one class a sample, got {value.dtype}.")
    low, high = int(value.min()), int(value.max())
    if low < 0:
        raise ConfigError(f"{name} {low} is below zero. Leave out samples that have no label.")
    if classes is not None and high >= classes:
        raise ConfigError(f"{name} {high} is out of range: there are {classes} classes, 0 to {classes - 1}.")


def check_probabilities_and_labels(probability: Any, label: Any, **_: object) -> None:
    """Probabilities [n, c] and labels [n] below c."""
    check_probabilities("probability", probability, "n c")
    check_labels("label", label, probability.shape[1])
    check_length("label", len(label), "probability", len(probability))


def exact(value: Tensor) -> Tensor:
    """The values in float64, cut off from the graph."""
    return value.detach().to(torch.float64)
