"""One pass through a discriminator that serves both sides of the game.

Queries and keys descend the distance of their features, and leave the weights alone; the discriminator ascends what its
answers are worth, and leaves queries and keys alone. Features and answers come out of the same pass:

    t = x W_t + b_t,  g = sigmoid(x W_g + b_g),  h = g relu(t) + (1 - g) x
    f = leaky_relu(h W_1 + b_1),  answer = f W_2 + b_2

The gradient of f goes to x and no further, that of the answer to the weights. Autograd would pass through it twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import kernels
from alignattn.matching.linear import over_tokens

SLOPE = 0.01
WIDEST = 64  # of kernels: three gradients of weights must fit the registers


def features_and_answers(
    tokens: Float[Tensor, "l t d"], *weights: Float[Tensor, "l _ _"]
) -> tuple[Float[Tensor, "l t hidden"], Float[Tensor, "l t o"]]:
    """Of tokens, with weights and biases of transform, gate, first and second layer in turn."""
    features, answers = _Apart.apply(tokens, *weights)
    return features, answers


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.by_kernel = kernels.serve(tokens, widest=WIDEST)
        kept: list[Tensor] = []
        if ctx.by_kernel:
            from alignattn.matching.kernels import highway

            features = highway.forward(tokens, *weights[:6])
        else:
            features, kept = _forward(tokens, *weights[:6])
        answers = torch.baddbmm(weights[7], features, weights[6])
        ctx.save_for_backward(tokens, features, *weights, *kept)
        return features, answers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        tokens, features, *weights = ctx.saved_tensors[:10]
        kept = ctx.saved_tensors[10:]
        of_features, of_answers = outer
        of_tokens: Tensor | None = None
        of_weights: list[Tensor | None] = [None] * 8
        learns = any(ctx.needs_input_grad[1:])
        through = of_answers @ weights[6].mT if learns else None  # what the weights feel at the features
        if ctx.by_kernel:
            from alignattn.matching.kernels import highway

            if ctx.needs_input_grad[0]:
                of_tokens = highway.backward_tokens(tokens, of_features, *weights[:6])
            if through is not None:
                of_weights[:6] = highway.backward_weights(tokens, through, *weights[:6])
        else:
            if ctx.needs_input_grad[0]:
                of_tokens = _to_tokens(features, of_features, weights, kept)
            if through is not None:
                of_weights[:6] = _to_weights(tokens, features, through, weights, kept)
        if learns:
            of_weights[6:] = over_tokens(features, of_answers), of_answers.sum(1, keepdim=True)
        return of_tokens, *of_weights


def _forward(
    x: Tensor, w_t: Tensor, b_t: Tensor, w_g: Tensor, b_g: Tensor, w_1: Tensor, b_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Features, and what the way back needs: relu(t) - x, gate, and what the first layer is given."""
    gate = torch.baddbmm(b_g, x, w_g).sigmoid_()
    carried = torch.baddbmm(b_t, x, w_t).relu_()
    positive = carried > 0
    apart = carried.sub_(x)  # relu(t) - x
    carried = torch.addcmul(x, gate, apart)
    features = F.leaky_relu_(torch.baddbmm(b_1, carried, w_1), SLOPE)
    return features, [apart, gate, carried, positive]


def _at_highway(
    features: Tensor, outer: Tensor, w_1: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients at the first layer's output, at what it is given, at the gate's and the transform's output."""
    apart, gate, _, positive = kept
    of_first = torch.where(features > 0, outer, SLOPE * outer)
    of_carried = of_first @ w_1.mT
    of_transform = of_carried * gate
    of_gate = (of_transform * apart).mul_(1 - gate)
    return of_first, of_carried, of_gate, of_transform.mul_(positive)


def _to_tokens(
    features: Tensor, outer: Tensor, weights: list[Tensor], kept: tuple[Tensor, ...]
) -> Float[Tensor, "l t d"]:
    _, of_carried, of_gate, of_transform = _at_highway(features, outer, weights[4], kept)
    of_x = torch.addcmul(of_carried, of_carried, kept[1], value=-1)
    of_x.baddbmm_(of_transform, weights[0].mT)
    return of_x.baddbmm_(of_gate, weights[2].mT)


def _to_weights(
    x: Tensor, features: Tensor, outer: Tensor, weights: list[Tensor], kept: tuple[Tensor, ...]
) -> list[Tensor]:
    of_first, _, of_gate, of_transform = _at_highway(features, outer, weights[4], kept)
    pairs = ((x, of_transform), (x, of_gate), (kept[2], of_first))
    return [g for given, of in pairs for g in (over_tokens(given, of), of.sum(1, keepdim=True))]
