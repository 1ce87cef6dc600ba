"""Where the device's part of a training step goes, kernel by kernel: what a method adds to soft attention.

Wall time on an accelerator is mostly Python's, and changes with the machine and the minute. What kernels take does not,
and neither does how many there are.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from alignattn.alignment import align
from alignattn.bench.memory import silent
from alignattn.bench.row import RECORDED, Row
from alignattn.bench.steps import CALLS
from alignattn.bench.workload import Shape, make_batch, make_model, training_step

WORTH_TELLING = 0.01  # of soft attention's time: kernels that add less are not named


@dataclass(frozen=True)
class Profile:
    """Of one step."""

    busy: float  # milliseconds in which any kernel ran
    kernels: dict[str, tuple[float, float]]  # milliseconds and launches of each


def by_kernels(shape: Shape, methods: Sequence[str], device: torch.device) -> list[Row]:
    """What the device does in a step of each, and what it does more than for soft attention."""
    batch = make_batch(shape, device)
    rows: list[Row] = []
    soft: Profile | None = None
    for name in ("soft", *methods):
        model = make_model(shape, device)
        alignment = None if name == "soft" else align(model, name)
        step = training_step(model, batch, shape.precision)
        for _ in range(RECORDED * CALLS):
            step()
        found = profiled(step, CALLS, device)
        soft = found if soft is None else soft
        rows.append(_row(shape, name, found.busy, sum(count for _, count in found.kernels.values()), soft))
        more = {kernel: _beyond(kernel, found, soft) for kernel in found.kernels} if alignment is not None else {}
        for kernel, (time, count) in sorted(more.items(), key=lambda item: -item[1][0]):
            if time > WORTH_TELLING * soft.busy:
                rows.append(_row(shape, f"{name}: {kernel}", time, count, soft))
    return rows


def profiled(call: Callable[[], object], times: int, device: torch.device) -> Profile:
    """Of so many calls, the mean."""
    torch.cuda.synchronize(device)
    with silent(), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            call()
        torch.cuda.synchronize(device)
    ran = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    kernels: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for event in ran:
        time, count = kernels[_short(event.name)]
        kernels[_short(event.name)] = time + _length(event) / times, count + 1 / times
    return Profile(_union(ran) / times, dict(kernels))


def _row(shape: Shape, name: str, time: float, count: float, soft: Profile) -> Row:
    details = {"device_ms": round(time, 4), "of_soft": round(time / soft.busy, 4), "launches": round(count, 1)}
    return Row("device", str(shape), name, details=details)


def _beyond(kernel: str, found: Profile, soft: Profile) -> tuple[float, float]:
    """What is more of it than in soft attention."""
    time, count = found.kernels[kernel]
    before, counted = soft.kernels.get(kernel, (0.0, 0.0))
    return time - before, count - counted


def _length(event: FunctionEvent) -> float:
    return float(event.time_range.end - event.time_range.start) / 1e3


def _union(events: Sequence[FunctionEvent]) -> float:
    """Milliseconds in which any of them ran: some run beside each other."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e3


def _short(name: str) -> str:
    """Without what it is a template of or is called with, and without where it is at home: these fill lines."""
    name = name.removeprefix("void ").replace("(anonymous namespace)", "")
    while True:
        shorter = re.sub(r"<[^<>]*>|\([^()]*\)", "", name)
        if shorter == name:
            return name.split("::")[-1].strip() or name
        name = shorter
