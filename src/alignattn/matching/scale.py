"""Queries and keys of a problem on one scale.

    y = (x - mean) / deviation,    mean and deviation over the valid queries and keys of the problem

One number scales all axes, so the geometry of a problem stays. Gradients go through mean and scale: with those held
constant all methods, step by step, shrink queries and keys together, which brings them no closer on any scale and
takes attention its contrast. Departure from the paper, which feeds q and k as they are.

With g the gradient of y, of N valid tokens of width d, that of x is

    (g - (Σ g + y Σ g·y / d) / N) / deviation

which is written out here: autograd would keep and pass over a dozen copies of all tokens.

It is linear in g. Losses that come with their gradients (discrepancy.py, divergence.py) have only to multiply them, by
what each problem counts: kernels do so on this way, with 1/deviation, and not in a pass of its own.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import kernels, scratch
from alignattn.matching.beside import room_for_both
from alignattn.matching.tokens import cleared, told_apart, working

if TYPE_CHECKING:
    from alignattn.matching.kernels.scale import Kind

LEAST_VARIANCE = 1e-6  # a problem of one point stays where it is


class Way(NamedTuple):
    """Back from one scale, by kernels."""

    masks: tuple[Tensor | None, Tensor | None]
    kinds: tuple["Kind", "Kind"]  # of the queries and keys that came
    given_up: list[list[Tensor | None]]  # those of them that gradients may be written over, once: then none are left

    def back(
        self,
        gradients: tuple[Tensor, Tensor],
        kept: tuple[Tensor, ...],
        counts: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries and keys as they came, of those on one scale, each problem of which counts so much.

        `sums`: of those gradients, where whoever made them has added them up (kernels/scale.py).
        """
        from alignattn.matching.kernels import scale

        query, key, inverse, tokens = kept
        by = inverse if counts is None else inverse * counts
        # Two ways may lead back, of which autograd adds what comes: the second needs a place of its own.
        over = self.given_up.pop() if self.given_up else (None, None)
        places = [scale.place_of(kind, side, there) for kind, side, there in zip(self.kinds, kept, over, strict=False)]
        scale.backward(gradients, (query, key), *self.masks, by, tokens, places, sums)
        return places[0], places[1]


class OnOneScale(NamedTuple):
    """Queries and keys of some problems, of which each has its own scale."""

    query: Float[Tensor, "p h n d"]
    key: Float[Tensor, "p h m d"]
    inverse: Float[Tensor, "p h"]  # one over the deviation, a constant, which is NaN where a valid token is not finite
    came: tuple[Tensor, Tensor]  # queries and keys as they were before
    kept: tuple[Tensor, ...] = ()  # what the way back is to be given
    way: Way | None = None  # None: of plain code


def standardise(
    query: Float[Tensor, "p h n d"],
    key: Float[Tensor, "p h m d"],
    query_mask: Bool[Tensor, "p n"] | None,
    key_mask: Bool[Tensor, "p m"] | None,
) -> tuple[Float[Tensor, "p h n d"], Float[Tensor, "p h m d"]]:
    """Queries and keys of each problem minus their common mean, over their common deviation; zeros at padding."""
    scaled = on_one_scale(query, key, query_mask, key_mask)
    return scaled.query, scaled.key


def on_one_scale(
    query: Float[Tensor, "p h n d"],
    key: Float[Tensor, "p h m d"],
    query_mask: Bool[Tensor, "p n"] | None,
    key_mask: Bool[Tensor, "p m"] | None,
    *,
    given_up: bool = False,
) -> OnOneScale:
    """The same, and the scale. `given_up`: nobody else reads queries and keys, and gradients may be written there."""
    key_mask = told_apart(query_mask, key_mask)
    way = _way_of_kernels(query, key, query_mask, key_mask, given_up)
    found: tuple[Tensor, ...] = _Standardise.apply(query, key, query_mask, key_mask, way)
    kept = () if way is None else tuple(one.detach() for one in found)
    return OnOneScale(found[0], found[1], found[2], (query, key), kept, way)


