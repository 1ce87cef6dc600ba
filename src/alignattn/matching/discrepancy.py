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
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import ConfigError, checked, unknown
from alignattn.matching import kernels
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.opaque import opaque
from alignattn.matching.tokens import (
    blank_padding,
    check_pair,
    chunks_of,
    full_precision,
    samples_with_tokens,
    told_apart,
    upcast,
)

BANDWIDTHS = ("median", "mean")
MEDIAN_TOKENS = 512  # above, the median is taken over a subset of this many tokens
Bandwidth = str | float | int


@dataclass(frozen=True, kw_only=True)
class DiscrepancyConfig(MatcherConfig):
    """Options of method "mmd"."""

    bandwidth: Bandwidth = "median"  # or "mean", or a number: the paper's kernel has 1.0
    unbiased: bool = True  # the biased form cannot reach zero: it has a floor of 1/n + 1/m
    without_own: bool = False  # leave out a token's query against its own key, where there are as many of both

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
    without_own: bool = False,
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> Float[Tensor, "b h"]:
    """Squared MMD of queries [b, h, n, d] and keys [b, h, m, d], each problem for itself.

    `without_own` leaves the pairs (q_i, k_i) out, if n = m. In self-attention these are of one token, and no two
    independent samples: counted, they reward a query that meets its own key, most so in short sentences, and the value
    falls below zero. Without them it is unbiased all the same (Gretton et al. 2012, the one-sample U-statistic).
    """
    check_bandwidth(bandwidth)
    named = isinstance(bandwidth, str)
    settings = (str(bandwidth), 0.0) if named else ("", float(bandwidth))
    key = key.view_as(key) if key is query else key  # torch.compile wants them told apart
    key_mask = told_apart(query_mask, key_mask)
    losses: Tensor = _Discrepancy.apply(
        query, key, query_mask, key_mask, *settings, unbiased, without_own and query.shape[2] == key.shape[2]
    )
    return losses


class _Discrepancy(torch.autograd.Function):
    """The gradient comes out of the pass that computes the value: no n×m matrix waits for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        *settings: Any,  # as _evaluate has them
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        losses, *gradients = _evaluate(query, key, query_mask, key_mask, wanted, *settings)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = query.dtype, key.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # In working precision up to here: a loss scaler's factor may be what keeps them from vanishing in fp16.
        of_query, of_key = (
            (gradient * outer[0][..., None, None]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_query, of_key, None, None, None, None, None, None


def _like_evaluate(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    empty_query, empty_key = upcast(torch.empty_like(query)), upcast(torch.empty_like(key))
    return empty_query.new_empty(query.shape[:2]), empty_query, empty_key


@opaque("mmd", like=_like_evaluate)
def _evaluate(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_gradient: bool,
    typical: str,
    bandwidth: float,
    unbiased: bool,
    without_own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, h] and what they are differentiated to, in queries and in keys. `typical` names a bandwidth."""
    if typical != "median" and kernels.serve(query) and kernels.serve(key):
        from alignattn.matching.kernels.discrepancy import discrepancy

        steepest = torch.finfo(torch.float32).max  # of a bandwidth beside which every distance is infinite
        sharpness = 0.0 if typical else min(0.5 / bandwidth**2, steepest)
        inverse = None if typical else query.new_full((query.shape[0] * query.shape[1],), sharpness)
        how = {"unbiased": unbiased, "without_own": without_own, "with_gradient": with_gradient}
        return discrepancy(query, key, query_mask, key_mask, inverse, **how)
    samples, heads = query.shape[:2]
    alive = samples_with_tokens(query_mask, key_mask)
    sides = []
    for tokens, mask in ((query, query_mask), (key, key_mask)):
        weight = torch.ones_like(tokens[:, 0, :, 0]) if mask is None else mask
        weight = weight.to(torch.float64 if tokens.dtype == torch.float64 else torch.float32)
        sides.append((blank_padding(tokens, mask).flatten(0, 1), weight.repeat_interleave(heads, 0)))
    (x, v), (y, w) = sides
    # The kernel sees differences alone. Around a token of the problem, over the largest entry, squares cannot overflow.
    origin = ((x * v[..., None]).sum(1) / v.sum(-1, keepdim=True).clamp_min(1))[:, None]
    peak = torch.maximum(x.abs().amax((1, 2)), y.abs().amax((1, 2))).clamp_min(1.0)
    x, y = ((t - origin) / peak[:, None, None] for t in (x, y))
    if typical:
        inverse = 1 / _typical_square(x, y, v, w, typical)
    else:  # beyond 1e8 s every distance that is not zero has kernel zero
        inverse = (peak / bandwidth).clamp_max(1e8).square() / 2
    least = 2 if unbiased else 1
    n, m = v.sum(-1), w.sum(-1)
    counted = (n >= least) & (m >= least)
    if alive is not None:
        counted &= alive.repeat_interleave(heads)
    own = (v * w).sum(-1) if without_own else torch.zeros_like(n)  # pairs of a query and its own key
    shares = [
        (factor / pairs.clamp_min(1)).masked_fill(~counted, 0.0)
        for factor, pairs in (
            (1.0, n * (n - 1 if unbiased else n)),
            (1.0, m * (m - 1 if unbiased else m)),
            (-2.0, n * m - own),
        )
    ]
    totals, x_gradient, y_gradient = _by_matrices(_Sides(x, y, v, w, inverse), shares, without_own, with_gradient)
    if unbiased:  # k(x, x) = 1 on the diagonal
        totals = (totals[0] - n, totals[1] - m, totals[2])
    losses = sum((total * share for total, share in zip(totals, shares, strict=True)), start=torch.zeros_like(inverse))
    x_gradient, y_gradient = (
        (g / peak[:, None, None]).unflatten(0, (samples, heads)) for g in (x_gradient, y_gradient)
    )
    return losses.view(samples, heads), x_gradient, y_gradient


