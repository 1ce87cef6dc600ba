"""Whole training steps, of a model with soft attention, with each method, and with each as one would first write it.

And models of more and more layers; and models in evaluation, attached and plain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from alignattn import balance
from alignattn.alignment import align
from alignattn.bench import straightforward
from alignattn.bench.row import Row, measured
from alignattn.bench.workload import Shape, autocast, make_batch, make_model, training_step

LAYERS = (2, 4, 8, 16)
CALLS = balance.EVERY  # timed at once: alignment looks at its health in one of them


def whole_steps(
    shape: Shape,
    methods: Sequence[str],
    device: torch.device,
    *,
    rounds: int,
    compiled: bool = False,
    part: str = "step",
) -> list[Row]:
    """Forward, backward and optimizer, alignment included; memory beyond weights and the optimizer's state."""
    candidates = _candidates(shape, methods, device, compiled=compiled)
    case = f"{shape}{', compiled' if compiled else ''}"
    return measured(part, case, candidates, device, rounds=rounds, calls=CALLS, plain=["soft"])


def as_first_written(shape: Shape, methods: Sequence[str], device: torch.device, *, rounds: int) -> list[Row]:
    """The same, each method as one would write it who has read the paper and nothing else."""
    candidates, batch = _candidates(shape, (), device, compiled=False), make_batch(shape, device)
    for name in methods:
        model = make_model(shape, device)
        term = straightforward.attach(model, name, weight=0.1, mask=batch["attention_mask"])
        candidates[name] = training_step(model, batch, shape.precision, term)
    return measured("straightforward", str(shape), candidates, device, rounds=rounds, calls=CALLS, plain=candidates)


def by_layers(shape: Shape, methods: Sequence[str], device: torch.device, *, rounds: int) -> Iterator[list[Row]]:
    """The same, in models of more and more layers."""
    for layers in LAYERS:
        deeper = replace(shape, layers=layers)
        candidates = _candidates(deeper, methods, device, compiled=False)
        yield measured("layers", f"{deeper}, {layers} layers", candidates, device, rounds=rounds, calls=CALLS)


def inference(shape: Shape, methods: Sequence[str], device: torch.device, *, rounds: int) -> list[Row]:
    """A model that has been trained for a step and is evaluated now, plain and attached."""
    batch = make_batch(shape, device)
    calls: dict[str, Callable[[], object]] = {}

    def evaluated(model: torch.nn.Module) -> object:
        with torch.no_grad(), autocast(device, shape.precision):
            return model(**batch)

    for name in ("soft", *methods):
        model = make_model(shape, device)
        if name != "soft":
            align(model, name)
        training_step(model, batch, shape.precision)()
        calls[name] = partial(evaluated, model.eval())
    return measured("inference", str(shape), calls, device, rounds=rounds)


def _candidates(
    shape: Shape, methods: Sequence[str], device: torch.device, *, compiled: bool
) -> dict[str, Callable[[], object]]:
    batch = make_batch(shape, device)
    found: dict[str, Callable[[], object]] = {}
    for name in ("soft", *methods):
        model = make_model(shape, device)
        if name != "soft":
            align(model, name)
        called = _compiled(model) if compiled else model
        found[name] = training_step(model, batch, shape.precision, called=called)
    return found


def _compiled(model: torch.nn.Module) -> Callable[..., Any]:
    """The model in a function of its own: torch keeps what it compiles by code, and all candidates are of one class.

    In each call it would look through the versions of all of them.
    """

    def call(**batch: torch.Tensor) -> Any:
        return model(**batch)

    call.__code__ = call.__code__.replace()  # a copy, which is another
    return torch.compile(call)
