"""`stream="layer"`: each layer matched by itself, and nothing of it kept.

When a layer is recorded, the values of its losses are computed, and nothing more. They are put into the graph by a
function that saves queries and keys as any other does: where autograd saves them for the attention as well they cost
nothing, and under checkpointing they are dropped with the rest of the layer. Its backward comes when the model's own
arrives at that layer (autograd runs what was made last first), has queries and keys given back, computed again by the
checkpoint if need be, and differentiates the matching there and then. So gradients live as long as their layer's
backward. The price is a second pass through the matching, and on an accelerator calls that are not stacked.

A checkpoint counts what is saved. So a layer that it computes again must save the same tensors at the same place,
though nobody wants its losses (`again`). And what happens inside the matching is kept from it (apart.py).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from alignattn.apart import apart
from alignattn.balance import Balance, Meet, Weight
from alignattn.capture import QueryKey, Source
from alignattn.capture.hook import is_compiled_output
from alignattn.delivery import COMPILED as COMPILED_PROJECTIONS
from alignattn.delivery import Slice, reachable
from alignattn.errors import CaptureError, ConfigError
from alignattn.matching.at_once import Differentiated, differentiate
from alignattn.matching.matcher import Matcher
from alignattn.objective import Objective, Parts, Watchers, is_nothing, leaf, on_one_device, parts_of, through_unpacking
from alignattn.passes import Matched
from alignattn.precision import at_least_single
from alignattn.thinning import Places, thinned

COMPILED = (
    "stream='layer' matches within the backward pass, which compiled code cannot. Leave it out with torch.compile, "
    "which chooses by itself what is kept."
)


class Stream:
    """Matches calls one by one, as an Objective would all of them."""

    def __init__(self, objective: Objective) -> None:
        if not objective.matcher.is_separable():
            raise ConfigError(
                f"stream='layer' matches each layer by itself, and {type(objective.matcher).__name__} does not say "
                "that layers know nothing of each other. Put `separable = True` into its class if so, or leave out "
                "stream."
            )
        self.objective = objective
        self.matcher = objective.matcher
        self._live: WeakSet[_Layer] = WeakSet()  # whose backward may still come

    def match(self, record: QueryKey, watchers: Watchers, balance: Balance | None) -> Matched:
        """The losses of a call, whose backward reaches its queries and keys; they themselves are not kept."""
        with apart(), _frozen(self.matcher):
            row = leaf(record, wanted=False).unpacked()
            places = self.objective.thinning.places(row)
            row = thinned(row, places)
            watching = (self.objective.finite, *watchers)
            self.objective.show([row.name], row.query[None], row.key[None], *_masks(row), watching)
            samples, heads = row.query.shape[:2]
            found = self.differentiated(row, row.query.new_ones(1, samples, heads))
            losses = found.losses[0].sum(1) / self.over_heads(heads)  # (b)
            acting = self.objective.acting([row.name], heads, row.query.device)
        way_back = None if self._goes_through else _WayBack.of(record)
        layer = _Layer(self, record, places, acting, way_back)
        self._live.add(layer)
        if balance is not None:
            layer.expect(record, balance, through=self._goes_through)
        return Matched(
            name=record.name,
            call=record.call,
            samples=record.samples,
            losses=self._put_into_graph(layer, losses, record),
            layer=layer,
            behind=get_gradient_edge(record.query).node if record.query.requires_grad else None,
            sample_weight=record.sample_weight,
        )

    def again(self, record: QueryKey) -> None:
        """A checkpoint computes a call once more: it is shown what it saw the first time."""
        with apart():
            nothing = record.query.new_zeros(())
        self._put_into_graph(None, nothing, record)

    def awaits(self, name: str | None = None) -> bool:
        """Whether a call of this layer, or of any, may be computed once more."""
        return any(name is None or layer.name == name for layer in self._live)

    def term(self, forwards: list[list[Matched]], weight: Weight) -> tuple[Tensor, Parts]:
        """The weighted term of these calls, and each layer's part."""
        calls = [replace(one, sample_weight=one.layer.of_rows(one.sample_weight)) for some in forwards for one in some]
        values = [
            one.losses.mean() if one.sample_weight is None else (one.losses * one.sample_weight.to(one.losses)).sum()
            for one in calls
        ]
        shares = self.objective.shares([len(some) for some in forwards])
        total = on_one_device([value * share for value, share in zip(values, shares, strict=True)], torch.stack).sum()
        for one in calls:
            one.layer.weight = weight
        term: Tensor = _Weigh.apply(total, weight)
        return term, parts_of(calls, [value.detach() for value in values])

    @property
    def _goes_through(self) -> bool:
        return self.objective.config.generator == "model"

    def _put_into_graph(self, layer: "_Layer | None", losses: Tensor, record: QueryKey) -> Tensor:
        sources = tuple(s.tokens for s in (record.query_source, record.key_source) if s is not None)
        if self._goes_through:
            tokens, twins = (record.query, record.key), []
        else:
            tokens, twins = (record.query.detach(), record.key.detach()), [p.twin for p in reachable(record)]
        parameters = list(self.matcher.parameters())
        with torch.enable_grad():  # the call may be seen within an autograd function, as a softmax of one's own is
            put: Tensor = _Match.apply(layer, losses, sources, len(twins), *tokens, *twins, *parameters)
        return put

    def over_heads(self, heads: int) -> int:
        """What the sum over heads is divided by."""
        return heads if self.objective.config.reduction == "mean" else 1

    def differentiated(
        self, row: QueryKey, outer: Tensor, *, of_query: bool = False, of_key: bool = False
    ) -> Differentiated:
        """Losses and gradients of one call, with `outer` [1, b, h]."""
        tokens = row.query[None], row.key[None]
        return differentiate(self.matcher, *tokens, *_masks(row), [row.name], outer, of_query=of_query, of_key=of_key)


