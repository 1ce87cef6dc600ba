"""Gradients that are known already, handed to whom they belong when the backward comes by.

With `generator="model"` those of queries and keys go to queries and keys, and on through the whole model. With
`"projections"` they are taken back to what the layer's projections put out, within that layer, and given to the twins
of those outputs: they reach the projections' parameters and stop there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from alignattn.balance import Balance, MeetHanded, Weight, norms
from alignattn.capture import Projected, QueryKey, Source
from alignattn.capture.hook import is_compiled_backward, is_compiled_output
from alignattn.capture.standin import stand_in
from alignattn.consumed import is_consumed
from alignattn.errors import CaptureError
from alignattn.precision import at_least_single, has_kernel, times
from alignattn.replay import InPlace, Lease

COMPILED = (
    "{}: in a compiled model autograd does not see the way from queries and keys back to their projections. Use "
    "generator='model' with torch.compile."
)


class Slice(NamedTuple):
    """A gradient that is one of many, computed together: on its way it costs nothing of its own."""

    whole: Tensor
    at: int
    ours: bool = False  # memory that alignment made for it: autograd may have handed out one tensor for two
    lent: bool = False  # by a record, whose next replay writes over it
    record: InPlace | None = None  # that multiplies all of them where they lie

    def alone(self) -> Tensor:
        """The gradient itself."""
        return self.whole[self.at]


class _Met:
    """Who looks at gradients that were computed together, times `scale`."""

    def __init__(self, whole: Tensor, scale: float) -> None:
        self.norms = norms(whole) / scale
        self.meets: list[tuple[int, MeetHanded]] = []  # each with which of them it looks at

    def tell(self, outer: Tensor, handed: Sequence[Tensor] | None) -> None:
        """They are handed on, themselves or further back, with the factor that the whole loss got."""
        known = (self.norms * outer.to(self.norms.device)).unbind()
        for at, meet in self.meets:
            meet(known[at], None if handed is None else handed[at])


class Delivery:
    """Gathers targets and what they are to be handed; `term` gives a number whose backward does so.

    `alone`: gradients may arrive without the task's, which else they are added to, and whoever asks for them gets them.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self._alone = alone
        self.leases: list[Lease] = []  # of gradients that are lent until they are handed on
        self._targets: list[Tensor] = []
        self._places: list[tuple[int, int | None]] = []  # of each target: which whole, and where in it
        self._spared: set[int] = set()  # wholes that must not be written over
        # By id: their number, the factor of each, and what multiplies it, if anything is known to.
        self._wholes: dict[int, tuple[int, Tensor, Weight, InPlace | None]] = {}
        self._met: dict[int, tuple[Tensor, _Met]] = {}  # by id too
        self._told: list[Callable[[Tensor], None]] = []  # told the factor that the whole loss got

    def to(self, target: Tensor, gradient: Tensor | Slice, factor: Weight) -> None:
        """`target` is to get `factor` times the gradient. Factors that are one object are multiplied with once."""
        if isinstance(gradient, Slice):
            self._to_parts([(target, gradient.at)], gradient, factor)
        else:
            number = self._number_of(gradient, factor, None)
            self._spared.add(number)
            self._targets.append(target)
            self._places.append((number, None))

    def to_layers(self, records: Sequence[QueryKey], gradients: Slice, factor: Weight) -> None:
        """The queries, and then the keys, of all these are to get their parts of what was computed together."""
        tokens = [record.query for record in records] + [record.key for record in records]
        self._to_parts([(side, at) for at, side in enumerate(tokens) if side.requires_grad], gradients, factor)

    def _to_parts(self, targets: Sequence[tuple[Tensor, int]], of: Slice, factor: Weight) -> None:
        number = self._number_of(of.whole, factor, of.record)
        may_keep = of.lent and self._alone
        if number not in self._spared and (not of.ours or may_keep):
            self._spared.add(number)
        for target, at in targets:
            if of.lent and number not in self._spared and not is_consumed(target):
                self._spared.add(number)
            self._targets.append(target)
            self._places.append((number, at))

    def _number_of(self, whole: Tensor, factor: Weight, record: InPlace | None) -> int:
        known = self._wholes.get(id(whole))
        if known is None:
            known = self._wholes[id(whole)] = (len(self._wholes), whole, factor, record)
        assert known[2] is factor
        return known[0]

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
        of_query = of_query if record.query.requires_grad else None
        of_key = of_key if record.key.requires_grad else None
        through = generator == "model"
        if through:
            for tokens, own in ((record.query, of_query), (record.key, of_key)):
                if own is not None:
                    self.to(tokens if record.kept else stand_in(tokens), own, factor)
        else:
            pairs = ((record.query, of_query), (record.key, of_key))
            known = [(tokens, own.alone()) for tokens, own in pairs if own is not None]
            for target, back in _taken_back(record, known):
                self.to(target, back, factor)
        if balance is not None:
            self.watch(record, of_query, of_key, weight, scale=scale, through=through, balance=balance)

    def watch(
        self,
        record: QueryKey,
        of_query: Slice | None,
        of_key: Slice | None,
        weight: Weight,
        *,
        scale: float,
        through: bool,
        balance: Balance,
    ) -> None:
        """The gradients of its queries and keys, which are handed to them or to their projections, are looked at."""
        sides = ((record.query, record.query_source, of_query), (record.key, record.key_source, of_key))
        for tokens, source, gradient in sides:  # from here on: the way back, above, calls hooks too
            if gradient is not None and source is not None:
                self._watch_copies(tokens, source, gradient.alone(), weight, scale=scale, balance=balance)
            elif gradient is not None:
                self._watch(gradient, balance.expect_handed(tokens, through=through), scale=scale)

    def _watch(self, gradient: Slice, meet: MeetHanded | None, *, scale: float) -> None:
        whole = gradient.whole
        if meet is not None:
            if id(whole) not in self._met:
                self._met[id(whole)] = whole, _Met(whole, scale)
            self._met[id(whole)][1].meets.append((gradient.at, meet))

    def _watch_copies(
        self, tokens: Tensor, source: Source, gradient: Tensor, weight: Weight, *, scale: float, balance: Balance
    ) -> None:
        meet = balance.expect(tokens, source, through=False)
        if meet is not None:  # in fp16 a gradient vanishes without the scale and a scaler's factor
            self._told.append(
                lambda outer: meet(at_least_single(gradient) * (outer / scale).to(gradient.device), weight, source)
            )

    def known(self) -> list[tuple[Tensor, Tensor]]:
        """Each target, and what it is to be handed, without its factor and only as long as leases are held."""
        wholes = [whole for _, whole, _, _ in self._wholes.values()]
        cut = {number for number, at in self._places if at is not None}
        parts = {number: wholes[number].unbind() for number in cut}
        given = (wholes[number] if at is None else parts[number][at] for number, at in self._places)
        return list(zip(self._targets, given, strict=True))

    def term(self, weight: Weight, values: Tensor) -> Tensor:
        """The weighted sum of these values, whose backward hands out the gradients."""
        wholes = [whole for _, whole, _, _ in self._wholes.values()]
        factors = [(factor, record) for _, _, factor, record in self._wholes.values()]
        met = [(self._wholes[key][0] if key in self._wholes else None, one) for key, (_, one) in self._met.items()]
        looks = met, self._told
        places = self._places, self._spared
        term: Tensor = _Deliver.apply(weight, values, wholes, factors, places, looks, self.leases, *self._targets)
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
        weight: Weight,
        values: Tensor,
        wholes: list[Tensor],
        factors: list[tuple[Weight, InPlace | None]],  # of each whole, and what multiplies it
        places: tuple[list[tuple[int, int | None]], set[int]],  # of targets in wholes; wholes to be spared
        looks: tuple[list[tuple[int | None, _Met]], list[Callable[[Tensor], None]]],
        leases: list[Lease],
        *targets: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*wholes)  # freed by the backward, however long the loss is kept
        ctx.factors, (ctx.places, ctx.spared), ctx.looks, ctx.leases = factors, places, looks, leases
        return weight * values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        again = _comes_again()
        cut = {which for which, at in ctx.places if at is not None}
        over = set() if again or is_compiled_backward() else cut - ctx.spared
        (met, told), ctx.looks = ctx.looks, ((), ())
        for tell in told:  # of gradients as they were
            tell(outer[0])
        scaled = _scaled(ctx.saved_tensors, ctx.factors, outer[0], cut, over)
        for which, one in met:
            one.tell(outer[0], None if which is None else scaled[which])
        if over and ctx.leases:  # nothing is lent any more once all have consumed what they were handed
            Variable._execution_engine.queue_callback(ctx.leases.clear)
        elif not again:
            ctx.leases.clear()
        handed = (scaled[which] if at is None else scaled[which][at] for which, at in ctx.places)
        return *[None] * 7, *handed


