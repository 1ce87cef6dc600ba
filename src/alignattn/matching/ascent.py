"""A network that ascends what its tokens descend, on a CPU: the highway's gradient written out.

    R = relu(W_t x),  G = sigmoid(W_g x),  x' = x + G (R - x),  features = leaky_relu(W_1 x')

With g the gradient of x', that of R is g G, that of W_g x is g (1 - G) (x' - x), and g (1 - G) goes to x itself.
Autograd would pass over all tokens twice as often. Its weights turn the gradient round, not the tokens: they are few.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import kernels
from alignattn.matching.networks import Discriminator, reverse_gradient

SLOPE = 0.01  # of leaky_relu, as the network has it


def serve(network: Discriminator, tokens: Tensor) -> bool:
    """Whether the network has a highway of its own, and nobody else does better."""
    has_highway = network.transform is not None and network.gate is not None
    traced = torch.compiler.is_compiling()
    return has_highway and tokens.device.type == "cpu" and not traced and not kernels.serve(tokens)


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
    def forward(
        ctx: Any,
        tokens: Float[Tensor, "l t d"],
        weight: Float[Tensor, "l d 2d"],
        bias: Float[Tensor, "l 1 2d"],
        to_hidden: Float[Tensor, "l d k"],
        hidden_bias: Float[Tensor, "l 1 k"],
    ) -> Float[Tensor, "l t k"]:
        both = torch.baddbmm(bias, tokens, weight)
        transformed, gate = both.chunk(2, -1)
        carried = torch.lerp(tokens, transformed.relu_(), gate.sigmoid_())
        features = torch.nn.functional.leaky_relu_(torch.baddbmm(hidden_bias, carried, to_hidden), SLOPE)
        ctx.save_for_backward(tokens, weight, to_hidden, both, carried, features)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        tokens, weight, to_hidden, both, carried, features = ctx.saved_tensors
        transformed, gate = both.chunk(2, -1)
        of_hidden = torch.ops.aten.leaky_relu_backward(outer[0], features, SLOPE, True)
        of_carried = of_hidden @ to_hidden.mT
        of_tokens = torch.addcmul(of_carried, of_carried, gate, value=-1)
        of_both = torch.empty_like(both)
        of_transformed, of_gate = of_both.chunk(2, -1)
        torch.ops.aten.threshold_backward(of_carried.mul_(gate), transformed, 0.0, grad_input=of_transformed)
        torch.sub(carried, tokens, out=of_gate).mul_(of_tokens)
        return (
            of_tokens.baddbmm_(of_both, weight.mT),
            tokens.mT @ of_both,
            of_both.sum(1, keepdim=True),
            carried.mT @ of_hidden,
            of_hidden.sum(1, keepdim=True),
        )
