"""In compiled code: the whole matching as one operator, which torch calls and does not look into.

Traced, the networks and matrices of a matching would become code of torch's making, which holds them in memory, and
cannot decide anything by what it computes. As an operator it is what it is elsewhere: kernels,
records that are replayed, heads left alone, tokens drawn anew. What it hands to the backward are gradients that are
known already.

    alignattn::gradients: queries, keys, networks -> total, parts [labels], scale, scale * gradients of all of them
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from alignattn.balance import Weight
from alignattn.capture import QueryKey
from alignattn.delivery import COMPILED, Delivery, scale_gradient
from alignattn.errors import AlignmentError, CaptureError
from alignattn.objective import Forwards, Parts, is_nothing, label_of
from alignattn.precision import at_least_single

# Within an operator torch leaves autograd out. Outside of all operators it does not, as when this is imported.
_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
# It records and replays CUDA graphs itself, which cannot be part of another; older torch has no word for it.
_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


class Matching(Protocol):
    """What an operator calls, when it runs."""

    def run(self, forwards: Forwards) -> tuple[Tensor, Parts, float, Delivery]:
        """The loss with weight one, each layer's part, what brought gradients to about one, and whose these are."""

    def learnt(self, forwards: Forwards) -> list[Tensor]:
        """What networks of these layers learn, in an order that stays."""

    failed: Callable[[], None] | None  # called where it raised: nothing that tracing noted is written down then


_matchings: "weakref.WeakValueDictionary[str, Matching]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


def known_as(matching: Matching) -> str:
    """A name by which the operator finds it."""
    name = str(next(_numbers))
    _matchings[name] = matching
    return name


def term_of(
    name: str,
    forwards: Forwards,
    weight: Weight,
    parameters: Sequence[Tensor],
    *,
    weighs_networks: bool,
    generator: str,
) -> tuple[Tensor, Parts]:
    """The weighted term of what was recorded, and each layer's part; by the matching of this name, when it runs."""
    records = [record for some in forwards for record in some]
    if generator == "projections":
        raise CaptureError(COMPILED.format(records[0].name))
    tokens = [record.query for record in records] + [record.key for record in records]
    if is_nothing(weight):  # then the model's own gradients are untouched to the last bit
        tokens = [side.detach() for side in tokens]
    elif not weighs_networks:
        tokens = [scale_gradient(side, weight) for side in tokens]
    total, parts, *_ = torch.ops.alignattn.gradients(
        name,
        "\n".join(record.name for record in records),
        [record.call for record in records],
        [len(some) for some in forwards],
        tokens,
        [tensor for record in records for tensor in _beside(record)],
        [one.requires_grad for one in (*tokens, *parameters)],
        list(parameters),
    )
    labels = dict.fromkeys(label_of(record) for record in records)
    by_label = dict(zip(labels, parts.detach().unbind(), strict=True))
    if weighs_networks:
        return weight * total, by_label
    return total + ((weight - 1) * total).detach(), by_label


def _beside(record: QueryKey) -> tuple[Tensor | None, ...]:
    """What an operator is told of a call, beside its queries and keys."""
    masks, edges = (record.query_mask, record.key_mask), record.edges or (None, None)
    return *masks, record.segments, record.sample_weight, record.key_output, *edges


def _record(name: str, call: int, query: Tensor, key: Tensor, beside: Sequence[Tensor | None]) -> QueryKey:
    query_mask, key_mask, segments, sample_weight, key_output, *edges = beside
    along = None if edges[0] is None or edges[1] is None else (edges[0], edges[1])
    return QueryKey(
        query, key, query_mask, key_mask, segments, sample_weight, name, call, key_output=key_output, edges=along
    )