class _Sides(NamedTuple):
    """Queries and keys of some problems, which of them count, and the kernel's 1/(2 s²)."""

    x: Float[Tensor, "p n d"]
    y: Float[Tensor, "p m d"]
    v: Float[Tensor, "p n"]
    w: Float[Tensor, "p m"]
    inverse: Float[Tensor, " p"]


Sums = tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]


def _by_matrices(sides: _Sides, shares: list[Tensor], without_own: bool, with_gradient: bool) -> Sums:
    """The same, tile by tile."""
    x, y, v, w, inverse = sides
    x_gradient, y_gradient = torch.zeros_like(x), torch.zeros_like(y)
    totals = []
    for first, second, one, other, share, gradients in (
        (x, x, v, v, shares[0], (x_gradient, None)),
        (y, y, w, w, shares[1], (y_gradient, None)),
        (x, y, v, w, shares[2], (x_gradient, y_gradient)),
    ):
        places = gradients if with_gradient else (None, None)
        totals.append(_kernel_sum(first, second, one, other, inverse, share, places))
    if without_own:
        apart = x - y
        kernel = torch.exp(-inverse[:, None] * apart.square().sum(-1)) * v * w  # (p, n)
        totals[2] = totals[2] - kernel.sum(-1)
        if with_gradient:
            pull = (2 * inverse * shares[2])[:, None, None] * kernel[..., None] * apart
            x_gradient += pull
            y_gradient -= pull
    return (totals[0], totals[1], totals[2]), x_gradient, y_gradient


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


def _kernel_sum(
    x: Float[Tensor, "p n d"],
    y: Float[Tensor, "p m d"],
    v: Float[Tensor, "p n"],
    w: Float[Tensor, "p m"],
    r: Float[Tensor, " p"],
    share: Float[Tensor, " p"],
    gradients: tuple[Tensor | None, Tensor | None],
) -> Float[Tensor, " p"]:
    """sum_ij v_i w_j exp(-r |x_i - y_j|²); its gradients, times `share`, are added to those given.

    With no place for y's gradient y is x, and x's counts twice.
    """
    x_gradient, y_gradient = gradients
    total = torch.empty_like(r)
    step = chunks_of(len(x), x.shape[1] * y.shape[1], x.device)
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        rows = chunks_of(x.shape[1], y.shape[1] * len(x[part]), x.device)
        factor = (2 * r * share)[part, None, None]
        column_sums = torch.zeros_like(w[part])
        for first in range(0, x.shape[1], rows):
            tile = slice(first, first + rows)
            kernel = _squared_distances(x[part, tile], y[part]).mul_(-r[part, None, None]).exp_()
            kernel *= v[part, tile, None] * w[part, None, :]
            column_sums += kernel.sum(-2)
            if x_gradient is not None:
                pull = kernel @ y[part] - kernel.sum(-1)[..., None] * x[part, tile]
                x_gradient[part, tile] += (factor if y_gradient is not None else 2 * factor) * pull
            if y_gradient is not None:
                y_gradient[part] += factor * (kernel.mT @ x[part, tile])
        if y_gradient is not None:
            y_gradient[part] -= factor * (column_sums[..., None] * y[part])
        total[part] = column_sums.sum(-1)
    return total


class DiscrepancyMatcher(Matcher):
    """MMD has nothing to learn: queries and keys descend it."""

    config: DiscrepancyConfig
    separable = replayable = True

    def is_replayable(self) -> bool:
        """A median is sorted for, which may wait for the device."""
        return self.config.bandwidth != "median" and super().is_replayable()

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
            without_own=self.config.without_own,
            query_mask=query_mask,
            key_mask=key_mask,
        )
