"""The weight of the alignment loss beside the task's: a number, a function of the step, or chosen while training."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alignattn.errors import ConfigError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Ramp:
    """A weight that grows linearly from zero to `weight` over the first `steps` updates of the model."""

    weight: float
    steps: int

    def __post_init__(self) -> None:
        check_weight(self.weight)
        if self.steps < 1:
            raise ConfigError(f"A ramp needs at least one step, got {self.steps}.")

    def __call__(self, step: int) -> float:
        return self.weight * min(1.0, step / self.steps)


@dataclass(frozen=True)
class Auto:
    """A weight that begins with alignment's gradient at a share of the task's, and then only falls: `weight="auto"`."""

    share: float = 0.2

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share < math.inf:
            raise ConfigError(f"Auto's share must be a number > 0, got {self.share!r}. The default is 0.2.")

    def __str__(self) -> str:
        """As a recipe or a command has it."""
        return f"auto:{write_weight(self.share)}"


def read_weight(text: str) -> float | Auto:
    """A weight as a recipe or a command has it: a number, "auto", or "auto:0.03" with the share."""
    if text == "auto":
        return Auto()
    word, _, share = text.partition(":")
    try:
        number = float(share if word == "auto" else text)
    except ValueError as error:
        raise ConfigError(f"A weight is a number, auto, or auto:0.2 with the share; got {text!r}.") from error
    return Auto(number) if word == "auto" else check_weight(number)


def write_weight(weight: float | str) -> str:
    """A weight for people, as short as it can be told exactly."""
    if isinstance(weight, str):
        return weight
    return short if float(short := f"{weight:g}") == weight else str(weight)


def check_weight(weight: Any) -> float:
    """A weight is a number, zero or more."""
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"weight must be a finite number >= 0, a function of the step or 'auto', got {weight!r}.")
    return float(weight)
