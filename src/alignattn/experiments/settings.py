"""What a recipe can set about training and alignment, with every default; a task adds its own data and model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from alignattn.config import METHODS, PRESETS, AlignmentConfig, resolve
from alignattn.errors import ConfigError, unknown
from alignattn.weights import read_weight

SOFT = "soft"
PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a model is trained: AdamW, a rate that warms up and falls, one batch a step."""

    steps: int | None = None  # or `epochs`
    epochs: float | None = None
    batch: int = 32
    rate: float = 5e-5  # AdamW's, at its height
    schedule: str = "linear"  # after the warm-up: down to zero, or "constant"
    warmup: float = 0.06  # below 1 a share of the steps, from 1 on a number of them
    weight_decay: float = 0.01
    clip: float = 1.0  # of the gradient's norm; 0: none
    precision: str = "fp32"  # or "bf16", "fp16": autocast

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError("train needs steps or epochs, one of the two.")
        for name in ("steps", "epochs", "batch", "rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"train.{name} must be > 0, got {value}.")
        for name in ("warmup", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"train.{name} must be >= 0, got {value}.")
        if self.schedule not in SCHEDULES:
            raise unknown("train.schedule", self.schedule, SCHEDULES)
        if self.precision not in PRECISIONS:
            raise unknown("train.precision", self.precision, PRECISIONS)

    def steps_for(self, samples: int) -> int:
        """Training steps with that many samples; an epoch ends with whole batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * max(1, samples // self.batch)))

    def factor(self, step: int, steps: int) -> float:
        """The rate of step 0, 1, ... as a share of `rate`."""
        warmup = self.warmup if self.warmup >= 1 else self.warmup * steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.schedule == "constant":
            return 1.0
        return max(0.0, (steps - step) / max(1.0, steps - warmup))


@dataclass(frozen=True, kw_only=True)
class AlignSettings:
    """Which kinds of attention are trained, and how alignment is set."""

    methods: tuple[str, ...] = (SOFT, *METHODS)
    weights: tuple[float | str, ...] = ()  # each method with each, also "auto" or "auto:0.03"; none: the preset's own
    preset: str = "stable"
    rebase: bool = False  # before training: queries and keys in coordinates in which mean and covariance agree
    ramp: float = 0.0  # share of the steps over which the weight grows from zero
    options: Mapping[str, Any] = field(default_factory=dict)  # of `align`, for every method
    gan: Mapping[str, Any] = field(default_factory=dict)  # for one method alone
    ot: Mapping[str, Any] = field(default_factory=dict)
    ct: Mapping[str, Any] = field(default_factory=dict)
    mmd: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError("align.methods names no method.")
        for method in self.methods:
            if method not in (SOFT, *METHODS):
                raise unknown("method", method, (SOFT, *METHODS))
        weights = [read_weight(weight) if isinstance(weight, str) else weight for weight in self.weights]
        for name, values in (("methods", self.methods), ("weights", weights)):
            if len(set(values)) < len(values):
                raise ConfigError(f"align.{name} names one twice: {', '.join(map(str, values))}.")
        if self.preset not in PRESETS:
            raise unknown("preset", self.preset, PRESETS)
        if not 0 <= self.ramp <= 1:
            raise ConfigError(f"align.ramp must be between 0 and 1, got {self.ramp}.")
        for method in METHODS:  # also those that this recipe leaves out: the command line may name them
            for weight in self.weights or (None,):
                config = self.config(method, weight)
                if self.ramp and config is not None and not isinstance(config.weight, int | float):
                    raise ConfigError(f"align.ramp is for weights that are numbers, and {method}'s is {config.weight}.")

    def options_for(self, method: str) -> dict[str, Any]:
        """The options that `align` is given for a method."""
        options = {**self.options, **getattr(self, method)}
        if options.get("matched_over") == "neighbourhoods":  # edges are followed from all nodes, and are not too many:
            options.pop("max_tokens", None)  # a recipe's number is for the other form
        return options

    def config(self, method: str, weight: float | str | None) -> AlignmentConfig | None:
        """Everything about the alignment of one run; None for soft attention."""
        return None if method == SOFT else resolve(method, weight, self.preset, self.options_for(method))
