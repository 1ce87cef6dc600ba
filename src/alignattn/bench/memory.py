"""The most memory that a call has at once, beyond what was there before."""

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from alignattn.matching import scratch


def peak(call: Callable[[], object], device: torch.device, *, settling: int = 0) -> int:
    """Bytes of tensors, of the accelerator's memory or the CPU's; told by torch's allocators, to the byte.

    On an accelerator a matching is recorded when it comes again, and works in memory of its own from then on: so many
    calls come before the one that is measured, and what they leave behind is counted.
    """
    _let_go(device)
    if device.type == "cuda":
        before, idle = torch.cuda.memory_allocated(device), _idle_in_records(device)
        for _ in range(settling):
            call()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before + _idle_in_records(device) - idle
    with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    most = now = 0
    for change in sorted(changes, key=lambda event: event["ts"]):
        now += change["args"]["Bytes"]
        most = max(most, now)
    return most


def _let_go(device: torch.device) -> None:
    """Of whatever nobody needs any more: models of a case before would be freed while this one is measured.

    What goes may leave others behind that only then can go. What records of such models worked in is kept by torch
    until it is told otherwise, or records again, and would be taken for less than nothing then. What matchings on a CPU
    work in they ask for anew, and so it is counted.
    """
    scratch.give_back()
    before = None
    while device.type == "cuda" and before != torch.cuda.memory_allocated(device):
        before = torch.cuda.memory_allocated(device)
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    gc.collect()


def _idle_in_records(device: torch.device) -> int:
    """Bytes that CUDA graphs keep to work in. No tensor is there, and nobody else may use them."""
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == (device.index or 0)]
    kept = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in kept)


@contextmanager
def silent() -> Iterator[None]:
    """The profiler tells standard error that it begins and ends, each time and below Python."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(nowhere)
        os.close(kept)
