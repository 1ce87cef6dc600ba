"""Times of several candidates in one run, taken in turns: what slows the machine down for a while slows all of them.

A ratio is the median over rounds of that to the first candidate, which is timed anew right before each other one: such
a while, if it is longer than two of them take, does not touch it.
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
    """So many calls of each in a round, behind as many of the first; each time another begins.

    After some that are not counted.
    """
    repeats = {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        repeats[name] = calls * max(1, round(LEAST / max(calls * _seconds(call, 1, device), 1e-7)))
    first, *others = candidates

    def timed(name: str) -> float:
        return _seconds(candidates[name], repeats[name], device)

    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    ratios: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        start = number % max(1, len(others))
        for name in others[start:] + others[:start] or [first]:
            seconds[first].append(timed(first))
            if name != first:
                seconds[name].append(timed(name))
            ratios[name].append(seconds[name][-1] / seconds[first][-1])
    ratios[first] = [1.0]
    return {name: _timing(times, ratios[name], rounds) for name, times in seconds.items()}


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


def _timing(times: list[float], ratios: list[float], rounds: int) -> Timing:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Timing(median, low, high, statistics.median(ratios), rounds)
