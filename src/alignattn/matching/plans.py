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

from alignattn.matching.tokens import chunks_of, cleared, unit_and_length

LARGEST = 2**18  # numbers in a matrix: 512 × 512
MATRICES = 4  # that are in use together
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
    shares: tuple[Float[Tensor, "p n"], Float[Tensor, "p m"]]  # what a token counts
    hidden: tuple[Float[Tensor, "p n"], Float[Tensor, "p m"]] | None  # zero, or HIDDEN at padding

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
        units, lengths = zip(*(unit_and_length(side) for side in features[:2]), strict=True)
        beyond = [_beyond(side, largest) for side in features[2:]]
        problems = _Problems(units, (features[2], features[3]), *_counted(given, masks, features[0].dtype))
        losses = features[0].new_empty(len(features[0]))
        gradients = [torch.empty_like(side) for side in features]
        step = chunks_of(len(losses), MATRICES * critic_query.shape[2] * critic_key.shape[2], losses.device)
        for start in range(0, len(losses), step):
            part = slice(start, start + step)
            losses[part] = _by_matrices(problems.part(part), [gradient[part] for gradient in gradients])
        for gradient, unit, length in zip(gradients, units, lengths, strict=False):
            along = torch.linalg.vecdot(gradient, unit)[..., None]
            gradient.addcmul_(unit, along, value=-1).div_(length)
        for gradient, places in zip(gradients[2:], beyond, strict=True):
            if places is not None:
                gradient.masked_fill_(places, 0.0)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [side.dtype for side in given]
        return losses.view(critic_query.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        handed = [
            (gradient.unflatten(0, outer[0].shape) * outer[0][..., None, None]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
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
    shares = tuple(
        (alive * side / count.clamp_min(1)).repeat_interleave(heads, 0)
        for side, count in zip(valid, counts, strict=True)
    )
    if masks == (None, None):
        return shares, None
    return shares, tuple((HIDDEN * (1 - side)).repeat_interleave(heads, 0) for side in valid)


def _by_matrices(problems: _Problems, gradients: list[Tensor]) -> Float[Tensor, " p"]:
    """The losses of some problems; gradients of units and navigators are written where they are to be.

    Softmax is of powers of two: on CPUs those were measured at a third of exp.
    """
    units, navigators, shares, hidden = problems
    to_bits = 1 / math.log(2)
    if hidden is None:
        scores = (navigators[0] @ navigators[1].mT).mul_(to_bits)  # (p, n, m)
    else:
        scores = torch.baddbmm(hidden[1][:, None], navigators[0], navigators[1].mT, alpha=to_bits)
        scores += hidden[0][..., None]
    similar = units[0] @ units[1].mT
    plans = (scores - scores.amax(2, keepdim=True)).exp2_(), scores.sub_(scores.amax(1, keepdim=True)).exp2_()
    losses = torch.zeros_like(shares[0][:, 0])
    means = []
    for plan, share, along in ((plans[0], shares[0], 2), (plans[1], shares[1], 1)):
        sums = plan.sum(along)
        mean = (plan * similar).sum(along) / sums
        losses += torch.linalg.vecdot(share, 1 - mean)
        plan *= (share / sums).unsqueeze(along)
        means.append(mean.unsqueeze(along))
    both = plans[0] + plans[1]
    pull = similar.mul_(both).addcmul_(plans[0], means[0], value=-1).addcmul_(plans[1], means[1], value=-1)
    for matrix, pair, places in ((both, units, gradients[:2]), (pull, navigators, gradients[2:])):
        torch.bmm(matrix, pair[1], out=places[0])
        torch.bmm(matrix.mT, pair[0], out=places[1])
        for place in places:
            place.neg_()
    return losses
