"""What a run is asked to do, checked once."""

import math
from dataclasses import dataclass
from pathlib import Path

from alignattn.errors import ConfigError, unknown
from alignattn.finetune.labels import TASKS
from alignattn.weights import read_weight

METHODS = ("none", "gan", "ot", "ct", "mmd")
PRECISIONS = ("fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run. `None` is found out: from the files, from the model, or the method's default."""

    model: str  # a folder, or a name on the hub
    train: Path
    eval: Path
    out: Path
    task: str | None = None
    text: tuple[str, ...] | None = None
    label: str | None = None
    separator: str | None = None  # of several labels in one cell
    method: str = "none"
    weight: float | str | None = None  # "auto" chooses it while training
    epochs: float = 3.0
    steps: int | None = None  # instead of epochs
    learning_rate: float = 2e-5
    batch_size: int = 16  # of one update, over all processes
    max_length: int | None = None  # tokens of a row
    seed: int = 0
    precision: str = "fp32"
    device: str = "auto"
    save_steps: int = 500

    def __post_init__(self) -> None:
        choices = {"task": TASKS, "method": METHODS, "precision": PRECISIONS, "device": DEVICES}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed and not (name == "task" and value is None):
                raise unknown(name, value, allowed)
        for name in ("epochs", "steps", "learning_rate", "batch_size", "max_length", "save_steps"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name.replace('_', '-')} must be > 0, got {value}.")
        if isinstance(self.weight, str):
            read = read_weight(self.weight)  # refused here, before anything is read
            object.__setattr__(self, "weight", read if isinstance(read, float) else str(read))
        if self.weight is not None and self.method == "none":
            raise ConfigError("--weight is the weight of alignment, and the method is none. Add --method mmd, say.")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be from 0 to 2**32 - 1, got {self.seed}.")
        if self.separator == "":
            raise ConfigError("--separator must not be empty.")
