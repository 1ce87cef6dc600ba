"""One pass through a discriminator that serves both sides of the game.

Queries and keys descend the distance of their features, and leave the weights alone; the discriminator ascends what its
answers are worth, and leaves queries and keys alone. Features and answers come out of the same pass:

    t = x W_t + b_t,  g = sigmoid(x W_g + b_g),  h = g relu(t) + (1 - g) x
    f = leaky_relu(h W_1 + b_1),  answer = f W_2 + b_2

The gradient of f goes to x and no further, that of the answer to the weights (highway.py has both). Autograd would pass
through the network twice.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway, kernels
from alignattn.matching.linear import over_tokens

WIDEST = 64  # of kernels: three gradients of weights must fit the registers


def features_and_answers(
    products: str, tokens: Float[Tensor, "l t d"], *weights: Float[Tensor, "l _ _"]
) -> tuple[Float[Tensor, "l t hidden"], Float[Tensor, "l t o"]]:
    """Of tokens, with weights and biases of transform, gate, first and second layer in turn.

    `products`: how kernels make them.
    """
    features, answers = _OnePass.apply(products, tokens, *weights)
    return features, answers


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: str, tokens: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.products = products
        ctx.by_kernel = kernels.serve(tokens, widest=WIDEST)
        if ctx.by_kernel:
            from alignattn.matching.kernels import highway as kernel

            features = kernel.forward(products, tokens, *weights[:6])
            ctx.save_for_backward(*weights, features, tokens)
        else:
            side_by_side = _side_by_side(*weights[:6])
            way = highway.forth(tokens, side_by_side)
            features = way.features
            ctx.save_for_backward(*weights, features, *way[:3], *side_by_side)
        return features, torch.baddbmm(weights[7], features, weights[6])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        of_features, of_answers = outer
        *weights, features = ctx.saved_tensors[:9]
        of_tokens: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * 8
        through = None
        if any(ctx.needs_input_grad[2:]):
            through = of_answers @ weights[6].mT  # what the weights feel at the features
            of_weights[6:] = over_tokens(features, of_answers), of_answers.sum(1, keepdim=True)
        if ctx.by_kernel:
            from alignattn.matching.kernels import highway as kernel

            tokens = ctx.saved_tensors[9]
            if ctx.needs_input_grad[1]:
                of_tokens = kernel.backward_tokens(ctx.products, tokens, of_features, *weights[:6])
            if through is not None:
                of_weights[:6] = kernel.backward_weights(ctx.products, tokens, through, *weights[:6])
            return None, of_tokens, *of_weights
        tokens, both, carried = ctx.saved_tensors[9:12]
        way = highway.Way(tokens, both, carried, features)
        side_by_side = highway.Weights(*ctx.saved_tensors[12:])
        felt = None
        if ctx.needs_input_grad[1]:
            felt = highway.back(way, side_by_side, of_features)
            of_tokens = highway.of_tokens(felt, side_by_side)
        if through is not None:
            found = highway.of_weights(highway.back(way, side_by_side, through, over=felt), way)
            (w_t, w_g), (b_t, b_g) = found.both.chunk(2, -1), found.both_bias.chunk(2, -1)
            of_weights[:6] = w_t, b_t, w_g, b_g, found.hidden, found.hidden_bias
        return None, of_tokens, *of_weights


def _side_by_side(w_t: Tensor, b_t: Tensor, w_g: Tensor, b_g: Tensor, w_1: Tensor, b_1: Tensor) -> highway.Weights:
    return highway.Weights(torch.cat([w_t, w_g], 2), torch.cat([b_t, b_g], 2), w_1, b_1)
