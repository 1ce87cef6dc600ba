"""What is measured where, quick or whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from alignattn.bench import losses, peers, steps, subsets
from alignattn.bench.parts import LONG_PARTS, PARTS
from alignattn.bench.row import Row
from alignattn.bench.work import work
from alignattn.bench.workload import Shape
from alignattn.config import METHODS
from alignattn.errors import unknown

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
        for method in self.methods:
            if method not in METHODS:
                raise unknown("method", method, METHODS)


def measure(plan: Plan) -> Iterator[list[Row]]:
    """Case by case, as they come."""
    cuda = plan.device.type == "cuda"
    lengths: Sequence[int]
    if plan.quick:
        shapes, rounds = [BERT] if cuda else [SMALL], 5
        lengths, heads = (losses.LENGTHS[:2], 12) if cuda else ((64, 128), 2)
    else:
        shapes, rounds = [BERT, LONG] if cuda else [MINILM], 20 if cuda else 5
        lengths, heads = (losses.LENGTHS, 12) if cuda else (losses.LENGTHS[:3], 4)
    rounds = plan.rounds or rounds
    device, methods = plan.device, plan.methods
    parts = plan.parts or [part for part in PARTS if not (plan.quick and part in LONG_PARTS)]
    if "work" in parts:
        for shape in shapes:
            yield work(shape, methods, device)
    if "step" in parts:
        for shape in shapes:
            yield steps.whole_steps(shape, methods, device, rounds=rounds, compiled=plan.compiled)
    if "length" in parts:
        yield from losses.alone(lengths, methods, device, heads=heads, width=64, rounds=rounds)
    if "layers" in parts:
        yield from steps.by_layers(shapes[0], methods, device, rounds=rounds)
    if "sinkhorn" in parts:
        yield from peers.sinkhorn(device, quick=plan.quick, rounds=max(3, rounds // 4))
    if "subsets" in parts:
        yield subsets.subsets(shapes[-1], methods, device, rounds=rounds)
    if "inference" in parts:
        yield steps.inference(shapes[0], methods, device, rounds=rounds)
