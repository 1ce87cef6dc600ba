"""What is measured where, quick or whole."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from alignattn.bench import losses, peers, steps, subsets
from alignattn.bench.parts import ACCELERATED, LONG_PARTS, PARTS
from alignattn.bench.profile import by_kernels
from alignattn.bench.row import Row
from alignattn.bench.work import work
from alignattn.bench.workload import Shape
from alignattn.config import METHODS
from alignattn.errors import ConfigError, unknown

MINILM = Shape("MiniLM", 6, 384, 12, 8, 128, "fp32")
BERT = Shape("BERT-base", 12, 768, 12, 32, 128, "bf16")
LONG = Shape("BERT-base", 12, 768, 12, 16, 512, "bf16")
SMALL = Shape("small", 2, 128, 4, 4, 64, "fp32", vocabulary=1000)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    device: torch.device
    parts: Sequence[str] | None = None  # None: all, or those that are quick
    methods: Sequence[str] = tuple(METHODS)
    quick: bool = False
    compiled: bool = False
    rounds: int | None = None

    def __post_init__(self) -> None:
        for part in self.parts or ():
            if part not in PARTS:
                raise unknown("part", part, PARTS)
            if part in ACCELERATED and self.device.type != "cuda":
                raise ConfigError(f"The part {part!r} is about an accelerator, and the device is {self.device.type!r}.")
        for method in self.methods:
            if method not in METHODS:
                raise unknown("method", method, METHODS)


def measure(plan: Plan) -> Iterator[list[Row]]:
    """Case by case, as they come."""
    cuda = plan.device.type == "cuda"
    left_out = [*(LONG_PARTS if plan.quick else ()), *(() if cuda else ACCELERATED)]
    parts = plan.parts or [part for part in PARTS if part not in left_out]
    for part in PARTS:
        if part in parts:
            yield from _part(part, plan, cuda=cuda)


def _part(part: str, plan: Plan, *, cuda: bool) -> Iterator[list[Row]]:
    lengths: Sequence[int]
    if plan.quick:
        shapes, rounds = [BERT] if cuda else [SMALL], 5
        lengths, heads = (losses.LENGTHS[:2], 12) if cuda else ((64, 128), 2)
    else:
        shapes, rounds = [BERT, LONG] if cuda else [MINILM], 20 if cuda else 5
        lengths, heads = (losses.LENGTHS, 12) if cuda else (losses.LENGTHS[:3], 4)
    rounds, to, first = plan.rounds or rounds, (plan.methods, plan.device), shapes[0]
    few = replace(first, batch=2, tokens=16)
    measured: dict[str, Callable[[], Iterable[list[Row]]]] = {
        "work": lambda: (work(shape, *to) for shape in shapes),
        "step": lambda: (steps.whole_steps(shape, *to, rounds=rounds, compiled=plan.compiled) for shape in shapes),
        "straightforward": lambda: (steps.as_first_written(shape, *to, rounds=max(3, rounds // 4)) for shape in shapes),
        "device": lambda: (by_kernels(shape, *to) for shape in shapes),
        "python": lambda: [steps.whole_steps(few, *to, rounds=rounds, part="python")],
        "length": lambda: losses.alone(lengths, *to, heads=heads, width=64, rounds=rounds),
        "layers": lambda: steps.by_layers(first, *to, rounds=rounds),
        "sinkhorn": lambda: peers.sinkhorn(plan.device, quick=plan.quick, rounds=max(3, rounds // 4)),
        "subsets": lambda: [subsets.subsets(shapes[-1], *to, rounds=rounds)],
        "inference": lambda: [steps.inference(first, *to, rounds=rounds)],
    }
    yield from measured[part]()
