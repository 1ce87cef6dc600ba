"""A network that ascends what its tokens descend, by the highway's gradient as it is written out, or by its kernels.

Its weights turn the gradient round, not the tokens: they are few.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway, kernels
from alignattn.matching.linear import linear, over_tokens
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
    return linear(_Highway.apply(tokens, *highway.side_by_side(*trunk)), to_out, out)


class _Highway(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Float[Tensor, "l t d"], *weights: Tensor) -> Float[Tensor, "l t k"]:
        way, hidden = highway.forth(tokens, highway.Weights(*weights))
        features = torch.nn.functional.leaky_relu_(hidden, highway.SLOPE)
        ctx.save_for_backward(features, *way, *weights)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        features, *saved = ctx.saved_tensors
        way, weights = highway.Way(*saved[:4]), highway.Weights(*saved[4:])
        of_hidden, of_both = (highway.room(way.tokens, like.shape[-1]) for like in (features, way.levers))
        torch.ops.aten.leaky_relu_backward(outer[0], features, highway.SLOPE, True, grad_input=of_hidden)
        of_carried = torch.bmm(of_hidden, weights.hidden.mT, out=highway.room(way.tokens))
        highway.felt(way, of_carried, of_both)
        return (
            highway.of_tokens(way, weights, of_carried, of_both),
            over_tokens(way.tokens, of_both),
            of_both.sum(1, keepdim=True),
            over_tokens(way.carried, of_hidden),
            of_hidden.sum(1, keepdim=True),
        )
