"""Queries and keys of a problem on one scale.

    y = (x - mean) / deviation,    mean and deviation over the valid queries and keys of the problem

One number scales all axes, so the geometry of a problem stays. Gradients go through mean and scale: with those held
constant all methods, step by step, shrink queries and keys together, which brings them no closer on any scale and
takes attention its contrast. Departure from the paper, which feeds q and k as they are.

With g the gradient of y, of N valid tokens of width d, that of x is

    (g - (Σ g + y Σ g·y / d) / N) / deviation

which is written out here: autograd would keep and pass over a dozen copies of all tokens.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import kernels
from alignattn.matching.tokens import told_apart, upcast

LEAST_VARIANCE = 1e-6  # a problem of one point stays where it is


def standardise(
    query: Float[Tensor, "p h n d"],
    key: Float[Tensor, "p h m d"],
    query_mask: Bool[Tensor, "p n"] | None,
    key_mask: Bool[Tensor, "p m"] | None,
) -> tuple[Float[Tensor, "p h n d"], Float[Tensor, "p h m d"]]:
    """Queries and keys of each problem minus their common mean, over their common deviation; zeros at padding."""
    scaled: tuple[Tensor, Tensor] = _Standardise.apply(query, key, query_mask, told_apart(query_mask, key_mask))
    return scaled


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = query.dtype, key.dtype
        ctx.by_kernel = kernels.serve(query, dtypes=kernels.SHORT) and kernels.serve(key, dtypes=kernels.SHORT)
        if ctx.by_kernel:
            from alignattn.matching.kernels import scale

            ctx.masks = query_mask, key_mask
            found = scale.forward(query, key, query_mask, key_mask, LEAST_VARIANCE)
            ctx.save_for_backward(*found)
            return found[0], found[1]
        hidden = [None if mask is None else ~mask[:, None, :, None] for mask in (query_mask, key_mask)]
        sides = [_copied(side, absent) for side, absent in zip((query, key), hidden, strict=True)]
        # In double precision squares of the largest numbers stay finite. Apple's accelerators have none.
        wide = torch.float32 if query.device.type == "mps" else torch.float64
        count = (_count(query, query_mask) + _count(key, key_mask)).to(wide).clamp_min(1.0)  # (p or 1, 1, 1, 1)
        total = sides[0].sum(2, keepdim=True, dtype=wide) + sides[1].sum(2, keepdim=True, dtype=wide)
        mean = (total / count).to(sides[0].dtype)  # (p, h, 1, d)
        squares = torch.zeros((), dtype=wide, device=query.device)
        for side, absent in zip(sides, hidden, strict=True):
            side -= mean
            if absent is not None:
                side.masked_fill_(absent, 0.0)
            squares = squares + torch.linalg.vector_norm(side, dim=(2, 3), keepdim=True, dtype=wide).square()
        variance = squares / (count * query.shape[-1])
        inverse = torch.rsqrt(variance + LEAST_VARIANCE).to(mean.dtype)  # (p, h, 1, 1)
        for side in sides:
            side *= inverse
        ctx.save_for_backward(*sides, inverse, count, *(mask for mask in hidden if mask is not None))
        ctx.masked = [mask is not None for mask in hidden]
        return sides[0], sides[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.by_kernel:
            from alignattn.matching.kernels import scale

            query, key, inverse, counts = ctx.saved_tensors
            of = gradients[0], gradients[1]
            query_mask, key_mask = ctx.masks
            handed = scale.backward(of, (query, key), query_mask, key_mask, inverse, counts, ctx.dtypes)
            return *handed, None, None
        *sides, inverse, count = ctx.saved_tensors[:4]
        masks = iter(ctx.saved_tensors[4:])
        hidden = [next(masks) if masked else None for masked in ctx.masked]
        given = [
            g if absent is None else g.masked_fill(absent, 0.0) for g, absent in zip(gradients, hidden, strict=True)
        ]
        total = given[0].sum(2, keepdim=True) + given[1].sum(2, keepdim=True)  # (p, h, 1, d)
        products = [(g * y).sum((2, 3), keepdim=True) for g, y in zip(given, sides, strict=True)]  # (p, h, 1, 1)
        shared = (total / count).to(inverse.dtype)
        factor = ((products[0] + products[1]) / (count * sides[0].shape[-1])).to(inverse.dtype)
        found = []
        for g, y, absent, dtype in zip(given, sides, hidden, ctx.dtypes, strict=True):
            of_tokens = torch.addcmul(g - shared, y, factor, value=-1).mul_(inverse)
            if absent is not None:
                of_tokens.masked_fill_(absent, 0.0)
            found.append(of_tokens.to(dtype))
        return found[0], found[1], None, None


def _copied(tokens: Tensor, absent: Tensor | None) -> Tensor:
    """In working precision, to be written into; zeros at padding, whatever stood there."""
    return upcast(tokens).clone() if absent is None else upcast(tokens).masked_fill(absent, 0.0)


def _count(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.full((1, 1, 1, 1), float(tokens.shape[2]), device=tokens.device)
    return mask.sum(-1)[:, None, None, None].float()