def _comes_again() -> bool:
    """Whether the backward under way keeps its graph (retain_graph=True), and may be followed by another."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _scaled(
    wholes: Sequence[Tensor],
    factors: list[tuple[Weight, InPlace | None]],
    outer: Tensor,
    cut: set[int],
    over: set[int],
) -> list[Any]:
    """Each whole times its factor and `outer`, all of one kind at once; those that are `cut`, as their parts.

    Some are written `over`: another as large would show in what a step needs.
    """
    kinds: dict[Any, list[int]] = {}
    scaled: list[Any] = [None] * len(wholes)
    for number, (whole, (factor, record)) in enumerate(zip(wholes, factors, strict=True)):
        if number in over and record is not None:
            record.multiply((outer * factor).to(whole.device))
            scaled[number] = record.parts
        else:
            kinds.setdefault((id(factor), whole.device, whole.dtype, number in over), []).append(number)
    for (_, device, dtype, in_place), numbers in kinds.items():
        by = (outer * factors[numbers[0]][0]).to(device)
        some = [wholes[number] for number in numbers]
        if dtype in (torch.float32, torch.float64):
            if in_place:
                torch._foreach_mul_(some, by)
            products = some if in_place else torch._foreach_mul(some, by)
            for number, product in zip(numbers, products, strict=True):
                scaled[number] = product.unbind() if number in cut else product
        else:
            for number, whole in zip(numbers, some, strict=True):
                if number in cut and not has_kernel(whole):  # of all at once, copies in single precision would show
                    scaled[number] = [times(part, by, part if in_place else None) for part in whole.unbind()]
                else:
                    product = times(whole, by, whole if in_place else None)
                    scaled[number] = product.unbind() if number in cut else product
    return scaled


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
