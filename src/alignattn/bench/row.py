"""One measurement."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from alignattn.bench.clock import Timing, side_by_side
from alignattn.bench.memory import peak
from alignattn.replay import BEFORE

RECORDED = BEFORE + 1  # times that a matching comes until it is recorded; of `calls` steps one looks, which is another


@dataclass(frozen=True)
class Row:
    """What one candidate took in one case; ratios are to the first candidate that ran."""

    part: str  # of the benchmark
    case: str
    name: str
    timing: Timing | None = None
    memory: int | None = None  # bytes, the most at once
    memory_ratio: float | None = None
    failed: str | None = None  # why there is no figure
    details: Mapping[str, Any] = field(default_factory=dict)


def measured(
    part: str,
    case: str,
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    calls: int = 1,
    plain: Collection[str] = (),
    failed: Mapping[str, str] | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Row]:
    """Time of so many calls of each candidate, and memory. One that runs out of memory is told of, and left out.

    `plain` ones record nothing, and need not settle before their memory is taken.
    """
    lost = dict(failed or {})
    fit: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    for name, call in candidates.items():
        try:
            call()
            memory[name] = peak(call, device, settling=0 if name in plain else RECORDED * calls)
            fit[name] = call
        except torch.OutOfMemoryError:
            lost[name] = "out of memory"
            torch.cuda.empty_cache()
    timings = side_by_side(fit, device, rounds=rounds, calls=calls) if fit else {}
    base = memory[next(iter(fit))] if fit else None
    return [
        Row(
            part,
            case,
            name,
            timings.get(name),
            memory.get(name),
            memory[name] / base if name in memory and base else None,
            lost.get(name),
            dict((details or {}).get(name, {})),
        )
        for name in [*candidates, *(n for n in lost if n not in candidates)]
    ]