class _Layer:
    """What the backward of one call needs beside its queries and keys."""

    def __init__(
        self,
        stream: Stream,
        record: QueryKey,
        places: Places | None,
        acting: Tensor | None,
        way_back: "_WayBack | None",
    ) -> None:
        self.stream = stream
        self.name = record.name
        self.weight: Weight = 0.0  # told when the term is made
        self.wanted = record.query.requires_grad, record.key.requires_grad
        self.masks, self.segments = (record.query_mask, record.key_mask), record.segments
        self.places, self.acting = places, acting
        self.way_back = way_back
        self.balance: Balance | None = None
        self.meets: list[Meet | None] = [None, None]
        sources = record.query_source, record.key_source
        self.sources = [None if source is None else (source.weight, source.start) for source in sources]

    def expect(self, record: QueryKey, balance: Balance, *, through: bool) -> None:
        """In an update that is looked at: alignment's gradients are to be held against the task's."""
        self.balance = balance
        sides = (record.query, record.query_source), (record.key, record.key_source)
        self.meets = [balance.expect(tokens, source, through=through) for tokens, source in sides]

    def of_rows(self, weights: Tensor | None) -> Tensor | None:
        """The weights of samples as those of what was matched: documents, where they were packed."""
        if weights is None or self.segments is None:
            return weights
        nothing = torch.zeros(self.segments.shape, device=weights.device)[:, None, :, None]
        return QueryKey(nothing, nothing, *self.masks, self.segments, weights).unpacked().sample_weight

    def gradients(
        self, query: Tensor, key: Tensor, sources: Sequence[Tensor], outer: Tensor
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Of queries and keys or their projections, weighted; and of networks, by id. `outer` [b] is the losses'."""
        stream = self.stream
        acts = not is_nothing(self.weight)  # else the model's own gradients are untouched to the last bit
        sides = [side.detach().requires_grad_(acts and w) for side, w in zip((query, key), self.wanted, strict=True)]
        with torch.enable_grad():
            record = QueryKey(sides[0], sides[1], *self.masks, self.segments, name=self.name)
            row = thinned(record.unpacked(), self.places)
        heads, length = row.query.shape[1:3]
        over_heads = stream.over_heads(heads)
        # A token's gradient is brought to about one: on its way it may be in fp16, where 1e-7 is nothing.
        largest = outer.abs().amax()
        largest = torch.where(largest > 0, largest, torch.ones_like(largest))
        scale = 2.0 ** round(math.log2(length * over_heads))
        each = (outer / largest * (scale / over_heads))[None, :, None].expand(1, -1, heads)
        with _unasked(stream.matcher):  # figures for the logs were told with the losses
            found = stream.differentiated(
                row,
                each if self.acting is None else each * self.acting,
                of_query=row.query.requires_grad,
                of_key=row.key.requires_grad,
            )
        of_row = tuple(None if one is None else Slice(one, 0) for one in (found.query, found.key))
        taken = [None if one is None else one.alone() for one in through_unpacking(record, row, of_row)]
        factor = largest / scale
        weight = self.weight.to(outer.device) if isinstance(self.weight, Tensor) else self.weight
        weighted = factor * weight
        for side, gradient in enumerate(taken):
            meet, source = self.meets[side], self.sources[side]
            if meet is not None and gradient is not None:
                known = None if source is None else Source(*source, sources[side])
                meet(at_least_single(gradient) * factor, weight, known)
        handed = taken if self.way_back is None else self.way_back.take(taken, self.name, self.balance)
        of_networks = weighted if stream.objective.weighs_networks else factor
        networks = zip(stream.matcher.parameters(), found.networks, strict=True)
        return (
            [None if g is None else (at_least_single(g) * weighted).to(g.dtype) for g in handed],
            {id(parameter): gradient * of_networks for parameter, gradient in networks if gradient is not None},
        )


@dataclass(frozen=True)
class _WayBack:
    """From queries and keys to what their projections put out, in the graph: it holds none of their numbers."""

    tokens: tuple[GradientEdge | None, GradientEdge | None]
    outputs: list[GradientEdge]
    are_compiled: bool

    @classmethod
    def of(cls, record: QueryKey) -> "_WayBack":
        sides = record.query, record.key
        edges = [get_gradient_edge(side) if side.requires_grad else None for side in sides]
        outputs = [get_gradient_edge(p.output) for p in reachable(record)]
        compiled = any(side.requires_grad and is_compiled_output(side) for side in sides)
        return cls((edges[0], edges[1]), outputs, compiled)

    def take(self, gradients: Sequence[Tensor | None], name: str, balance: Balance | None) -> list[Tensor | None]:
        """The gradients of those outputs."""
        pairs = [(e, g) for e, g in zip(self.tokens, gradients, strict=True) if e is not None and g is not None]
        if not pairs or not self.outputs:
            return [None] * len(self.outputs)
        edges, given = zip(*pairs, strict=True)
        if balance is not None:
            balance.paused = True  # the way back calls hooks too
        try:
            taken = torch.autograd.grad(edges, self.outputs, given, retain_graph=True, allow_unused=True)
        finally:
            if balance is not None:
                balance.paused = False
        if self.are_compiled and all(one is None for one in taken):
            raise CaptureError(COMPILED_PROJECTIONS.format(name))
        return list(taken)


class _Match(torch.autograd.Function):
    """The losses of a call, which were computed before. Its backward computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer | None,  # None: a checkpoint computes the call again
        losses: Tensor,
        sources: tuple[Tensor, ...],  # of copies of queries and keys
        twins: int,
        query: Tensor,
        key: Tensor,
        *others: Tensor,  # twins, and parameters of networks
    ) -> Tensor:
        ctx.save_for_backward(query, key, *sources)
        ctx.layer, ctx.twins = layer, twins
        ctx.others = [id(other) for other in others]
        with apart():
            return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        query, key, *sources = ctx.saved_tensors
        of_model, of_networks = ctx.layer.gradients(query, key, sources, outer[0])
        of_parameters = [of_networks.get(parameter) for parameter in ctx.others[ctx.twins :]]
        if ctx.layer.way_back is not None:
            of_model = [None, None, *of_model]
        return None, None, None, None, *of_model, *of_parameters


class _Weigh(torch.autograd.Function):
    """The total times the weight, which acts on queries and keys and not on networks: it is put in at each call."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Weight) -> Tensor:
        return total * weight

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def refuse_compiled_code() -> None:
    """Called, not traced: an error while tracing only leaves the caller uncompiled, and nobody is told."""
    raise ConfigError(COMPILED)


def _masks(row: QueryKey) -> tuple[Tensor | None, Tensor | None]:
    """With an axis for the layer; one mask for both sides stays one."""
    query_mask = None if row.query_mask is None else row.query_mask[None]
    if row.key_mask is row.query_mask:
        return query_mask, query_mask
    return query_mask, None if row.key_mask is None else row.key_mask[None]


@contextmanager
def _frozen(networks: nn.Module) -> Iterator[None]:
    """Nobody learns: values are wanted, and no gradients."""
    learning = [parameter for parameter in networks.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


@contextmanager
def _unasked(matcher: Matcher) -> Iterator[None]:
    asked, matcher.asked = matcher.asked, False
    try:
        yield
    finally:
        matcher.asked = asked
