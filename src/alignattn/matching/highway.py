"""The trunk of discriminator and critic, its way back written out.

    R = relu(W_t x),  G = sigmoid(W_g x),  x' = x + G (R - x),  hidden = W_1 x',  features = leaky_relu(hidden)

With g the gradient of x', that of W_t x is g G where R is above zero, that of W_g x is g (1 - G) (x' - x), and
g (1 - G) goes to x itself: what g is multiplied with is made once, on the way there. Autograd would pass over all
tokens twice as often. W_t and W_g lie side by side, in one product.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from alignattn.matching import scratch

SLOPE = 0.01  # of leaky_relu


class Weights(NamedTuple):
    """Of some layers, with their biases."""

    both: Float[Tensor, "l d 2*d"]  # to R, and to G
    both_bias: Float[Tensor, "l 1 2*d"]
    hidden: Float[Tensor, "l d k"]
    hidden_bias: Float[Tensor, "l 1 k"]


class Way(NamedTuple):
    """What the way back needs."""

    tokens: Float[Tensor, "l t d"]
    levers: Float[Tensor, "l t 2*d"]  # what the gradient of x' is multiplied with for those of W_t x and W_g x
    past: Float[Tensor, "l t d"]  # and for that of x, past both: 1 - G
    carried: Float[Tensor, "l t d"]  # x'


def side_by_side(w_t: Tensor, b_t: Tensor, w_g: Tensor, b_g: Tensor, w_1: Tensor, b_1: Tensor) -> Weights:
    """Weights and biases of transform, gate and first layer in turn."""
    return Weights(torch.cat([w_t, w_g], 2), torch.cat([b_t, b_g], 2), w_1, b_1)


def forth(tokens: Float[Tensor, "l t d"], weights: Weights) -> tuple[Way, Float[Tensor, "l t k"]]:
    """What is hidden, and all that leads to it."""
    levers, hidden = (room(tokens, w.shape[-1]) for w in (weights.both, weights.hidden))
    carried, past = room(tokens), room(tokens)
    torch.baddbmm(weights.both_bias, tokens, weights.both, out=levers)
    transformed, gate = levers.chunk(2, -1)
    torch.lerp(tokens, transformed.relu_(), gate.sigmoid_(), out=carried)
    torch.baddbmm(weights.hidden_bias, carried, weights.hidden, out=hidden)
    torch.ops.aten.threshold_backward(gate, transformed, 0.0, grad_input=transformed)
    torch.sub(tokens.new_ones(()), gate, out=past)
    torch.sub(carried, tokens, out=gate).mul_(past)
    return Way(tokens, levers, past, carried), hidden


def felt(way: Way, of_carried: Float[Tensor, "l t d"], to: Float[Tensor, "l t 2*d"]) -> Float[Tensor, "l t 2*d"]:
    """What W_t x and W_g x feel where x' feels that, written `to` somewhere."""
    for gradient, lever in zip(to.chunk(2, -1), way.levers.chunk(2, -1), strict=True):
        torch.mul(of_carried, lever, out=gradient)
    return to


def of_tokens(
    way: Way, weights: Weights, of_carried: Float[Tensor, "l t d"], of_both: Float[Tensor, "l t 2*d"]
) -> Float[Tensor, "l t d"]:
    """The gradient of the tokens, of what was felt on the way."""
    return torch.mul(of_carried, way.past, out=room(way.tokens)).baddbmm_(of_both, weights.both.mT)


def room(tokens: Float[Tensor, "l t d"], width: int | None = None) -> Float[Tensor, "l t _"]:
    """Memory for numbers of as many tokens, so many of each or as many."""
    return scratch.empty((*tokens.shape[:2], width or tokens.shape[2]), tokens)
