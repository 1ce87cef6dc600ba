"""Losses and their gradients at once, a few layers at a time, or a few samples of one, or a few heads.

Problems know nothing of each other. So a matching can be differentiated piece by piece, before the model's own
backward: what a piece needs in memory is free before the next begins, and on a CPU a piece stays in cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.func import functional_call

from alignattn.matching import scratch
from alignattn.matching.matcher import Matcher

# Numbers in the queries and keys of a piece. A CPU wants them, and what is computed of them, in cache; an accelerator
# wants few launches, and little memory beside the model's.
PIECE = {"cpu": 2**20}
LARGEST_PIECE = 5 * 2**22
LONG, LONG_PIECE = 2048, 2**22  # tokens of a problem that fills an accelerator with few others, and then

Piece = tuple[slice, slice, slice]  # of calls, of samples, of heads
Look = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass(frozen=True)
class Differentiated:
    """Losses of all problems, and the gradients of their weighted sum."""

    losses: Float[Tensor, "l b h"]
    query: Float[Tensor, "l b h n d"] | None
    key: Float[Tensor, "l b h m d"] | None
    networks: list[Tensor | None]  # in the order of matcher.parameters()
    witness: Float[Tensor, "l b h"] | None = None  # not finite where queries or keys are not
    ours: bool = False  # nobody else holds the gradients of queries and keys: they may be written over


def differentiate(
    matcher: Matcher,
    query: Float[Tensor, "l b h n d"],
    key: Float[Tensor, "l b h m d"],
    query_mask: Bool[Tensor, "l b n"] | None,
    key_mask: Bool[Tensor, "l b m"] | None,
    names: list[str],
    outer: Float[Tensor, "l b h"],
    *,
    of_query: bool = True,
    of_key: bool = True,
    in_place: bool = False,
    look: Look | None = None,
) -> Differentiated:
    """As `matcher(query, key, ...)` and a backward with `outer` would.

    None stands for gradients that are not wanted, or do not depend on what they are of. `in_place`: nobody needs the
    queries and keys any more, and their gradients are written over them. `look` tells of queries, keys and masks
    numbers [l] that are not finite where theirs are not; it is asked where the matcher does not find out by itself.
    """
    networks = _Networks(matcher)
    leaves_nothing = matcher.leaves_nothing()
    tokens = ((query, of_query), (key, of_key))
    of_tokens: list[Tensor | None] = [None, None]
    losses: Tensor | None = None
    finite_in = torch.promote_types(query.dtype, outer.dtype)  # what is finite in double precision may not be in single
    witness = None if look is None else query.new_empty(query.shape[:3], dtype=finite_in)
    for piece in _pieces(matcher, query, key):
        leaves = [side[piece].detach().requires_grad_(want) for side, want in tokens]
        masks = [None if mask is None else mask[piece[:2]] for mask in (query_mask, key_mask)]
        masks[1] = masks[0] if key_mask is query_mask else masks[1]
        layers = names[piece[0]]
        # The backward too: a user's autocast would take its products to half precision.
        as_ever = torch.autocast(query.device.type, enabled=False)
        # One that could not be cut to size, a whole graph for one, would hold on to as much while the model runs.
        reuses = leaves_nothing and sum(leaf.numel() for leaf in leaves) <= PIECE["cpu"]
        with (
            matcher.scratch.piece(reuses=reuses),
            matcher.giving_up(tokens=in_place),
            torch.enable_grad(),
            as_ever,
            networks.of(layers, query) as own,
        ):
            given = (leaves[0], leaves[1], masks[0], masks[1], layers)
            values: Tensor = functional_call(matcher, own, given) if own else matcher(*given)
            losses = values.new_empty(outer.shape, requires_grad=False) if losses is None else losses
            losses[piece] = values.detach()
            if look is not None and witness is not None:
                counted = (matcher.counted(mask) for mask in masks)
                seen = matcher.scales
                witness[piece] = look(*leaves, *counted)[:, None, None] if seen is None else seen.view_as(values)
            learning = {name: parameter for name, parameter in own.items() if parameter.requires_grad}
            of = [*(leaf for leaf in leaves if leaf.requires_grad), *learning.values()]
            arrived = iter(_gradients(values, of, outer[piece]))
        for side, (whole, want) in enumerate(tokens):
            gradient = next(arrived) if want else None
            if gradient is not None:
                of_tokens[side] = _with_piece(of_tokens[side], piece, gradient, like=whole, in_place=in_place)
            elif want and in_place:
                whole[piece] = 0.0
        networks.add(learning, arrived)
    assert losses is not None  # there is a piece at least
    ours = in_place or (leaves_nothing and _are_apart(*of_tokens))
    return Differentiated(losses, of_tokens[0], of_tokens[1], networks.gradients(), witness, ours)


class _Networks:
    """What a matcher learns, as a piece is given it, and its gradients so far.

    Of weights that are rows of a bank a piece is given those of its layers. Given all, autograd would make zeros of the
    others and add them up: small steps, and in the end more of them than of all else.
    """

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        # Not the parameters themselves: what autograd keeps for those belongs to a stream, and may be the user's.
        self._parameters = {name: parameter.detach() for name, parameter in matcher.named_parameters()}
        self._learning = {name for name, parameter in matcher.named_parameters() if parameter.requires_grad}
        self._sums: dict[str, Tensor] = {}
        self._rows: slice | None = None

    @contextmanager
    def of(self, layers: list[str], query: Tensor) -> Iterator[dict[str, Tensor]]:
        """Within it the matcher is to be called with these in place of its own."""
        begin, self._rows = self._matcher.rows_of(layers, query.shape[-1]) or ("", None)
        given = {name: p for name, p in self._parameters.items() if name.startswith(begin)}
        if self._rows is not None:
            given = {name: p[self._rows] for name, p in given.items()}
        with self._matcher.narrowed(to_rows=self._rows is not None):
            yield {name: p.detach().requires_grad_(name in self._learning) for name, p in given.items()}

    def add(self, names: Iterable[str], gradients: Iterable[Tensor | None]) -> None:
        """What came of a piece; None where nothing did."""
        came = {name: one for name, one in zip(names, gradients, strict=True) if one is not None}
        parts = {name: one for name, one in came.items() if one.shape != self._parameters[name].shape}
        for name in came.keys() - parts.keys():
            sofar = self._sums.get(name)
            self._sums[name] = came[name] if sofar is None else sofar + came[name]  # autograd may hand out one for two
        if not parts:
            return
        assert self._rows is not None
        for name in parts.keys() - self._sums.keys():
            self._sums[name] = torch.zeros_like(self._parameters[name])
        torch._foreach_add_([self._sums[name][self._rows] for name in parts], list(parts.values()))

    def gradients(self) -> list[Tensor | None]:
        """In the order of matcher.parameters()."""
        return [self._sums.get(name) for name in self._parameters]


def _gradients(values: Tensor, of: list[Tensor], outer: Tensor) -> Sequence[Tensor | None]:
    if not of or not values.requires_grad:
        return [None] * len(of)
    found = torch.autograd.grad(values, of, outer.to(values), allow_unused=True)
    return [None if gradient is None else scratch.outliving(gradient) for gradient in found]


def _with_piece(sofar: Tensor | None, piece: Piece, gradient: Tensor, *, like: Tensor, in_place: bool) -> Tensor:
    """Zeros where no gradient has come."""
    if in_place:
        if not _are_one(gradient, like[piece]):  # a matcher may have written it there (scale.py)
            like[piece] = gradient
        return like
    if sofar is None and gradient.shape == like.shape:
        return gradient
    sofar = torch.zeros_like(like) if sofar is None else sofar
    sofar[piece] = gradient
    return sofar


def _are_one(one: Tensor, other: Tensor) -> bool:
    """Whether the numbers of both are the same places in memory."""
    layouts = [
        (side.dtype, side.data_ptr(), [axis for axis in zip(side.shape, side.stride(), strict=True) if axis[0] > 1])
        for side in (one, other)
    ]
    return layouts[0] == layouts[1]


def _are_apart(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether each number has a place of its own: autograd may hand out one tensor for two, or one number for many."""
    both = [side for side in (one, other) if side is not None]
    axes = (axis for side in both for axis in zip(side.shape, side.stride(), strict=True))
    return all(stride > 0 or size == 1 for size, stride in axes) and len({side.data_ptr() for side in both}) == len(
        both
    )


def added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum, None being nothing. Not in place: autograd may have handed out one tensor for two."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _pieces(matcher: Matcher, query: Tensor, key: Tensor) -> list[Piece]:
    """Of about one size: layers, which lie whole in memory; or samples of one, or heads of a sample."""
    counts = query.shape[:3]
    pieces: list[list[slice]] = [[slice(None)]] * 3
    if matcher.is_separable():
        size = PIECE.get(query.device.type, LONG_PIECE if query.shape[3] >= LONG else LARGEST_PIECE)
        within = query.numel() + key.numel()
        for axis in range(3 if matcher.is_separable_by_heads() else 2):
            one = within // counts[axis]
            pieces[axis] = _ranges(counts[axis], size // one)
            if one <= size:
                break
            within = one
    return list(product(*pieces))  # type: ignore[arg-type]


def _ranges(count: int, most: int) -> list[slice]:
    """All of so many, at most so many at a time."""
    step = max(1, min(count, most))
    step = -(-count // -(-count // step))
    return [slice(start, start + step) for start in range(0, count, step)]