def _way_of_kernels(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, given_up: bool
) -> Way | None:
    """None where they do not serve."""
    if not (kernels.serve(query, dtypes=kernels.SHORT) and kernels.serve(key, dtypes=kernels.SHORT)):
        return None
    from alignattn.matching.kernels import scale

    over = [side.detach() if side.requires_grad else None for side in (query, key)]
    return Way((query_mask, key_mask), (scale.kind_of(query), scale.kind_of(key)), [over] if given_up else [])


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, way: Way | None
    ) -> tuple[Tensor, ...]:
        ctx.dtypes, ctx.way = (query.dtype, key.dtype), way
        ctx.set_materialize_grads(False)  # the constants' are none
        if way is not None:
            from alignattn.matching.kernels import scale

            found = scale.forward(query, key, query_mask, key_mask, LEAST_VARIANCE)
            ctx.save_for_backward(*found)
            ctx.mark_non_differentiable(*found[2:])
            return found
        masks = query_mask, key_mask
        sides = room_for_both(query, key, working(query))
        for side, given, mask in zip(sides, (query, key), masks, strict=True):
            cleared(given, mask, side)
        valid = [_valid(side, mask) for side, mask in zip(sides, masks, strict=True)]  # (p or 1, 1, n, 1)
        count = (valid[0].sum(2, keepdim=True) + valid[1].sum(2, keepdim=True)).clamp_min(1.0)
        # Over the largest number squares stay finite.
        ends = [end for side in sides for end in (side.amax((2, 3), keepdim=True), -side.amin((2, 3), keepdim=True))]
        peak = torch.stack(ends).amax(0).clamp_min(1.0)  # (p, h, 1, 1)
        for side in sides:
            side /= peak
        # Twice: of many tokens that are one point far away the rounding of the mean would be all that is left.
        for _ in range(2):
            mean = (sides[0].sum(2, keepdim=True) + sides[1].sum(2, keepdim=True)) / count  # (p, h, 1, d)
            for side, there in zip(sides, valid, strict=True):
                side.addcmul_(there, mean, value=-1)
        squares = torch.zeros_like(peak)
        for side in sides:
            squares = squares + torch.linalg.vector_norm(side, dim=(2, 3), keepdim=True).square()
        variance = squares / (count * query.shape[-1]) + (LEAST_VARIANCE**0.5 / peak).square()
        inverse = torch.rsqrt(variance.clamp_min(torch.finfo(variance.dtype).tiny))
        for side in sides:
            side *= inverse
        ctx.save_for_backward(*sides, inverse / peak, count, *valid)
        ctx.masks = masks
        inverse = (inverse / peak)[..., 0, 0]
        ctx.mark_non_differentiable(inverse)
        return sides[0], sides[1], inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of = [
            torch.zeros_like(side) if g is None else g
            for g, side in zip(gradients, ctx.saved_tensors[:2], strict=False)
        ]
        if ctx.way is not None:
            return *ctx.way.back((of[0], of[1]), ctx.saved_tensors), None, None, None
        *sides, inverse, count = ctx.saved_tensors[:4]
        valid = ctx.saved_tensors[4:]
        given = [cleared(g, mask, torch.empty_like(side)) for g, mask, side in zip(of, ctx.masks, sides, strict=True)]
        total = given[0].sum(2, keepdim=True) + given[1].sum(2, keepdim=True)  # (p, h, 1, d)
        products = [
            torch.mul(g, y, out=scratch.empty(g.shape, g)).sum((2, 3), keepdim=True)  # (p, h, 1, 1)
            for g, y in zip(given, sides, strict=True)
        ]
        shared = total * inverse / count
        factor = (products[0] + products[1]) * inverse / (count * sides[0].shape[-1])
        for g, y, there in zip(given, sides, valid, strict=True):
            g.mul_(inverse).addcmul_(y, factor, value=-1).addcmul_(there, shared, value=-1)
        return given[0].to(ctx.dtypes[0]), given[1].to(ctx.dtypes[1]), None, None, None


def _valid(tokens: Tensor, mask: Tensor | None) -> Float[Tensor, "p 1 n 1"]:
    """One for each token that counts, zero for padding."""
    if mask is None:
        return tokens.new_ones(1, 1, tokens.shape[2], 1)
    return mask[:, None, :, None].to(tokens.dtype)
