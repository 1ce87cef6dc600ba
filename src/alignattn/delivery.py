"""Gradients that are known already, handed to whom they belong when the backward comes by.

With `generator="model"` those of queries and keys go to queries and keys, and on through the whole model. With
`"projections"` they are taken back to what the layer's projections put out, within that layer, and given to the twins
of those outputs: they reach the projections' parameters and stop there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.balance import Balance, Weight, at_least_single
from alignattn.capture import QueryKey
from alignattn.capture.hook import is_compiled_output
from alignattn.errors import CaptureError

COMPILED = (
    "{}: in a compiled model autograd does not see the way from queries and keys back to their projections. Use "
    "generator='model' with torch.compile."
)


class Delivery:
    """Gathers targets and what they are to be handed; `term` is a number whose backward does so."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach()
        self.targets: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.factors: list[Weight] = []
        # What looks at gradients, and wants the factor that the whole loss got.
        self.told: list[Callable[[Tensor], None]] = []

    def to(self, target: Tensor, gradient: Tensor, factor: Weight) -> None:
        """`target` is to get `factor` times the gradient."""
        self.targets.append(target)
        self.gradients.append(gradient)
        self.factors.append(factor)

    def to_tokens(
        self,
        record: QueryKey,
        of_query: Tensor | None,
        of_key: Tensor | None,
        weight: Weight,
        scale: float,
        generator: str,
        balance: Balance | None,
    ) -> None:
        """Queries and keys, or their projections, are to get their gradients, which are `scale` times too large."""
        sides = ((record.query, record.query_source, of_query), (record.key, record.key_source, of_key))
        known = [(tokens, gradient) for tokens, _, gradient in sides if gradient is not None]
        through = generator == "model"
        for target, taken in known if through else _taken_back(record, known):
            self.to(target, taken, weight / scale)
        if balance is None:
            return
        for tokens, source, gradient in sides:  # from here on: the way back, above, calls hooks too
            if gradient is not None:
                tell = balance.watch(tokens, source, gradient, weight, scale=scale, through=through)
                self.told += [] if tell is None else [tell]

    def term(self) -> Tensor:
        """The value, whose backward hands out the gradients."""
        term: Tensor = _Deliver.apply(self.value, self.gradients, self.factors, self.told, *self.targets)
        return term


def _taken_back(record: QueryKey, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Where the gradients of q and k go in this layer: (tensor to be handed it, gradient)."""
    if pairs and not record.projected:
        raise CaptureError(
            f"generator='projections': the query and key projections of {record.name} were not called as modules, or "
            "not in training mode, and cannot be handed a gradient. Use generator='model', or leave it out by layers=."
        )
    outputs = [p for p in record.projected if p.output.requires_grad and p.twin.requires_grad]
    if not pairs or not outputs:
        return []
    tensors, gradients = zip(*pairs, strict=True)
    targets = [p.output for p in outputs]
    for tensor, gradient in pairs:
        if is_compiled_output(tensor) and not any(_is_reached(tensor, gradient, targets)):
            raise CaptureError(COMPILED.format(record.name))
    taken = torch.autograd.grad(tensors, targets, gradients, retain_graph=True, allow_unused=True)
    return [(p.twin, gradient) for p, gradient in zip(outputs, taken, strict=True) if gradient is not None]


def _is_reached(tensor: Tensor, gradient: Tensor, targets: list[Tensor]) -> list[bool]:
    taken = torch.autograd.grad(tensor, targets, gradient, retain_graph=True, allow_unused=True)
    return [g is not None for g in taken]


class _Deliver(torch.autograd.Function):
    """A number whose backward hands each target the gradient that was computed for it before."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        gradients: list[Tensor],
        factors: list[Weight],
        told: list[Callable[[Tensor], None]],
        *targets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*gradients)  # freed by the backward, however long the loss is kept
        ctx.factors, ctx.told = factors, told
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        for tell in ctx.told:
            tell(outer[0])
        ctx.told = []
        handed = (
            (at_least_single(g) * (outer[0] * f).to(g.device)).to(g.dtype)
            for g, f in zip(ctx.saved_tensors, ctx.factors, strict=True)
        )
        return None, None, None, None, *handed


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


def scale_gradient(tensor: Tensor, factor: Weight) -> Tensor:
    """The tensor itself; its gradient is multiplied on the way back."""
    factor = torch.as_tensor(factor, dtype=torch.float64)  # no dimension, on the CPU: any dtype and device takes it
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)
    return scaled
