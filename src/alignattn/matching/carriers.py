"""What critic and navigator make of the same queries and keys, all ways back written out.

    critic:  f V_1 + v_1,  f as in highway.py,    navigator:  relu(x N_1 + n_1) N_2 + n_2

Tokens descend through both, and what they feel of either comes together in one sum. The critic's weights ascend, the
navigator's where it is told to: weights are few, so it is their gradients that are turned round. Kernels do all this
and the transport too in a few launches (kernels/carriers.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway
from alignattn.matching.beside import joined, parts
from alignattn.matching.linear import over_tokens

Pair = tuple[Float[Tensor, "lb h n _"], Float[Tensor, "lb h m _"]]  # of queries and keys


def critic_and_navigator(
    query: Float[Tensor, "l b h n d"],
    key: Float[Tensor, "l b h m d"],
    critic: Sequence[Float[Tensor, "l _ _"]],
    navigator: Sequence[Float[Tensor, "l _ _"]],
    *,
    navigator_ascends: bool,
) -> tuple[Pair, Pair]:
    """The features of each.

    With weights and biases of the critic's transform, gate, first and second layer in turn, and of the navigator's two.
    """
    found: tuple[Tensor, ...] = _Features.apply(query, key, navigator_ascends, *critic, *navigator)
    return (found[0], found[1]), (found[2], found[3])


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, navigator_ascends: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes, ctx.navigator_ascends = (query.shape, key.shape), navigator_ascends
        trunk, critic, navigator = highway.side_by_side(*weights[:6]), weights[6:8], weights[8:]
        way, hidden = highway.forth(joined(query, key), trunk)
        torch.nn.functional.leaky_relu_(hidden, highway.SLOPE)
        lit = _linear(way.tokens, *navigator[:2]).relu_()
        ctx.save_for_backward(hidden, lit, critic[0], navigator[0], navigator[2], *trunk, *way)
        outputs = _linear(hidden, *critic), _linear(lit, *navigator[2:])
        return tuple(side.flatten(0, 1) for both in outputs for side in parts(both, ctx.shapes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, lit, to_critic, to_lit, to_navigator, *saved = ctx.saved_tensors
        trunk, way = highway.Weights(*saved[:4]), highway.Way(*saved[4:])
        of_critic, of_navigator = (
            joined(*(side.unflatten(0, ctx.shapes[0][:2]) for side in pair)) for pair in (outer[:2], outer[2:])
        )
        of_hidden = _times(of_critic, to_critic.mT)
        torch.ops.aten.leaky_relu_backward(of_hidden, hidden, highway.SLOPE, True, grad_input=of_hidden)
        of_lit = _times(of_navigator, to_navigator.mT)
        torch.ops.aten.threshold_backward(of_lit, lit, 0.0, grad_input=of_lit)
        of_carried = _times(of_hidden, trunk.hidden.mT)
        of_both = highway.felt(way, of_carried, highway.room(way.tokens, way.levers.shape[-1]))
        of_tokens: tuple[Tensor | None, ...] = (None, None)
        of_weights: list[Tensor | None] = [None] * 12
        if any(ctx.needs_input_grad[:2]):
            felt = highway.of_tokens(way, trunk, of_carried, of_both).baddbmm_(of_lit, to_lit.mT)
            of_tokens = parts(felt, ctx.shapes)
        if any(ctx.needs_input_grad[3:]):
            both, both_bias = _of_linear(way.tokens, of_both)
            ascend = [
                *(part for pair in zip(both.chunk(2, -1), both_bias.chunk(2, -1), strict=True) for part in pair),
                *_of_linear(way.carried, of_hidden),
                *_of_linear(hidden, of_critic),
            ]
            navigate = [*_of_linear(way.tokens, of_lit), *_of_linear(lit, of_navigator)]
            torch._foreach_neg_(ascend + navigate if ctx.navigator_ascends else ascend)
            of_weights = [*ascend, *navigate]
        return *of_tokens, None, *of_weights


def _linear(
    tokens: Float[Tensor, "l t i"], weight: Float[Tensor, "l i o"], bias: Float[Tensor, "l 1 o"]
) -> Float[Tensor, "l t o"]:
    return torch.baddbmm(bias, tokens, weight, out=highway.room(tokens, weight.shape[-1]))


def _times(tokens: Float[Tensor, "l t i"], weight: Float[Tensor, "l i o"]) -> Float[Tensor, "l t o"]:
    return torch.bmm(tokens, weight, out=highway.room(tokens, weight.shape[-1]))


def _of_linear(tokens: Float[Tensor, "l t i"], outer: Float[Tensor, "l t o"]) -> list[Tensor]:
    """What weight and bias feel."""
    return [over_tokens(tokens, outer), outer.sum(1, keepdim=True)]
