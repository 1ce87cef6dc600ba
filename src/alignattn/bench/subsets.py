"""Fewer tokens and fewer layers a step (`max_tokens`, `every`): what they save, and what they do to the estimate.

How good an estimate is, is told at the parameters, where gradients of all tokens meet: of queries and keys that are
projected from one sequence, their means a deviation apart.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alignattn.alignment import Alignment, align
from alignattn.balance import EVERY
from alignattn.bench.row import Row, measured
from alignattn.bench.steps import CALLS
from alignattn.bench.workload import Shape, make_batch, make_model, training_step

DRAWS = 16
WIDTH = 64  # of a head


def subsets(shape: Shape, methods: Sequence[str], device: torch.device, *, rounds: int) -> list[Row]:
    """Whole steps with all, with a part of the tokens, and with a part of the layers."""
    choices: dict[str, dict[str, Any]] = {
        "": {},
        f", {shape.tokens // 4} tokens": {"max_tokens": shape.tokens // 4},
        ", half of the layers": {"every": 2},
        ", a quarter of the layers": {"every": 4},
    }
    batch = make_batch(shape, device)
    calls: dict[str, Callable[[], object]] = {"soft": training_step(make_model(shape, device), batch, shape.precision)}
    details = {}
    for method in methods:
        for label, options in choices.items():
            model = make_model(shape, device)
            align(model, method, **options)
            calls[f"{method}{label}"] = training_step(model, batch, shape.precision)
            if options:
                details[f"{method}{label}"] = estimate(method, options, shape, device)
    return measured("subsets", str(shape), calls, device, rounds=rounds, calls=CALLS, details=details)


def estimate(method: str, options: dict[str, Any], shape: Shape, device: torch.device) -> dict[str, float]:
    """Of the loss, bias and deviation as shares of it; of the gradient, the mean cosine with the whole one."""
    problem = _Problem(shape, device)
    whole, gradient = problem.solved(Alignment(method, weight=1.0), EVERY + 1)
    alignment = Alignment(method, weight=1.0, **options)
    drawn = [problem.solved(alignment, EVERY * draw + 1) for draw in range(1, DRAWS + 1)]
    values = [value for value, _ in drawn]
    cosines = [float(F.cosine_similarity(other, gradient, dim=0)) for _, other in drawn]
    return {"bias": fmean(values) / whole - 1, "deviation": pstdev(values) / whole, "cosine": fmean(cosines)}


class _Problem:
    """Layers of projections, and the tokens they are given."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        numbers = torch.Generator().manual_seed(0)
        width, self.heads = min(WIDTH, shape.width // shape.heads), shape.heads
        self.tokens = torch.randn(shape.batch, shape.tokens, width, generator=numbers).to(device)
        size = self.heads * width
        self.layers = [
            [(torch.randn(size, width, generator=numbers) / width**0.5).to(device).requires_grad_() for _ in range(2)]
            for _ in range(shape.layers)
        ]
        self.shifts = [torch.randn(size, generator=numbers).to(device) for _ in range(shape.layers)]

    def solved(self, alignment: Alignment, update: int) -> tuple[float, Tensor]:
        """The loss, and the gradient of all projections, in an update that is not looked at."""
        alignment._strength.set_clock(update)
        for place, ((of_query, of_key), shift) in enumerate(zip(self.layers, self.shifts, strict=True)):
            sides = F.linear(self.tokens, of_query), F.linear(self.tokens, of_key, shift)
            query, key = (side.unflatten(-1, (self.heads, -1)).transpose(1, 2) for side in sides)
            alignment.record(query, key, name=f"layer {place}")
        loss = alignment.loss()
        weights = [weight for pair in self.layers for weight in pair]
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        flat = [(torch.zeros_like(w) if g is None else g).flatten() for w, g in zip(weights, found, strict=True)]
        return float(loss.detach()), torch.cat(flat)
