"""How far apart queries and keys are on average, in features that a network has of them.

    distance = | mean f(q) - mean f(k) |² / variance

The squared MMD whose kernel is the product of features, in its unbiased form: no token is paired with itself, nor a
query with the key of the same token. Over the variance of all features together, queries and keys counting alike: so
neither larger features nor smaller ones change it, and it is at most four. Salimans et al. 2016 train a generator on
it, instead of on what the discriminator answers, and it settles where that game goes round in circles.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import checked
from alignattn.matching import scratch
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
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Float[Tensor, "b h"]:
        measured = measure(cleared(query, query_mask), cleared(key, key_mask), query_mask, key_mask)
        ctx.save_for_backward(*measured)
        ctx.masks = query_mask, key_mask
        return measured.distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        measured = Measured(*ctx.saved_tensors)
        found = torch.empty_like(measured.x), torch.empty_like(measured.y)
        feel(measured, outer[0], found)
        for gradient, mask in zip(found, ctx.masks, strict=True):
            clear(gradient, mask)
        return *found, None, None


class Measured(NamedTuple):
    """A distance, and what its way back needs.

    With x and y the features around their centre, S their sums, Q the sums of their squares, P that of own pairs:

        gap = (|S_x|² - Q_x) / n(n-1) + (|S_y|² - Q_y) / m(m-1) - 2 (S_x·S_y - P) / pairs,   distance = gap / variance

    Its gradient at x_i is a vector of the problem plus a multiple of x_i and, of its own pair, of y_i: autograd would
    pass over all features two dozen times for it.
    """

    distance: Float[Tensor, "*b h"]
    variance: Float[Tensor, "*b h"]
    counted: Bool[Tensor, "*b h"]  # others have too few tokens, or features that are all one
    x: Float[Tensor, "*b h n e"]
    y: Float[Tensor, "*b h m e"]
    centre: Float[Tensor, "*b h e"]
    sum_x: Float[Tensor, "*b h e"]
    sum_y: Float[Tensor, "*b h e"]
    paired: Float[Tensor, "*b h e"] | None  # the sum of all that have an own pair, of both sides
    n: Float[Tensor, "*b 1"]  # how many there are
    m: Float[Tensor, "*b 1"]
    across: Float[Tensor, "*b 1"]  # two over the number of pairs of a query and a key


def measure(
    x: Float[Tensor, "*b h n e"],
    y: Float[Tensor, "*b h m e"],
    query_mask: Bool[Tensor, "*b n"] | None,
    key_mask: Bool[Tensor, "*b m"] | None,
) -> Measured:
    """Of features, zero where they are masked, that are brought around their centre where they lie."""
    v, w = _weights(x, query_mask), _weights(y, key_mask)  # (*b, 1, tokens)
    n, m = v.sum(-1), w.sum(-1)  # (*b, 1)
    # Products are of features around their common mean, which matters where masks leave some own pairs out.
    centre = (x.sum(-2) / n.clamp_min(1)[..., None] + y.sum(-2) / m.clamp_min(1)[..., None]) / 2
    for side, there, mask in ((x, v, query_mask), (y, w, key_mask)):
        if mask is None:
            side -= centre[..., None, :]
        else:
            side.addcmul_(there[..., None], centre[..., None, :], value=-1)
    sum_x, sum_y = x.sum(-2), y.sum(-2)  # (*b, h, e)
    square_x, square_y = _squares(x), _squares(y)  # (*b, h)
    cross, pairs, paired = (sum_x * sum_y).sum(-1), n * m, None
    if x.shape[-2] == y.shape[-2]:
        of_own = torch.mul(x, y, out=scratch.empty(x.shape, x)).sum((-1, -2))
        cross, pairs = cross - of_own, pairs - (v * w).sum(-1)
        paired = sum_x + sum_y if query_mask is key_mask else _weighted(w, x) + _weighted(v, y)
    across = 2 / pairs.clamp_min(1)
    gap = (sum_x.square().sum(-1) - square_x) * _one_over_pairs(n) - cross * across
    gap += (sum_y.square().sum(-1) - square_y) * _one_over_pairs(m)
    variance = (square_x / n.clamp_min(1) + square_y / m.clamp_min(1)) / 2
    counted = (n >= 2) & (m >= 2) & (variance > _of_rounding(centre, variance))
    variance = torch.where(counted, variance, 1.0)
    distance = torch.where(counted, gap, 0.0) / variance
    return Measured(distance, variance, counted, x, y, centre, sum_x, sum_y, paired, n, m, across)


def feel(
    measured: Measured, outer: Float[Tensor, "*b h"], to: tuple[Float[Tensor, "*b h n e"], Float[Tensor, "*b h m e"]]
) -> None:
    """Where features feel `outer`; something or other where they are masked."""
    distance, variance, counted, x, y, _, sum_x, sum_y, paired, n, m, across = measured
    scale = torch.where(counted, outer, 0.0) / variance  # (*b, h)
    # What the centre's way gives: nothing where every token has its own pair.
    of_centre = (n * across)[..., None] * sum_y + (m * across)[..., None] * sum_x
    of_centre -= 2 * sum_x / n.clamp_min(1)[..., None] + 2 * sum_y / m.clamp_min(1)[..., None]
    if paired is not None:
        of_centre -= across[..., None] * paired
    sides = (to[0], x, y, sum_x, sum_y, n), (to[1], y, x, sum_y, sum_x, m)
    for gradient, own, other, sum_own, sum_other, count in sides:
        of_own = 2 * _one_over_pairs(count)
        shared = of_own[..., None] * sum_own - across[..., None] * sum_other
        shared = (shared + of_centre / (2 * count.clamp_min(1))[..., None]) * scale[..., None]
        multiple = -(of_own + distance / count.clamp_min(1)) * scale
        torch.addcmul(shared[..., None, :], own, multiple[..., None, None], out=gradient)
        if paired is not None:
            gradient.addcmul_(other, (across * scale)[..., None, None])


def _squares(features: Float[Tensor, "*b n e"]) -> Float[Tensor, "*b"]:
    norms: Tensor = torch.linalg.vector_norm(features, dim=(-1, -2))  # nothing as large as the features is stored
    return norms.square()


def _one_over_pairs(count: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 1"]:
    """Of two different tokens."""
    return 1 / (count * (count - 1)).clamp_min(1)


def _of_rounding(centre: Float[Tensor, "*b h e"], variance: Float[Tensor, "*b h"]) -> Float[Tensor, "*b h"]:
    """The variance that features which are all one would seem to have."""
    size = centre.square().sum(-1) + variance
    return (64 * torch.finfo(size.dtype).eps) ** 2 * size


def _weighted(weights: Float[Tensor, "*b 1 n"], features: Float[Tensor, "*b h n e"]) -> Float[Tensor, "*b h e"]:
    return (weights[..., None, :] @ features).squeeze(-2)


def _weights(tokens: Float[Tensor, "*b h n e"], mask: Bool[Tensor, "*b n"] | None) -> Float[Tensor, "*b 1 n"]:
    if mask is None:
        return tokens.new_ones(*tokens.shape[:-3], 1, tokens.shape[-2])
    return mask[..., None, :].to(tokens.dtype)
