"""Times of several candidates in one run, taken in turns: what slows the machine down for a while slows all of them.

A ratio is the median over rounds of that to the first candidate, which is timed anew right before each other one: such
a while, if it is longer than two of them take, does not touch it. How well that is known the interval of the median
tells, from the order of the rounds' ratios alone: it takes for granted nothing about how noise is distributed.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

LEAST = 2e-3  # seconds that are timed at once: shorter calls are repeated
OUTSIDE = 0.025  # how likely the median is below its interval, and above it


@dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    median: float
    low: float  # lower quartile
    high: float  # upper quartile
    ratio: float  # to the first candidate
    rounds: int
    ratio_low: float  # where the ratio is to be looked for, in 19 cases of 20; of few rounds, from least to most
    ratio_high: float


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
    with _what_is_there_is_no_garbage():
        for number in range(rounds):
            start = number % max(1, len(others))
            for name in others[start:] + others[:start] or [first]:
                seconds[first].append(timed(first))
                if name != first:
                    seconds[name].append(timed(name))
                ratios[name].append(seconds[name][-1] / seconds[first][-1])
    ratios[first] = [1.0]
    return {name: _timing(times, ratios[name], rounds) for name, times in seconds.items()}


@contextmanager
def _what_is_there_is_no_garbage() -> Iterator[None]:
    """Python would look through all that was imported now and then, a part of a second long, and whoever ran then would
    be charged for it. What candidates make themselves it looks through as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
    low, median, high = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return Timing(median, low, high, statistics.median(ratios), rounds, *interval(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median: each value is as likely to be above as below it, and how many are below is a coin's matter."""
    count, outer, beyond = len(values), 0, 0.0
    while (beyond := beyond + math.comb(count, outer) / 2**count) <= OUTSIDE:
        outer += 1
    ordered, outer = sorted(values), max(outer, 1)
    return ordered[outer - 1], ordered[-outer]
