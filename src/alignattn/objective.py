"""From the records of some forward passes to one weighted term, and where its gradient goes.

Records of one shape are stacked and matched in one call: one call a layer was measured at two to three times a whole
training step of soft attention. Sum over samples / samples, then mean or sum over heads and over the calls of a
forward pass, then the mean over passes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.balance import Balance, Weight
from alignattn.capture import QueryKey, Source
from alignattn.capture.hook import is_compiled_output
from alignattn.config import AlignmentConfig
from alignattn.errors import CaptureError
from alignattn.matching.matcher import Matcher

Forwards = list[list[QueryKey]]
Parts = dict[str, Tensor]
Watchers = Sequence["Watcher"]


class Watcher(Protocol):
    """Looks at queries and keys while they are stacked."""

    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Queries and keys [l, b, h, tokens, d] of the layers `names`, masks [l, b, tokens]."""


class Objective:
    """The alignment loss of all records, weighted.

    The weight acts on queries and keys. The networks get the gradient of the plain loss, unless they share the user's
    optimizer (`weighs_networks`): an adversary that learns slower while the weight is small falls behind.
    """

    def __init__(self, matcher: Matcher, config: AlignmentConfig, *, weighs_networks: bool) -> None:
        self.matcher = matcher
        self.config = config
        self.weighs_networks = weighs_networks

    def __call__(
        self, forwards: Forwards, weight: Weight, watchers: Watchers, balance: Balance | None = None
    ) -> tuple[Tensor, Parts]:
        """The term, with gradients into queries and keys wherever they came from; and each layer's part."""
        if is_nothing(weight):  # the model's own gradients are then untouched to the last bit
            forwards = [[_moved(r, r.query.detach(), r.key.detach()) for r in records] for records in forwards]
        elif not self.weighs_networks or balance is not None:
            before, behind = (weight, 1.0) if self.weighs_networks else (1.0, weight)

            def weighed(tokens: Tensor, source: Source | None) -> Tensor:
                aligned = _scale_gradient(tokens, behind)
                if balance is not None:
                    balance.watch(tokens, source, aligned, before=before, behind=behind)
                return aligned

            forwards = [
                [_moved(r, weighed(r.query, r.query_source), weighed(r.key, r.key_source)) for r in records]
                for records in forwards
            ]
        total, parts = self.total(forwards, watchers)
        if self.weighs_networks:
            return weight * total, parts
        return total + ((weight - 1) * total).detach(), parts

    def total(self, forwards: Forwards, watchers: Watchers) -> tuple[Tensor, Parts]:
        """The unweighted loss, and each call's part by name, the mean where several passes have it."""
        mean = self.config.reduction == "mean"
        records = [record.unpacked() for some in forwards for record in some]
        shares = [1 / len(forwards) / (len(some) if mean else 1) for some in forwards for _ in some]
        losses: dict[int, Tensor] = {}
        for group in self._groups(records):
            for place, value in zip(group, self._match([records[place] for place in group], watchers), strict=True):
                losses[place] = value.mean() if mean else value.sum()
        total = torch.stack([losses[place].to(losses[0].device) * share for place, share in enumerate(shares)]).sum()
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for place, record in enumerate(records):
            value = losses[place].detach()
            if record.sample_weight is not None:  # a part tells of this batch, whatever its share in the update is
                value = value / record.sample_weight.sum().clamp_min(torch.finfo(torch.float32).tiny)
            parts[_label(record)].append(value)
        return total, {label: torch.stack(values).mean() for label, values in parts.items()}

    def _groups(self, records: list[QueryKey]) -> list[list[int]]:
        """Which records can be stacked. Compared, not hashed: to hash a length is to compile for it alone."""
        groups: list[tuple[Any, list[int]]] = []
        for place, record in enumerate(records):
            query, key = record.query, record.key
            bank = self.matcher.bank(record.name, query.shape[-1])
            given = record.query_mask is None, record.key_mask is None, record.sample_weight is None
            kind = (bank, query.shape, key.shape, query.dtype, key.dtype, query.device, given)
            group = next((members for other, members in groups if other == kind), None)
            if group is None:
                groups.append((kind, group := []))
            group.append(place)
        return [members for _, members in groups]

    def _match(self, records: list[QueryKey], watchers: Watchers) -> list[Tensor]:
        """For each record the mean over samples of its losses, or their sum with the samples' weights, [h]."""
        query, key = torch.stack([r.query for r in records]), torch.stack([r.key for r in records])
        query_mask, key_mask = (_stack_masks([getattr(r, m) for r in records]) for m in ("query_mask", "key_mask"))
        names = [r.name for r in records]
        counted = self.matcher.counted
        for watcher in watchers:
            watcher.watch(names, query, key, counted(query_mask), counted(key_mask))
        losses = self.matcher(query, key, query_mask, key_mask, names)  # (l, b, h)
        if records[0].sample_weight is None:
            return list(losses.mean(1).unbind())
        weights = torch.stack([r.sample_weight for r in records if r.sample_weight is not None]).to(losses)
        return list((losses * weights[..., None]).sum(1).unbind())


