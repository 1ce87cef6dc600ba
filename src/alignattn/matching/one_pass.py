"""One pass through a discriminator that serves both sides of the game.

Queries and keys descend the distance of their features, and leave the weights alone; the discriminator ascends what its
answers are worth, and leaves queries and keys alone. Features and answers come out of the same pass:

    t = x W_t + b_t,  g = sigmoid(x W_g + b_g),  h = g relu(t) + (1 - g) x
    f = leaky_relu(h W_1 + b_1),  answer = f W_2 + b_2

The gradient of f goes to x and no further, that of the answer to the weights (highway.py has both). Autograd would pass
through the network twice. Kernels play the whole game by themselves (kernels/game.py).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway
from alignattn.matching.linear import over_tokens


def features_and_answers(
    tokens: Float[Tensor, "l t d"], *weights: Float[Tensor, "l _ _"]
) -> tuple[Float[Tensor, "l t hidden"], Float[Tensor, "l t o"]]:
    """Of tokens, with weights and biases of transform, gate, first and second layer in turn."""
    features, answers = _OnePass.apply(tokens, *weights)
    return features, answers


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        side_by_side = _side_by_side(*weights[:6])
        way = highway.forth(tokens, side_by_side)
        ctx.save_for_backward(weights[6], *way, *side_by_side)
        return way.features, torch.baddbmm(weights[7], way.features, weights[6])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        of_features, of_answers = outer
        to_answers, *saved = ctx.saved_tensors
        way, side_by_side = highway.Way(*saved[:4]), highway.Weights(*saved[4:])
        of_tokens: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * 8
        felt = None
        if ctx.needs_input_grad[0]:
            felt = highway.back(way, side_by_side, of_features)
            of_tokens = highway.of_tokens(felt, side_by_side)
        if any(ctx.needs_input_grad[1:]):
            through = of_answers @ to_answers.mT  # what the weights feel at the features
            found = highway.of_weights(highway.back(way, side_by_side, through, over=felt), way)
            (w_t, w_g), (b_t, b_g) = found.both.chunk(2, -1), found.both_bias.chunk(2, -1)
            of_weights = [w_t, b_t, w_g, b_g, found.hidden, found.hidden_bias]
            of_weights += [over_tokens(way.features, of_answers), of_answers.sum(1, keepdim=True)]
        return of_tokens, *of_weights


def _side_by_side(w_t: Tensor, b_t: Tensor, w_g: Tensor, b_g: Tensor, w_1: Tensor, b_1: Tensor) -> highway.Weights:
    return highway.Weights(torch.cat([w_t, w_g], 2), torch.cat([b_t, b_g], 2), w_1, b_1)