def _match(
    matching: str,
    names: str,
    calls: Sequence[int],
    counts: Sequence[int],
    tokens: Sequence[Tensor],
    beside: Sequence[Tensor | None],
    wanted: Sequence[bool],
    parameters: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    owner, number = _matchings.get(matching), len(calls)
    if owner is None:
        raise AlignmentError("The alignment that this code was compiled for is gone. Compile the model anew.")
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE), torch.enable_grad(), _telling(owner):
        leaves = [side.detach().requires_grad_(wants) for side, wants in zip(tokens, wanted, strict=False)]
        each = len(beside) // number
        records = iter(
            _record(name, calls[at], leaves[at], leaves[number + at], beside[each * at : each * (at + 1)])
            for at, name in enumerate(names.split("\n"))
        )
        forwards = [list(itertools.islice(records, count)) for count in counts]
        total, parts, scale, handed = owner.run(forwards)
        # The networks' own: what an operator is given takes no gradients.
        targets = leaves + [own for own, _ in zip(owner.learnt(forwards), parameters, strict=True)]
    kind = _kind(tokens)
    with torch.no_grad():
        values = torch.stack([part.detach().to(kind) for part in parts.values()])
        gradients = _apart(targets, handed)
        return total.detach().to(kind, copy=True), values, values.new_full((), scale), gradients


@contextmanager
def _telling(owner: Matching) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if owner.failed is not None:
            owner.failed()
        raise


def _like(*given: Any) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Outputs of the right shapes, without computing them."""
    _, names, calls, _, tokens, _, wanted, parameters = given
    number = tokens[0].new_empty((), dtype=_kind(tokens))
    labels = set(zip(names.split("\n"), calls, strict=True))
    # Told, not asked: while code is made for it, tensors that stand for others do not know what these require.
    targets = zip((*tokens, *parameters), wanted, strict=True)
    gradients = [_room_for(one) if wants else one.new_empty(0) for one, wants in targets]
    return number, number.new_empty(len(labels)), number.new_empty(()), gradients


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    _, _, scale, gradients = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scale, *gradients)
    # A gradient is asked for of what is a tensor or a list of nothing else.
    lists = (
        part if isinstance(part, list) and all(isinstance(one, Tensor) for one in part) else None for part in inputs
    )
    ctx.counts = [None if one is None else len(one) for one in lists]


def _backward(ctx: Any, of_total: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients that are known, times what the total got."""
    scale, *gradients = ctx.saved_tensors
    handed: list[Tensor | None] = [None] * len(gradients)
    if of_total is not None:
        factor = of_total / scale
        handed = [(at_least_single(g) * factor).to(g.dtype) if g.numel() else None for g in gradients]
    answers: list[Any] = [None if count is None else [None] * count for count in ctx.counts]
    tokens = ctx.counts[TOKENS]
    answers[TOKENS], answers[-1] = handed[:tokens], handed[tokens:]
    return tuple(answers)


TOKENS = 4  # which of the operator's arguments they are
SCHEMA = (
    "(str matching, str names, int[] calls, int[] counts, Tensor[] tokens, Tensor?[] beside, bool[] wanted, "
    "Tensor[] parameters) -> (Tensor, Tensor, Tensor, Tensor[])"
)

# Torch keeps compiled code on disk and finds it by this name: with another layout of outputs, it must be another.
_operator = torch.library.custom_op("alignattn::gradients", _match, mutates_args=(), schema=SCHEMA, **_TAGS)
_operator.register_fake(_like)
_operator.register_autograd(_backward, setup_context=_keep)


def _kind(tokens: Sequence[Tensor]) -> torch.dtype:
    """Of losses: single precision at least."""
    return torch.promote_types(tokens[0].dtype, torch.float32)


def _room_for(target: Tensor) -> Tensor:
    """For its gradient, without gaps, the heads of a token beside each other where they are so: said, and not left to
    torch, as compiled code counts on it.
    """
    if target.ndim == 4 and target.transpose(1, 2).is_contiguous():
        _, heads, tokens, width = target.shape
        return target.new_empty_strided(target.shape, (tokens * heads * width, width, heads * width, 1))
    return target.new_empty(target.shape)


def _apart(targets: list[Tensor], handed: Delivery) -> list[Tensor]:
    """Each gradient in memory of its own, as an operator's outputs must be."""
    given: dict[int, Tensor] = {}
    for target, gradient in handed.known():
        before = given.get(id(target))
        given[id(target)] = gradient if before is None else before + gradient
    gradients = [_room_for(target) if target.requires_grad else target.new_empty(0) for target in targets]
    filled: list[tuple[Tensor, Tensor]] = []
    for target, room in zip(targets, gradients, strict=True):
        if (known := given.get(id(target))) is None:
            room.zero_()
        else:
            filled.append((room, known))
    if filled:
        torch._foreach_copy_([room for room, _ in filled], [known for _, known in filled])
    return gradients
