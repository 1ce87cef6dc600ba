"""Conditional transport of short problems, with both plans written out as matrices.

    scores S = navigator(q)·navigator(k),   similarities T = u(q)·u(k),   u = critic / |critic|
    loss = Σ A (1 - T) + Σ B (1 - T)

A is the softmax of S along its rows, B along its columns, times what a row and a column counts. With r the mean of T in
each row by its plan, and c that in each column, the gradients are

    of T:  -(A + B)          of S:  -(A (T - r) + B (T - c))

On a CPU the matrices of a few short problems fit its cache, and one S and one T serve both directions. The gradient
comes out of the pass that computes the value, so no matrix waits for the backward.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import scratch
from alignattn.matching.beside import room_for_both
from alignattn.matching.tokens import chunks_of, cleared, to_direction

LARGEST = 2**18  # numbers in a matrix: 512 × 512
HIDDEN = -1e30  # of padded tokens, in scores: beside any other, nothing


def serve(query: Tensor, key: Tensor) -> bool:
    """Whether matrices are the faster way. Compiled code can look into attention, and not into this."""
    short = query.shape[2] * key.shape[2] <= LARGEST
    return short and query.device.type == "cpu" and not torch.compiler.is_compiling()


def transport(
    critics: tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h m e"]],
    navigators: tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h m f"]],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
    *,
    largest: float,
) -> Float[Tensor, "b h"]:
    """Bidirectional cost of each problem; navigator features count up to `largest`."""
    losses: Tensor = _Transport.apply(*critics, *navigators, query_mask, key_mask, largest)
    return losses


class _Problems(NamedTuple):
    """Of some problems: what each side has of its tokens, queries before keys."""

    units: tuple[Float[Tensor, "p n e"], Float[Tensor, "p m e"]]
    navigators: tuple[Float[Tensor, "p n f"], Float[Tensor, "p m f"]]
    shares: tuple[Float[Tensor, "p n 1"], Float[Tensor, "p 1 m"]]  # what a token counts
    hidden: tuple[Float[Tensor, "p n 1"], Float[Tensor, "p 1 m"]] | None  # zero, or HIDDEN at padding

    def part(self, some: slice) -> "_Problems":
        return _Problems(*(None if pair is None else (pair[0][some], pair[1][some]) for pair in self))  # type: ignore[arg-type]


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        critic_query: Tensor,
        critic_key: Tensor,
        navigator_query: Tensor,
        navigator_key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        largest: float,
    ) -> Float[Tensor, "b h"]:
        given = critic_query, critic_key, navigator_query, navigator_key
        masks = query_mask, key_mask
        features = [cleared(side, mask).flatten(0, 1) for side, mask in zip(given, masks * 2, strict=True)]
        units, navigators = (features[0], features[1]), (features[2], features[3])
        lengths = [to_direction(side) for side in units]
        beyond = [_beyond(side, largest) for side in navigators]
        problems = _Problems(units, navigators, *_counted(given, masks, units[0].dtype))
        means = [torch.empty_like(share) for share in problems.shares]
        descents = [scratch.empty(side.shape, side) for side in features]
        count, n, m = len(units[0]), critic_query.shape[2], critic_key.shape[2]
        step = chunks_of(count, n * m, units[0].device)
        matrices = [scratch.empty((step, n, m), units[0]) for _ in range(4)]
        for start in range(0, count, step):
            part = slice(start, start + step)
            rooms = [matrix[: count - start] for matrix in matrices]
            _by_matrices(
                problems.part(part), rooms, [mean[part] for mean in means], [descent[part] for descent in descents]
            )
        for descent, unit, length in zip(descents, units, lengths, strict=False):
            along = torch.linalg.vecdot(descent, unit)[..., None]
            descent.addcmul_(unit, along, value=-1).div_(length)
        for descent, places in zip(descents[2:], beyond, strict=True):
            if places is not None:
                descent.masked_fill_(places, 0.0)
        ctx.save_for_backward(*descents)
        ctx.dtypes = [side.dtype for side in given]
        of_sides = [(share * (1 - mean)).sum((1, 2)) for share, mean in zip(problems.shares, means, strict=True)]
        return (of_sides[0] + of_sides[1]).view(critic_query.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        up = -outer[0][..., None, None]
        descents = [descent.unflatten(0, outer[0].shape) for descent in ctx.saved_tensors]
        critics, navigators = (room_for_both(descents[i], descents[i + 1], up.dtype) for i in (0, 2))
        handed = [
            torch.mul(descent, up, out=room).to(dtype)
            for descent, room, dtype in zip(descents, critics + navigators, ctx.dtypes, strict=True)
        ]
        return *handed, None, None, None


def _beyond(navigator: Float[Tensor, "p n f"], largest: float) -> Bool[Tensor, "p n f"] | None:
    """Clamp, in place; tells where, None being nowhere: then it was looked at, and not written."""
    if not torch.maximum(navigator.amax(), -navigator.amin()) > largest:
        return None
    places = navigator.abs() > largest
    navigator.clamp_(-largest, largest)
    return places


def _counted(
    given: tuple[Tensor, ...], masks: tuple[Tensor | None, Tensor | None], dtype: torch.dtype
) -> tuple[Any, Any]:
    """Shares, half of the loss on either side, and what hides padding; samples with an empty side count nothing."""
    samples, heads = given[0].shape[:2]
    valid = [
        given[0].new_ones(samples, side.shape[2], dtype=dtype) if mask is None else mask.to(dtype)
        for side, mask in zip(given, masks, strict=False)
    ]
    counts = [side.sum(-1, keepdim=True) for side in valid]
    alive = (counts[0] * counts[1]).sign() / 2
    shares = [alive * side / count.clamp_min(1) for side, count in zip(valid, counts, strict=True)]
    if masks == (None, None):
        return _along_matrices(shares, heads), None
    return _along_matrices(shares, heads), _along_matrices([HIDDEN * (1 - side) for side in valid], heads)


def _along_matrices(sides: list[Float[Tensor, "b _"]], heads: int) -> tuple[Tensor, ...]:
    """Of each problem a column, of what its queries have, and a row."""
    return tuple(side.repeat_interleave(heads, 0).unsqueeze(axis) for side, axis in zip(sides, (2, 1), strict=True))


def _by_matrices(problems: _Problems, rooms: list[Tensor], means: list[Tensor], descents: list[Tensor]) -> None:
    """Mean similarities, and the way down for units and navigators, are written where they are to be.

    Softmax is of powers of two: on CPUs those were measured at a third of exp.
    """
    units, navigators, shares, hidden = problems
    scores, similar, to_keys, spare = rooms  # (p, n, m)
    to_bits = 1 / math.log(2)
    if hidden is None:
        torch.bmm(navigators[0], navigators[1].mT, out=scores).mul_(to_bits)
    else:
        torch.baddbmm(hidden[1], navigators[0], navigators[1].mT, alpha=to_bits, out=scores).add_(hidden[0])
    torch.bmm(units[0], units[1].mT, out=similar)
    torch.sub(scores, scores.amax(2, keepdim=True), out=to_keys).exp2_()
    to_queries = scores.sub_(scores.amax(1, keepdim=True)).exp2_()
    for plan, share, mean, along in ((to_keys, shares[0], means[0], 2), (to_queries, shares[1], means[1], 1)):
        sums = plan.sum(along, keepdim=True)
        torch.div(torch.mul(plan, similar, out=spare).sum(along, keepdim=True), sums, out=mean)
        plan *= share / sums
    both = torch.add(to_keys, to_queries, out=spare)
    pull = similar.mul_(both).addcmul_(to_keys, means[0], value=-1).addcmul_(to_queries, means[1], value=-1)
    for matrix, pair, places in ((both, units, descents[:2]), (pull, navigators, descents[2:])):
        torch.bmm(matrix, pair[1], out=places[0])
        torch.bmm(matrix.mT, pair[0], out=places[1])
