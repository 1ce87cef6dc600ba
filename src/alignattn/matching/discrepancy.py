"""Maximum mean discrepancy between queries and keys.

    MMD² = E k(q,q') + E k(k,k') - 2 E k(q,k),    k(x,y) = exp(-|x-y|²/(2 s²))

Gretton et al. 2012. Unbiased: q ≠ q' and k ≠ k', so two samples of one distribution give zero on average, and a
little less at times. `s = 1` is the "standard Gaussian kernel" with which Zhang et al. 2021 report 0.057 and 0.0038.
The median bandwidth, 2 s² = median of |x-y|² over the distinct pairs of valid tokens of the problem, makes it blind
to scale: shrinking all vectors is no alignment. It is held constant in the gradient.

Kernel sums and their gradients come out of one pass over tiles; no n×m matrix is kept. The median needs all pairs of
the problem, and takes them from at most 512 tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import ConfigError, checked, unknown
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.tokens import blank_padding, check_pair, chunks_of, full_precision, samples_with_tokens

BANDWIDTHS = ("median", "mean")
MEDIAN_TOKENS = 512  # above, the median is taken over a subset of this many tokens
Bandwidth = str | float | int


@dataclass(frozen=True, kw_only=True)
class DiscrepancyConfig(MatcherConfig):
    """Options of method "mmd"."""

    bandwidth: Bandwidth = "median"  # or "mean", or a number: the paper's kernel has 1.0
    unbiased: bool = True  # the biased form cannot reach zero: it has a floor of 1/n + 1/m

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bandwidth(self.bandwidth)


def check_bandwidth(bandwidth: Bandwidth) -> None:
    """A name, or a number above zero."""
    if isinstance(bandwidth, str):
        if bandwidth not in BANDWIDTHS:
            raise unknown("bandwidth", bandwidth, (*BANDWIDTHS, "a number > 0"))
    elif not 0 < bandwidth < float("inf"):
        raise ConfigError(f"bandwidth must be > 0 and finite, got {bandwidth}. The paper's kernel has 1.0.")


@checked(check_pair)
@full_precision
def mmd(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    *,
    bandwidth: Bandwidth = "median",
    unbiased: bool = True,
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h"]:
    """Squared MMD of queries [b, h, n, d] and keys [b, h, m, d], each problem for itself."""
    check_bandwidth(bandwidth)
    samples, heads = query.shape[:2]
    alive = samples_with_tokens(query_mask, key_mask)
    sides = []
    for tokens, mask in ((query, query_mask), (key, key_mask)):
        weight = torch.ones_like(tokens[:, 0, :, 0]) if mask is None else mask
        weight = weight.to(torch.float64 if tokens.dtype == torch.float64 else torch.float32)
        sides.append((blank_padding(tokens, mask).flatten(0, 1), weight.repeat_interleave(heads, 0)))
    (x, x_weight), (y, y_weight) = sides
    # The kernel sees differences alone. Around a token of the problem, over the largest entry, squares cannot overflow.
    with torch.no_grad():
        origin = ((x * x_weight[..., None]).sum(1) / x_weight.sum(-1, keepdim=True).clamp_min(1))[:, None]
        peak = torch.maximum(x.abs().amax((1, 2)), y.abs().amax((1, 2))).clamp_min(1.0)
        x_centred, y_centred = ((t - origin) / peak[:, None, None] for t in (x, y))
        if isinstance(bandwidth, str):
            inverse = 1 / _typical_square(x_centred, y_centred, x_weight, y_weight, bandwidth)
        else:  # beyond 1e8 s every distance that is not zero has kernel zero
            inverse = (peak / bandwidth).clamp_max(1e8).square() / 2
    x, y = ((t - origin) / peak[:, None, None] for t in (x, y))
    means = []
    for first, second, first_weight, second_weight in (
        (x, x, x_weight, x_weight),
        (y, y, y_weight, y_weight),
        (x, y, x_weight, y_weight),
    ):
        same = first is second
        total = _kernel_sum(first, second, first_weight, second_weight, inverse)
        count, other = first_weight.sum(-1), second_weight.sum(-1)
        if same and unbiased:
            total, pairs = total - count, count * (count - 1)  # k(x, x) = 1 on the diagonal
        else:
            pairs = count * other
        means.append(total / pairs.clamp_min(1))
    least = 2 if unbiased else 1
    counted = (x_weight.sum(-1) >= least) & (y_weight.sum(-1) >= least)
    if alive is not None:
        counted &= alive.repeat_interleave(heads)
    losses = means[0] + means[1] - 2 * means[2]
    return losses.masked_fill(~counted, 0.0).view(samples, heads)


def _squared_distances(x: Float[Tensor, "p n d"], y: Float[Tensor, "p m d"]) -> Float[Tensor, "p n m"]:
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[:, None, :]
    return torch.baddbmm(squares, x, y.mT, alpha=-2).clamp_min(0.0)


@torch.no_grad()
def _typical_square(
    x: Float[Tensor, "p n d"],
    y: Float[Tensor, "p m d"],
    x_weight: Float[Tensor, "p n"],
    y_weight: Float[Tensor, "p m"],
    which: str,
) -> Float[Tensor, " p"]:
    """Median or mean of |x-y|² over the distinct pairs of valid tokens, queries and keys pooled."""
    tokens, weight = torch.cat([x, y], 1), torch.cat([x_weight, y_weight], 1)
    count = weight.sum(-1)
    mean = (tokens * weight[..., None]).sum(1) / count.clamp_min(1)[:, None]
    spread = ((tokens - mean[:, None]).square().sum(-1) * weight).sum(-1)
    typical = 2 * spread / (count - 1).clamp_min(1)  # mean of |x-y|² over i ≠ j
    if which == "median":
        median = _median_square(tokens, weight)
        # More than half of the pairs may coincide but for rounding; then the mean tells the scale.
        coincide = median <= 8 * torch.finfo(median.dtype).eps * typical
        typical = torch.where(coincide, typical, median)
    nothing = typical <= torch.finfo(typical.dtype).tiny ** 0.75  # all tokens are one: any bandwidth gives zero
    return typical.masked_fill(nothing, 1.0)


def _median_square(tokens: Float[Tensor, "p t d"], weight: Float[Tensor, "p t"]) -> Float[Tensor, " p"]:
    count = min(tokens.shape[1], MEDIAN_TOKENS)
    if tokens.shape[1] > MEDIAN_TOKENS:
        # A fixed subset of the valid tokens in their order: how much padding there is, and where, changes nothing.
        valid = weight > 0
        rank = valid.long().cumsum(-1) - 1
        shuffled = (rank * 2654435761 % 2**32).masked_fill(~valid, 2**40)  # Knuth's multiplicative hash
        chosen = shuffled.topk(MEDIAN_TOKENS, largest=False).indices  # (p, 512)
        weight = weight.gather(1, chosen)
        tokens = tokens.gather(1, chosen[..., None].expand(-1, -1, tokens.shape[-1]))
    pairs = torch.triu_indices(count, count, 1, device=tokens.device)
    step = chunks_of(len(tokens), count * count, tokens.device)
    medians = []
    for start in range(0, len(tokens), step):
        part, kept = tokens[start : start + step], weight[start : start + step] > 0
        squares = _squared_distances(part, part)[:, pairs[0], pairs[1]]
        squares = squares.masked_fill(~(kept[:, pairs[0]] & kept[:, pairs[1]]), float("nan"))
        lower, upper = squares.nanmedian(-1).values, -(-squares).nanmedian(-1).values
        medians.append(((lower + upper) / 2).nan_to_num(0.0))
    return torch.cat(medians)


class _KernelSum(torch.autograd.Function):
    """sum_ij v_i w_j exp(-r |x_i - y_j|²), with both gradients from the pass that computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, v: Tensor, w: Tensor, r: Tensor) -> Tensor:
        total = torch.empty_like(r)
        x_gradient, y_gradient = torch.empty_like(x), torch.zeros_like(y)
        step = chunks_of(len(x), x.shape[1] * y.shape[1], x.device)
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            rows = chunks_of(x.shape[1], y.shape[1] * len(x[part]), x.device)
            column_sums = torch.zeros_like(w[part])
            for first in range(0, x.shape[1], rows):
                tile = slice(first, first + rows)
                kernel = torch.exp(-r[part, None, None] * _squared_distances(x[part, tile], y[part]))
                kernel *= v[part, tile, None] * w[part, None, :]
                row_sums = kernel.sum(-1)
                column_sums += kernel.sum(-2)
                x_gradient[part, tile] = kernel @ y[part] - row_sums[..., None] * x[part, tile]
                y_gradient[part] += kernel.mT @ x[part, tile]
            y_gradient[part] -= column_sums[..., None] * y[part]
            total[part] = column_sums.sum(-1)
        ctx.save_for_backward(x_gradient, y_gradient, r)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, y_gradient, r = ctx.saved_tensors
        factor = (2 * r * gradients[0])[:, None, None]
        return factor * x_gradient, factor * y_gradient, None, None, None


def _kernel_sum(x: Tensor, y: Tensor, v: Tensor, w: Tensor, r: Tensor) -> Float[Tensor, " p"]:
    total: Tensor = _KernelSum.apply(x, y, v, w, r)
    return total


class DiscrepancyMatcher(Matcher):
    """MMD has nothing to learn: queries and keys descend it."""

    config: DiscrepancyConfig

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        return mmd(
            query.flatten(0, 1),
            key.flatten(0, 1),
            bandwidth=self.config.bandwidth,
            unbiased=self.config.unbiased,
            query_mask=query_mask,
            key_mask=key_mask,
        )
