"""The game of queries and keys with a discriminator that has a highway, all ways back written out.

    f, z = features and answer of a token:  f as in highway.py,  z = f W_2 + b_2

Queries and keys descend the distance of their mean features (features.py) and leave the weights alone; the
discriminator ascends the value of its answers, E_q[log sigmoid(z)] + E_k[log sigmoid(-z)], and leaves queries and
keys alone. What that value is nobody asks here, and its gradient at an answer is known. With a that gradient, S the
slopes of leaky_relu and ⊙ by elements, x' feels a ⊙ (S (W_1 ⊙ W_2ᵀ)ᵀ) and W_1 feels ((a ⊙ x')ᵀ S) ⊙ W_2ᵀ: for the
weights nothing as large as the features is computed. Kernels play all of it in five launches (kernels/game.py).
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching import highway, scratch
from alignattn.matching.beside import joined, parts
from alignattn.matching.features import Measured, feel, measure
from alignattn.matching.linear import over_tokens
from alignattn.matching.tokens import samples_with_tokens

Mask = Bool[Tensor, "l b _"] | None
Shapes = tuple[torch.Size, torch.Size]  # of queries and keys


def game(
    query: Float[Tensor, "l b h n d"],
    key: Float[Tensor, "l b h m d"],
    query_mask: Mask,
    key_mask: Mask,
    *weights: Float[Tensor, "l _ _"],
) -> tuple[Float[Tensor, "l b h"], Float[Tensor, "l b h n 1"], Float[Tensor, "l b h m 1"]]:
    """The distance, and as constants the answers to queries and to keys.

    With weights and biases of transform, gate, first and second layer in turn.
    """
    distance, to_query, to_key = _Game.apply(query, key, query_mask, key_mask, *weights)
    return distance, to_query, to_key


class _Game(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_mask: Mask, key_mask: Mask, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shapes, ctx.masks = (query.shape, key.shape), (query_mask, key_mask)
        trunk = highway.side_by_side(*weights[:6])
        way, hidden = highway.forth(joined(query, key), trunk)
        slopes, there = highway.room(hidden), _there(query, key, query_mask, key_mask).expand_as(hidden)
        torch.ops.aten.leaky_relu_backward(there, hidden, highway.SLOPE, False, grad_input=slopes)
        answers = torch.baddbmm(weights[7], hidden.mul_(slopes), weights[6])
        measured = measure(*parts(hidden, ctx.shapes), query_mask, key_mask)
        ctx.save_for_backward(answers, slopes, hidden, weights[6], *trunk, *way, *measured)
        to_query, to_key = parts(answers, ctx.shapes)
        ctx.mark_non_differentiable(to_query, to_key)
        return measured.distance, to_query, to_key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        answers, slopes, about_centre, to_answers, *saved = ctx.saved_tensors
        trunk, way, measured = highway.Weights(*saved[:4]), highway.Way(*saved[4:8]), Measured(*saved[8:])
        of_carried, (of_features, of_both) = highway.room(way.tokens), _in_turn(slopes, way.levers)
        of_tokens: tuple[Tensor | None, ...] = (None, None)
        of_weights: list[Tensor | None] = [None] * 8
        if any(ctx.needs_input_grad[:2]):
            feel(measured, outer[0], parts(of_features, ctx.shapes))
            torch.bmm(of_features.mul_(slopes), trunk.hidden.mT, out=of_carried)
            highway.felt(way, of_carried, of_both)
            of_tokens = parts(highway.of_tokens(way, trunk, of_carried, of_both), ctx.shapes)
        if any(ctx.needs_input_grad[4:]):
            sides = zip(parts(answers, ctx.shapes), (1, -1), ctx.masks, strict=True)
            of_answers = joined(*(_gradient(side, sign, outer[0], mask, ctx.masks) for side, sign, mask in sides))
            torch.bmm(slopes, (trunk.hidden * to_answers.mT).mT, out=of_carried).mul_(of_answers)
            highway.felt(way, of_carried, of_both)
            weighed = torch.mul(way.carried, of_answers, out=of_carried)
            both, both_bias = over_tokens(way.tokens, of_both), of_both.sum(1, keepdim=True)
            of_weights = [
                *(part for pair in zip(both.chunk(2, -1), both_bias.chunk(2, -1), strict=True) for part in pair),
                over_tokens(weighed, slopes) * to_answers.mT,
                over_tokens(of_answers, slopes) * to_answers.mT,
                _of_last(about_centre, measured, of_answers, ctx.shapes),
                of_answers.sum(1, keepdim=True),
            ]
        return *of_tokens, None, None, *of_weights


def _there(
    query: Float[Tensor, "l b h n d"], key: Float[Tensor, "l b h m d"], query_mask: Mask, key_mask: Mask
) -> Float[Tensor, "l t 1"] | Float[Tensor, ""]:
    """One for tokens, zero for padding: what is multiplied with it has no features there, and feels nothing."""
    if query_mask is None and key_mask is None:
        return query.new_ones(())
    sides = []
    for side, mask in ((query, query_mask), (key, key_mask)):
        ones = side.new_ones(()) if mask is None else mask[:, :, None, :, None].to(side.dtype)
        sides.append(ones.expand(*side.shape[:4], 1))
    return joined(*sides)


def _in_turn(*like: Float[Tensor, "l t _"]) -> list[Tensor]:
    """Memory for tensors like these, of which only one is needed at a time."""
    both = scratch.empty((max(tensor.numel() for tensor in like),), like[0])
    return [both[: tensor.numel()].view(tensor.shape) for tensor in like]


def _gradient(
    answers: Float[Tensor, "l b h n 1"], sign: int, outer: Float[Tensor, "l b h"], mask: Mask, masks: tuple[Mask, Mask]
) -> Float[Tensor, "l b h n 1"]:
    """Of minus the value, which the discriminator ascends: of samples without tokens on one side there is none."""
    share = outer[..., None, None] * -sign
    if mask is None:
        share = share / answers.shape[-2]
    else:
        share = share * (mask / mask.sum(-1, keepdim=True).clamp_min(1))[..., None, :, None].to(answers)
    alive = samples_with_tokens(*masks)
    if alive is not None:
        share = share * alive[..., None, None, None]
    return torch.sigmoid(-sign * answers) * share


def _of_last(
    about_centre: Float[Tensor, "l t k"], measured: Measured, of_answers: Float[Tensor, "l t 1"], shapes: Shapes
) -> Float[Tensor, "l k 1"]:
    """Σ f a over all tokens: of features about the centre of their problem, and of that centre."""
    of_problems = torch.stack([side.sum((3, 4)) for side in parts(of_answers, shapes)]).sum(0)  # (l, b, h)
    # As a row: for a CPU a product of one column is by far the slower one.
    of_last = over_tokens(of_answers, about_centre) + (measured.centre * of_problems[..., None]).sum((1, 2))[:, None]
    return of_last.mT
