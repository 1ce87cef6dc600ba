"""How far apart queries and keys are on average, in features that a network has of them.

    distance = | mean f(q) - mean f(k) |² / variance

The squared MMD whose kernel is the product of features, in its unbiased form: no token is paired with itself, nor a
query with the key of the same token. Over the variance of all features together, queries and keys counting alike: so
neither larger features nor smaller ones change it, and it is at most four. Salimans et al. 2016 train a generator on
it, instead of on what the discriminator answers, and it settles where that game goes round in circles.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import checked
from alignattn.matching.tokens import check_pair, clear, cleared, full_precision, told_apart, upcast


@checked(check_pair)
@full_precision
def feature_distance(
    query: Float[Tensor, "b h n e"],
    key: Float[Tensor, "b h m e"],
    *,
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h"]:
    """Of the features of queries [b, h, n, e] and keys [b, h, m, e], each problem for itself.

    Zero for problems with fewer than two tokens on a side, and a little less than zero at times. A query's own key is
    left out where there are as many of both.
    """
    key_mask = told_apart(query_mask, key_mask)
    distance: Tensor = _Distance.apply(upcast(query), upcast(key), query_mask, key_mask)
    return distance


class _Distance(torch.autograd.Function):
    """With x and y the features around their centre, S their sums, Q the sums of their squares, P that of own pairs:

        gap = (|S_x|² - Q_x) / n(n-1) + (|S_y|² - Q_y) / m(m-1) - 2 (S_x·S_y - P) / pairs,   distance = gap / variance

    Its gradient at x_i is a vector of the problem plus a multiple of x_i and, of its own pair, of y_i: autograd would
    pass over all features two dozen times for it.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Float[Tensor, "b h"]:
        v, w = _weights(query, query_mask), _weights(key, key_mask)  # (b, 1, tokens)
        n, m = v.sum(-1), w.sum(-1)  # (b, 1)
        sides = [cleared(query, query_mask), cleared(key, key_mask)]
        size = sum((_squares(side) / (side.shape[2] * side.shape[3]) for side in sides), start=torch.zeros_like(n)) / 2
        # Products are of features around their common mean, which matters where masks leave some own pairs out.
        centre = (sides[0].sum(2) / n.clamp_min(1)[..., None] + sides[1].sum(2) / m.clamp_min(1)[..., None]) / 2
        for side, mask in zip(sides, (query_mask, key_mask), strict=True):
            side -= centre[:, :, None]
            clear(side, mask)
        x, y = sides
        own = v * w if x.shape[2] == y.shape[2] else None
        sum_x, sum_y = x.sum(2), y.sum(2)  # (b, h, e)
        square_x, square_y = _squares(x), _squares(y)  # (b, h)
        cross, pairs = (sum_x * sum_y).sum(-1), n * m
        if own is not None:
            cross, pairs = cross - torch.linalg.vecdot(x.flatten(2), y.flatten(2)), pairs - own.sum(-1)
        of_x, of_y = 1 / (n * (n - 1)).clamp_min(1), 1 / (m * (m - 1)).clamp_min(1)
        across = 2 / pairs.clamp_min(1)
        gap = (sum_x.square().sum(-1) - square_x) * of_x + (sum_y.square().sum(-1) - square_y) * of_y - cross * across
        variance = (square_x / n.clamp_min(1) + square_y / m.clamp_min(1)) / 2
        rounding = (64 * torch.finfo(size.dtype).eps) ** 2 * x.shape[-1] * size  # features that are all one
        counted = (n >= 2) & (m >= 2) & (variance > rounding)
        variance = torch.where(counted, variance, 1.0)
        distance = torch.where(counted, gap, 0.0) / variance
        ctx.save_for_backward(x, y, sum_x, sum_y, v, w, n, m, of_x, of_y, across, variance, distance, counted)
        ctx.has_own = own is not None
        ctx.masked = query_mask is not None, key_mask is not None
        ctx.alike = query_mask is key_mask  # tokens of both sides are there, or are not, together
        return distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        x, y, sum_x, sum_y, v, w, n, m, of_x, of_y, across, variance, distance, counted = ctx.saved_tensors
        scale = torch.where(counted, outer[0], 0.0) / variance  # (b, h)
        # What the centre's way gives: nothing where every token has its own pair.
        of_centre = (n * across)[..., None] * sum_y + (m * across)[..., None] * sum_x
        of_centre -= 2 * sum_x / n.clamp_min(1)[..., None] + 2 * sum_y / m.clamp_min(1)[..., None]
        if ctx.has_own:
            paired = sum_x + sum_y if ctx.alike else (x * w[..., None]).sum(2) + (y * v[..., None]).sum(2)
            of_centre -= across[..., None] * paired
        found = []
        for own, other, sum_own, sum_other, count, of_own, weight, masked in (
            (x, y, sum_x, sum_y, n, of_x, v, ctx.masked[0]),
            (y, x, sum_y, sum_x, m, of_y, w, ctx.masked[1]),
        ):
            shared = 2 * of_own[..., None] * sum_own - across[..., None] * sum_other
            shared = (shared + of_centre / (2 * count.clamp_min(1))[..., None]) * scale[..., None]
            multiple = -(2 * of_own + distance / count.clamp_min(1)) * scale
            gradient = torch.addcmul(shared[:, :, None], own, multiple[..., None, None])
            if ctx.has_own:
                gradient.addcmul_(other, (across * scale)[..., None, None])
            if masked:
                gradient *= weight[..., None]
            found.append(gradient)
        return found[0], found[1], None, None


def _squares(features: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h"]:
    norms: Tensor = torch.linalg.vector_norm(features.flatten(2), dim=-1)  # nothing as large as the features is stored
    return norms.square()


def _weights(tokens: Float[Tensor, "b h n e"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b 1 n"]:
    ones = tokens.new_ones(tokens.shape[0], 1, tokens.shape[2])
    return ones if mask is None else mask[:, None].to(tokens.dtype)
