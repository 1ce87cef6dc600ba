"""The trunk of discriminator and critic, its way back written out.

    R = relu(W_t x),  G = sigmoid(W_g x),  x' = x + G (R - x),  features = leaky_relu(W_1 x')

With g the gradient of x', that of R is g G, that of W_g x is g (1 - G) (x' - x), and g (1 - G) goes to x itself.
Autograd would pass over all tokens twice as often. W_t and W_g lie side by side, in one product.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from alignattn.matching.linear import over_tokens

SLOPE = 0.01  # of leaky_relu


class Weights(NamedTuple):
    """Of some layers, with their biases."""

    both: Float[Tensor, "l d 2d"]  # to R, and to G
    both_bias: Float[Tensor, "l 1 2d"]
    hidden: Float[Tensor, "l d k"]
    hidden_bias: Float[Tensor, "l 1 k"]


class Way(NamedTuple):
    """What the way back needs."""

    tokens: Float[Tensor, "l t d"]
    both: Float[Tensor, "l t 2d"]  # R and G
    carried: Float[Tensor, "l t d"]  # x'
    features: Float[Tensor, "l t k"]


class Felt(NamedTuple):
    """Gradients along the way."""

    tokens: Float[Tensor, "l t d"]  # on the way past R and G
    both: Float[Tensor, "l t 2d"]
    hidden: Float[Tensor, "l t k"]
    carried: Float[Tensor, "l t d"]  # to be written over


def forth(tokens: Float[Tensor, "l t d"], weights: Weights) -> Way:
    """The features, and all that leads to them."""
    both = torch.baddbmm(weights.both_bias, tokens, weights.both)
    transformed, gate = both.chunk(2, -1)
    carried = torch.lerp(tokens, transformed.relu_(), gate.sigmoid_())
    features = torch.nn.functional.leaky_relu_(torch.baddbmm(weights.hidden_bias, carried, weights.hidden), SLOPE)
    return Way(tokens, both, carried, features)


def back(way: Way, weights: Weights, outer: Float[Tensor, "l t k"], over: Felt | None = None) -> Felt:
    """Where features feel `outer`. `over`: what nobody needs any more is written over, as fresh memory takes time."""
    transformed, gate = way.both.chunk(2, -1)
    if over is None:
        of_hidden, of_both, of_carried = map(torch.empty_like, (way.features, way.both, way.carried))
    else:
        of_hidden, of_both, of_carried = over.hidden, over.both, over.carried
    torch.ops.aten.leaky_relu_backward(outer, way.features, SLOPE, True, grad_input=of_hidden)
    torch.bmm(of_hidden, weights.hidden.mT, out=of_carried)
    of_tokens = torch.addcmul(of_carried, of_carried, gate, value=-1)
    of_transformed, of_gate = of_both.chunk(2, -1)
    torch.ops.aten.threshold_backward(of_carried.mul_(gate), transformed, 0.0, grad_input=of_transformed)
    torch.sub(way.carried, way.tokens, out=of_gate).mul_(of_tokens)
    return Felt(of_tokens, of_both, of_hidden, of_carried)


def of_tokens(felt: Felt, weights: Weights) -> Float[Tensor, "l t d"]:
    """The gradient of the tokens. Takes what was felt apart."""
    return felt.tokens.baddbmm_(felt.both, weights.both.mT)


def of_weights(felt: Felt, way: Way) -> Weights:
    """The gradients of weights and biases."""
    return Weights(
        over_tokens(way.tokens, felt.both),
        felt.both.sum(1, keepdim=True),
        over_tokens(way.carried, felt.hidden),
        felt.hidden.sum(1, keepdim=True),
    )
