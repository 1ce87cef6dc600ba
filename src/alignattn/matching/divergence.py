"""Transport's loss and its gradient at once, by kernels: autograd would pass over all tokens some hundred times.

    loss = R(q,k) - R(q,q)/2 - R(k,k)/2,    R = sum_ij pi_ij (c_ij + epsilon log pi_ij)

or sum_ij c_ij pi_ij of queries and keys alone; c = |q - k|²/2, q and k times a scale. The plans are constants in the
gradient, so that it is known as soon as they are: no n×m matrix, and none of what led there, waits for the backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.scale import OnOneScale


@dataclass(frozen=True)
class Asked:
    """Which transport it is, and how it is solved."""

    scale: float  # of tokens, before their cost is |q - k|²/2
    limit: float  # and of their coordinates, then
    epsilon: float
    iterations: int
    tolerance: float
    debiased: bool


def divergence(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
    asked: Asked,
    *,
    products: str,
    scaled: OnOneScale | None = None,
) -> Float[Tensor, "b h"]:
    """Of each problem, where kernels serve; zero where a side has no tokens.

    `scaled`: how queries and keys were brought onto one scale. Their gradient goes past it then.
    """
    came = (query, key) if scaled is None else scaled.came
    losses: Tensor = _Divergence.apply(*came, query_mask, key_mask, scaled, asked, products)
    return losses


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        scaled: OnOneScale | None,
        asked: Asked,
        products: str,
    ) -> Tensor:
        from alignattn.matching.kernels import divergence as by_kernels

        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.way, kept = (None, ()) if scaled is None else (scaled.way, scaled.kept)
        query, key = (query, key) if scaled is None else kept[:2]
        losses, *found = by_kernels.divergence(
            query, key, query_mask, key_mask, asked, with_gradient=wanted, products=products
        )
        ctx.save_for_backward(*found, *kept)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients, rest = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        if ctx.way is not None:
            return *ctx.way.back(gradients, rest[1:], outer[0], rest[0]), *[None] * 5
        of_query, of_key = (
            gradient * outer[0][..., None, None] if wanted else None
            for gradient, wanted in zip(gradients, ctx.needs_input_grad, strict=False)
        )
        return of_query, of_key, *[None] * 5
