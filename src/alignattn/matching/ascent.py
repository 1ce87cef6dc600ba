"""A network that ascends what its tokens descend, by the highway's gradient as it is written out, or by its kernels.

Its weights turn the gradient round, not the tokens: they are few.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway, kernels
from alignattn.matching.linear import linear
from alignattn.matching.networks import Discriminator, Rows, reverse_gradient


def ascending(
    network: Discriminator, tokens: Float[Tensor, "l t d"], layers: Rows, *, products: str = kernels.EXACT
) -> Float[Tensor, "l t o"]:
    """reverse_gradient(network(reverse_gradient(tokens)))."""
    if not network.has_highway:
        reversed_: Tensor = reverse_gradient(network(reverse_gradient(tokens), layers))
        return reversed_
    *trunk, to_out, out = (reverse_gradient(weight) for weight in network.weights(tokens, layers))
    if kernels.serve(tokens, widest=kernels.HIGHWAY):
        from alignattn.matching.kernels.highway import features

        return linear(features(products, tokens, *trunk), to_out, out)
    to_relu, relu, to_gate, gate, to_hidden, hidden = trunk
    weight, bias = torch.cat([to_relu, to_gate], 2), torch.cat([relu, gate], 2)  # (l, d, 2d), (l, 1, 2d)
    return linear(_Highway.apply(tokens, weight, bias, to_hidden, hidden), to_out, out)


class _Highway(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Float[Tensor, "l t d"], *weights: Tensor) -> Float[Tensor, "l t k"]:
        way = highway.forth(tokens, highway.Weights(*weights))
        ctx.save_for_backward(*way, *weights)
        return way.features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        way, weights = highway.Way(*ctx.saved_tensors[:4]), highway.Weights(*ctx.saved_tensors[4:])
        felt = highway.back(way, weights, outer[0])
        of_weights = highway.of_weights(felt, way)
        return highway.of_tokens(felt, weights), *of_weights
