"""Gradients that are known already, handed to whom they belong when the backward comes by.

With `generator="model"` those of queries and keys go to queries and keys, and on through the whole model. With
`"projections"` they are taken back to what the layer's projections put out, within that layer, and given to the twins
of those outputs: they reach the projections' parameters and stop there.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.balance import Balance, Weight, at_least_single
from alignattn.capture import Projected, QueryKey
from alignattn.capture.hook import is_compiled_output
from alignattn.capture.standin import stand_in
from alignattn.errors import CaptureError
from alignattn.matching import kernels
from alignattn.replay import Lease

LARGEST = 2**26  # numbers of half precision that are multiplied at once

COMPILED = (
    "{}: in a compiled model autograd does not see the way from queries and keys back to their projections. Use "
    "generator='model' with torch.compile."
)


@dataclass(frozen=True)
class Slice:
    """A gradient that is one of many, computed together: on its way it costs nothing of its own."""

    whole: Tensor
    at: int

    def alone(self) -> Tensor:
        """The gradient itself."""
        return self.whole[self.at]


class Delivery:
    """Gathers targets and what they are to be handed; `term` gives a number whose backward does so."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []  # of gradients that are lent until they are handed on
        self._handed: list[tuple[Tensor, Slice, Weight]] = []
        # What looks at gradients, and wants the factor that the whole loss got.
        self.told: list[Callable[[Tensor], None]] = []

    def to(self, target: Tensor, gradient: Tensor | Slice, factor: Weight) -> None:
        """`target` is to get `factor` times the gradient. Factors that are one object are multiplied with once."""
        one = gradient if isinstance(gradient, Slice) else Slice(gradient[None], 0)
        self._handed.append((target, one, factor))

    def to_tokens(
        self,
        record: QueryKey,
        of_query: Slice | None,
        of_key: Slice | None,
        weight: Weight,
        *,
        scale: float,
        factor: Weight,
        generator: str,
        balance: Balance | None,
    ) -> None:
        """Queries and keys, or their projections, are to get `factor` times their gradients: weight over `scale`."""
        sides = ((record.query, record.query_source, of_query), (record.key, record.key_source, of_key))
        through = generator == "model"
        known = [(tokens, gradient) for tokens, _, gradient in sides if gradient is not None]
        if through:
            for target, taken in known:
                self.to(target if record.kept else stand_in(target), taken, factor)
        else:
            for target, back in _taken_back(record, [(tokens, gradient.alone()) for tokens, gradient in known]):
                self.to(target, back, factor)
        if balance is None:
            return
        for tokens, source, gradient in sides:  # from here on: the way back, above, calls hooks too
            if gradient is not None:
                tell = balance.watch(tokens, source, gradient.alone(), weight, scale=scale, through=through)
                self.told += [] if tell is None else [tell]

    def term(self, value: Tensor) -> Tensor:
        """This value, whose backward hands out the gradients."""
        wholes: dict[int, tuple[Tensor, Weight]] = {}
        for _, one, factor in self._handed:
            _, kept = wholes.setdefault(id(one.whole), (one.whole, factor))
            assert kept is factor
        order = list(wholes)
        places = [(order.index(id(one.whole)), one.at) for _, one, _ in self._handed]
        targets = [target for target, _, _ in self._handed]
        gradients, factors = [w for w, _ in wholes.values()], [f for _, f in wholes.values()]
        term: Tensor = _Deliver.apply(value.detach(), gradients, factors, places, self.told, self.leases, *targets)
        return term


def reachable(record: QueryKey) -> list[Projected]:
    """The outputs of a layer's projections that can be handed a gradient, through their twins."""
    if not record.projected:
        raise CaptureError(
            f"generator='projections': the query and key projections of {record.name} were not called as modules, or "
            "not in training mode, and cannot be handed a gradient. Use generator='model', or leave it out by layers=."
        )
    return [p for p in record.projected if p.output.requires_grad and p.twin.requires_grad]


def _taken_back(record: QueryKey, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Where the gradients of q and k go in this layer: (tensor to be handed it, gradient)."""
    outputs = reachable(record) if pairs else []
    if not outputs:
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
        wholes: list[Tensor],
        factors: list[Weight],  # of each whole
        places: list[tuple[int, int]],  # of each target: which whole, and where in it
        told: list[Callable[[Tensor], None]],
        leases: list[Lease],
        *targets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*wholes)  # freed by the backward, however long the loss is kept
        ctx.factors, ctx.places, ctx.told, ctx.leases = factors, places, told, leases
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        for tell in ctx.told:
            tell(outer[0])
        ctx.told = []
        products: dict[tuple[int, torch.device], Tensor] = {}
        scaled = []
        for whole, factor in zip(ctx.saved_tensors, ctx.factors, strict=True):
            kind = id(factor), whole.device
            if kind not in products:
                products[kind] = (outer[0] * factor).to(whole.device)
            scaled.append(_scaled(whole, products[kind]))
        if not _comes_again():
            ctx.leases.clear()
        return None, None, None, None, None, None, *(scaled[which][at] for which, at in ctx.places)


def _comes_again() -> bool:
    """Whether the backward under way keeps its graph (retain_graph=True), and may be followed by another."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _scaled(whole: Tensor, by: Tensor) -> Sequence[Tensor]:
    """At once; or, where copies in single precision would take much memory, one after the other."""
    if whole.dtype in (torch.float32, torch.float64):
        return (whole * by).unbind()
    if kernels.serve(whole, widest=sys.maxsize, dtypes=kernels.SHORT):
        from alignattn.matching.kernels.times import times

        return times(whole, by).unbind()
    if whole.numel() <= LARGEST:
        return (at_least_single(whole) * by).to(whole.dtype).unbind()
    return [(at_least_single(part) * by).to(whole.dtype) for part in whole.unbind()]


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
