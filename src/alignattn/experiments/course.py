"""How a training went, for its result file: losses, and what logs show of the alignment, look by look."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIGURES = ("alignment_weight", "alignment_share", "alignment_mmd", "discriminator_accuracy", "critic_gap")


@dataclass
class Course:
    """Filled while a model trains."""

    curve: list[tuple[int, float, float]] = field(default_factory=list)  # step, task's loss, alignment's, weighted
    figures: list[dict[str, float]] = field(default_factory=list)  # one for each entry of the curve, if it is aligned
    seconds: float = 0.0
    step_seconds: float = 0.0  # median
    told: dict[str, Any] = field(default_factory=dict)  # what else a result file is to say

    def tell(self, logs: Mapping[str, float]) -> None:
        """What the logs say of the alignment by now."""
        self.figures.append({name: logs[name] for name in FIGURES if name in logs})

    def details(self) -> dict[str, Any]:
        """For a result file."""
        curve = [[step, round(task, 5), round(align, 5)] for step, task, align in self.curve]
        names = [name for name in FIGURES if any(name in one for one in self.figures)]
        figures = {name: [_rounded(one.get(name, math.nan)) for one in self.figures] for name in names}
        return {"curve": curve, **({"figures": figures} if figures else {}), **self.told}


def _rounded(value: float) -> float:
    """To five digits that count."""
    return float(f"{value:.5g}")
