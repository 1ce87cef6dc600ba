"""What MMD² would be if keys and queries were of one distribution: they change places at random within each sample.

    MMD² = u'K₀u / n(n-1) + v'K₀v / m(m-1) - 2 u'Kv / nm,    u, v: which of the pooled tokens are queries, which keys

K is the Gaussian kernel with the median bandwidth, which does not feel who is who; K₀ has no diagonal. Where there are
as many keys as queries, a token's own query and key change places or do not (s = ±1), and with D = K_qq + K_kk - K_qk
- K_kq only s'Ds moves. Tokens of a sentence differ from each other, and a token's query and key go together: this
leaves both as they are, and the test is exact if (q, k) of a token might as well be (k, q). Elsewhere (cross-attention,
a cache) the tokens are dealt anew, as two-sample tests do.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignattn.diagnosis.draws import dealt, mixed, signs
from alignattn.matching.tokens import chunks_of

MEDIAN_TOKENS = 512  # above, the median is taken over a subset of this many


def permuted(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    query_mask: Bool[Tensor, "b n"],
    key_mask: Bool[Tensor, "b m"],
    *,
    sample: Int[Tensor, " b"],
    seed: int,
    permutations: int,
) -> Float[Tensor, "h permutations+1"]:
    """The sum over samples of MMD² as it is, and under each permutation. Samples of one token on a side give zero."""
    heads = query.shape[1]
    total = torch.zeros(heads, permutations + 1, dtype=torch.float64, device=query.device)
    for i, number in enumerate(sample.tolist()):
        queries, keys = query[i, :, query_mask[i]].float(), key[i, :, key_mask[i]].float()  # (h, n, d), (h, m, d)
        n, m = queries.shape[1], keys.shape[1]
        if min(n, m) < 2:
            continue
        tokens = torch.cat([queries, keys], 1)  # (h, t, d)
        if n == m:
            who = signs(seed, number, n, permutations + 1, query.device)
        else:
            who = dealt(seed, number, n, n + m, permutations + 1, query.device)
        step = chunks_of(heads, (n + m) * max(n + m, permutations + 1), query.device)
        for first in range(0, heads, step):
            kernel = _kernel(tokens[first : first + step])
            values = _swapped(kernel, who) if n == m else _relabelled(kernel, who)
            total[first : first + step] += values.double()
    return total


def _swapped(kernel: Float[Tensor, "h t t"], swaps: Float[Tensor, "n p"]) -> Float[Tensor, "h p"]:
    n = len(swaps)
    of_queries, of_keys, across = kernel[:, :n, :n], kernel[:, n:, n:], kernel[:, :n, n:]
    within = of_queries + of_keys
    between = across + across.mT
    difference, both = within - between, within + between
    for matrix in (difference, both):
        matrix.diagonal(0, 1, 2).zero_()
    same, other = 1 / (n * (n - 1)), 1 / n**2
    fixed = (same - other) / 2 * both.sum((1, 2)) - 2 * other * across.diagonal(0, 1, 2).sum(-1)
    moving = torch.einsum("np,hnp->hp", swaps, difference @ swaps)
    return fixed[:, None] + (same + other) / 2 * moving


def _relabelled(kernel: Float[Tensor, "h t t"], queries: Float[Tensor, "t p"]) -> Float[Tensor, "h p"]:
    kernel.diagonal(0, 1, 2).zero_()
    n = int(queries[:, 0].sum())
    m = len(queries) - n
    reached = kernel @ queries  # (h, t, p)
    of_queries = torch.einsum("tp,htp->hp", queries, reached)
    across = torch.einsum("tp,htp->hp", 1 - queries, reached)
    of_keys = kernel.sum((1, 2))[:, None] - of_queries - 2 * across
    return of_queries / (n * (n - 1)) + of_keys / (m * (m - 1)) - 2 * across / (n * m)


def _kernel(tokens: Float[Tensor, "h t d"]) -> Float[Tensor, "h t t"]:
    tokens = tokens - tokens.mean(1, keepdim=True)
    peak = tokens.abs().amax((1, 2), keepdim=True)
    tokens = tokens / torch.where(peak > 0, peak, 1.0)  # squares cannot overflow; the bandwidth goes with it
    squares = _squares(tokens)
    return torch.exp(squares / -_bandwidth(tokens, squares)[:, None, None])


def _squares(tokens: Float[Tensor, "h t d"]) -> Float[Tensor, "h t t"]:
    lengths = tokens.square().sum(-1)
    return torch.baddbmm(lengths[:, :, None] + lengths[:, None], tokens, tokens.mT, alpha=-2).clamp_min_(0.0)


def _bandwidth(tokens: Float[Tensor, "h t d"], squares: Float[Tensor, "h t t"]) -> Float[Tensor, " h"]:
    """The median of the squared distances of distinct tokens; their mean where more than half coincide."""
    count = tokens.shape[1]
    mean = 2 * tokens.square().sum((1, 2)) / max(1, count - 1)
    if count > MEDIAN_TOKENS:
        some = mixed(torch.arange(count, device=tokens.device)).topk(MEDIAN_TOKENS).indices
        squares, count = squares[:, some][:, :, some], MEDIAN_TOKENS
    pairs = torch.triu_indices(count, count, 1, device=tokens.device)
    apart = squares[:, pairs[0], pairs[1]]
    median = (apart.median(-1).values - (-apart).median(-1).values) / 2  # torch's is the lower of two
    typical = torch.where(median <= 8 * torch.finfo(median.dtype).eps * mean, mean, median)
    return torch.where(typical > 0, typical, 1.0)
