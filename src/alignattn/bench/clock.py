"""Times of several candidates in one run, taken in turns: what slows the machine down for a while slows all of them.

A ratio is the median over rounds of the ratio within a round, which such a while does not touch.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

LEAST = 2e-3  # seconds that are timed at once: shorter calls are repeated


@dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile
    ratio: float  # to the first candidate
    rounds: int


def side_by_side(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    calls: int = 1,
) -> dict[str, Timing]:
    """Call each candidate so often a round, each time starting with another, after some calls that are not counted."""
    repeats = {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        repeats[name] = calls * max(1, round(LEAST / max(calls * _seconds(call, 1, device), 1e-7)))
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(_seconds(candidates[name], repeats[name], device))
    return {name: _timing(times, seconds[names[0]]) for name, times in seconds.items()}


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait(device)
    return (time.perf_counter() - begun) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(times: list[float], first: list[float]) -> Timing:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    ratio = statistics.median(own / other for own, other in zip(times, first, strict=True))
    return Timing(median, low, high, ratio, len(times))
