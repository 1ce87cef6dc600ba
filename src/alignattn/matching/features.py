"""How far apart queries and keys are on average, in features that a network has of them.

    distance = | mean f(q) - mean f(k) |² / variance

The squared MMD whose kernel is the product of features, in its unbiased form: no token is paired with itself, nor a
query with the key of the same token. Over the variance of all features together, queries and keys counting alike: so
neither larger features nor smaller ones change it, and it is at most four. Salimans et al. 2016 train a generator on
it, instead of on what the discriminator answers, and it settles where that game goes round in circles.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alignattn.errors import checked
from alignattn.matching.tokens import blank_padding, check_pair, full_precision


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
    query, key = blank_padding(query, query_mask), blank_padding(key, key_mask)
    v, w = _weights(query, query_mask), _weights(key, key_mask)
    n, m = v.sum(-1), w.sum(-1)  # (b, 1)
    size = (query.square().mean((2, 3)) + key.square().mean((2, 3))) / 2
    # Products are of features around their common mean, which matters where masks leave some own pairs out.
    centre = (query.sum(2) / n.clamp_min(1)[..., None] + key.sum(2) / m.clamp_min(1)[..., None]) / 2
    query, key = ((t - centre[:, :, None]) * weight[..., None] for t, weight in ((query, v), (key, w)))
    own = v * w if query.shape[2] == key.shape[2] else None
    sum_q, sum_k = query.sum(2), key.sum(2)
    square_q, square_k = query.square().sum((2, 3)), key.square().sum((2, 3))
    cross, pairs = (sum_q * sum_k).sum(-1), n * m
    if own is not None:
        cross, pairs = cross - (query * key).sum((2, 3)), pairs - own.sum(-1)
    gap = (
        (sum_q.square().sum(-1) - square_q) / (n * (n - 1)).clamp_min(1)
        + (sum_k.square().sum(-1) - square_k) / (m * (m - 1)).clamp_min(1)
        - 2 * cross / pairs.clamp_min(1)
    )
    variance = (square_q / n.clamp_min(1) + square_k / m.clamp_min(1)) / 2
    rounding = (64 * torch.finfo(size.dtype).eps) ** 2 * query.shape[-1] * size  # features that are all one
    counted = (n >= 2) & (m >= 2) & (variance > rounding)
    return torch.where(counted, gap, 0.0) / torch.where(counted, variance, 1.0)


def _weights(tokens: Float[Tensor, "b h n e"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b 1 n"]:
    ones = tokens.new_ones(tokens.shape[0], 1, tokens.shape[2])
    return ones if mask is None else mask[:, None].to(tokens.dtype)
