"""A network that ascends what its tokens descend, on a CPU, by the highway's gradient as it is written out.

Its weights turn the gradient round, not the tokens: they are few.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway, kernels
from alignattn.matching.networks import Discriminator, reverse_gradient


def serve(network: Discriminator, tokens: Tensor) -> bool:
    """Whether the network has a highway of its own, and nobody else does better."""
    return network.has_highway and tokens.device.type == "cpu" and not kernels.serve(tokens)


def ascending(
    network: Discriminator, tokens: Float[Tensor, "l t d"], layers: Int[Tensor, " l"] | None
) -> Float[Tensor, "l t o"]:
    """reverse_gradient(network(reverse_gradient(tokens)))."""
    if not serve(network, tokens):
        reversed_: Tensor = reverse_gradient(network(reverse_gradient(tokens), layers))
        return reversed_
    parts = (network.transform, network.gate, network.first, network.second)
    (to_relu, to_gate, to_hidden, to_out), (relu, gate, hidden, out) = zip(
        *((reverse_gradient(t) for t in part.of(tokens, layers, fixed=False)) for part in parts if part is not None),
        strict=True,
    )
    weight, bias = torch.cat([to_relu, to_gate], 2), torch.cat([relu, gate], 2)  # (l, d, 2d), (l, 1, 2d)
    return torch.baddbmm(out, _Highway.apply(tokens, weight, bias, to_hidden, hidden), to_out)


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
