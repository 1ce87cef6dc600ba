"""y = x W + b for some layers at once, of few outputs and very many tokens.

The gradient of W is a product over all tokens of a layer, of a small matrix. An accelerator that gives each matrix to
one processor leaves the others idle, and a CPU shares out a long sum less well than several: the tokens are cut into
parts, whose products are added.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

PARTS = {"cpu": 4, "cuda": 512}  # products at once, about


def linear(
    tokens: Float[Tensor, "l t i"], weight: Float[Tensor, "l i o"], bias: Float[Tensor, "l 1 o"]
) -> Float[Tensor, "l t o"]:
    """Each layer's tokens with its own weight and bias."""
    if tokens.is_cuda and not torch.compiler.is_compiling():
        result: Tensor = _Linear.apply(tokens, weight, bias)
        return result
    return torch.baddbmm(bias, tokens, weight)


def over_tokens(x: Float[Tensor, "l t i"], y: Float[Tensor, "l t o"]) -> Float[Tensor, "l i o"]:
    """Σ_t x_ti y_to of each layer."""
    return _in_parts(x, y, _parts(len(x), x.shape[1], x.device))


def _in_parts(x: Float[Tensor, "l t i"], y: Float[Tensor, "l t o"], parts: int) -> Float[Tensor, "l i o"]:
    x, y = (t.unflatten(1, (parts, -1)).flatten(0, 1) for t in (x, y))
    summed: Tensor = (x.mT @ y).unflatten(0, (-1, parts)).sum(1)
    return summed


def _parts(layers: int, tokens: int, device: torch.device) -> int:
    """As many as divide the tokens, up to what fills a device."""
    most = max(1, PARTS.get(device.type, 1) // layers)
    return next(parts for parts in range(min(most, tokens), 0, -1) if tokens % parts == 0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.baddbmm(bias, tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        of_tokens = outer[0] @ weight.mT if ctx.needs_input_grad[0] else None
        of_weight = over_tokens(tokens, outer[0]) if ctx.needs_input_grad[1] else None
        of_bias = outer[0].sum(1, keepdim=True) if ctx.needs_input_grad[2] else None
        return of_tokens, of_weight, of_bias