def hand_to_projections(
    objective: Objective,
    forwards: Forwards,
    weight: Weight,
    watchers: Watchers,
    balance: Balance | None = None,
) -> tuple[Tensor, Parts]:
    """The term, with gradients into the query and key projections and no further (`generator="projections"`).

    The matching is differentiated at once, on detached copies of queries and keys; each layer's gradient is taken
    back to what its projections put out, within that layer; and the backward of the returned term hands it to their
    twins. What the matching needed in memory is free again before the model's own backward begins.
    """
    leaves = [[_leaf(record) for record in records] for records in forwards]
    total, parts = objective.total(leaves, watchers)
    flat = [
        (leaf, record)
        for some, others in zip(leaves, forwards, strict=True)
        for leaf, record in zip(some, others, strict=True)
    ]
    networks = [p for p in objective.matcher.parameters() if p.requires_grad]
    # Scaled so that a token's gradient is about one: between q and projection it may be in fp16, where 1e-7 is nothing.
    scale = 2.0 ** round(math.log2(sum(leaf.query.numel() / leaf.query.shape[-1] for leaf, _ in flat)))
    sources = [tensor for leaf, _ in flat for tensor in (leaf.query, leaf.key)]
    gradients = torch.autograd.grad(total * scale, [*sources, *networks], allow_unused=True)
    targets: list[Tensor] = []
    deliveries: list[Tensor] = []
    factors: list[Weight] = []
    for place, (_, record) in enumerate(() if is_nothing(weight) else flat):
        for target, gradient in _taken_back(record, gradients[2 * place], gradients[2 * place + 1]):
            targets.append(target)
            deliveries.append(gradient)
            factors.append(weight / scale)
    for parameter, gradient in zip(networks, gradients[len(sources) :], strict=True):
        if gradient is not None:
            targets.append(parameter)
            deliveries.append(gradient)
            factors.append((weight if objective.weighs_networks else 1.0) / scale)
    told: list[Callable[[Tensor], None] | None] = []
    if balance is not None:  # from here on: the way back, above, calls hooks too
        sides = [side for _, r in flat for side in ((r.query, r.query_source), (r.key, r.key_source))]
        for (tensor, source), gradient in zip(sides, gradients[: len(sources)], strict=True):
            if gradient is not None:
                told.append(balance.watch_apart(tensor, source, gradient / scale, weight))
    term: Tensor = _Deliver.apply((weight * total).detach(), deliveries, factors, told, *targets)
    return term, parts


def _taken_back(record: QueryKey, of_query: Tensor | None, of_key: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Where the gradients of q and k go in this layer: (tensor to be handed it, gradient)."""
    pairs = [(t, g) for t, g in ((record.query, of_query), (record.key, of_key)) if g is not None and t.requires_grad]
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
            raise CaptureError(
                f"{record.name}: in a compiled model autograd does not see the way from queries and keys back to their "
                "projections. Use generator='model' with torch.compile."
            )
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
        told: list[Callable[[Tensor], None] | None],
        *targets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*gradients)  # freed by the backward, however long the loss is kept
        ctx.factors, ctx.told = factors, told
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        for tell in filter(None, ctx.told):
            tell(outer[0])
        ctx.told = []
        # In fp32 at least: a gradient scaler's factor alone may be more than fp16 can hold.
        handed = (
            (g.to(torch.promote_types(g.dtype, torch.float32)) * (outer[0] * f)).to(g.dtype)
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


def _scale_gradient(tensor: Tensor, factor: Weight) -> Tensor:
    factor = torch.as_tensor(factor, dtype=torch.float64)  # no dimension, on the CPU: any dtype and device takes it
    scaled: Tensor = _ScaleGradient.apply(tensor, factor)
    return scaled


def is_nothing(weight: Weight) -> bool:
    """Whether alignment is to leave no trace at all."""
    return isinstance(weight, float) and weight == 0


def _moved(record: QueryKey, query: Tensor, key: Tensor) -> QueryKey:
    return replace(record, query=query, key=key)


def _leaf(record: QueryKey) -> QueryKey:
    return _moved(record, record.query.detach().requires_grad_(), record.key.detach().requires_grad_())


def _stack_masks(masks: list[Tensor | None]) -> Tensor | None:
    if masks[0] is None:
        return None
    if all(mask is masks[0] for mask in masks):
        return masks[0].expand(len(masks), *masks[0].shape)
    return torch.stack([mask for mask in masks if mask is not None])


def _label(record: QueryKey) -> str:
    return f"{record.name}#{record.call}" if record.call else record.name
