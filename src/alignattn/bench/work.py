"""What a training step has to do, counted and not timed: the limit that times are held against.

Operations are those of matrix products, two a multiplication and addition. Calls are the functions of torch that
compute something (views do not), each of which is one launch at least: in models of this size they bound a step on an
accelerator. Bytes are the least that alignment can move: queries and keys read, their gradients written, once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from alignattn.alignment import align
from alignattn.bench.row import Row
from alignattn.bench.workload import DTYPES, Shape, make_batch, make_model, training_step

NOTHING = ("detach", "alias", "empty", "lift", "_local_scalar", "set_")  # and what only looks at a tensor


def work(shape: Shape, methods: Sequence[str], device: torch.device) -> list[Row]:
    """One step of each, in which alignment does not look at its health."""
    batch = make_batch(shape, device)
    rows = []
    for name in ("soft", *methods):
        model = make_model(shape, device)
        if name != "soft":
            align(model, name)
        step = training_step(model, batch, shape.precision)
        step()
        operations, calls = counted(step)
        moved = 0.0 if name == "soft" else _queries_and_keys(shape)
        details = {"gigaoperations": operations / 1e9, "calls": float(calls), "megabytes": moved / 1e6}
        rows.append(Row("work", str(shape), name, details=details))
    return rows


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """Operations of matrix products, and calls."""
    with _Counter() as counter:
        call()
    return counter.operations, counter.calls


class _Counter(TorchDispatchMode):
    """By torch's own formulas; its FlopCounterMode cannot look into a backward that is run for some gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if formula := flop_registry.get(func._overloadpacket):
            self.operations += formula(*args, **kwargs, out_val=result)
        self.calls += not func.is_view and not func.__name__.startswith(NOTHING)
        return result


def _queries_and_keys(shape: Shape) -> float:
    size = DTYPES[shape.precision].itemsize if shape.precision in DTYPES else 4
    return 4.0 * shape.layers * shape.batch * shape.tokens * shape.width * size
