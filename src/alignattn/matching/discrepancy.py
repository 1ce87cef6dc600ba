"""Maximum mean discrepancy between queries and keys.

    MMD² = E k(q,q') + E k(k,k') - 2 E k(q,k),    k(x,y) = exp(-|x-y|²/(2 s²))

Gretton et al. 2012. Unbiased: q ≠ q' and k ≠ k', so two samples of one distribution give zero on average, and a
little less at times. `s = 1` is the "standard Gaussian kernel" with which Zhang et al. 2021 report 0.057 and 0.0038.
The median bandwidth, 2 s² = median of |x-y|² over the distinct pairs of valid tokens of the problem, makes it blind
to scale: shrinking all vectors is no alignment. It is held constant in the gradient.

Kernel sums and their gradients come out of one pass over tiles; no n×m matrix is kept. The median needs all pairs of
the problem, and takes them from at most 512 tokens.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.errors import ConfigError, checked, unknown
from alignattn.matching import kernels, scratch
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.opaque import opaque
from alignattn.matching.scale import OnOneScale
from alignattn.matching.tokens import (
    check_pair,
    chunks_of,
    cleared,
    full_precision,
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
    return _mmd(query, key, query_mask, key_mask, bandwidth, unbiased, without_own, kernels.EXACT)


def _mmd(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    bandwidth: Bandwidth,
    unbiased: bool,
    without_own: bool,
    products: str,
    scaled: OnOneScale | None = None,
) -> Float[Tensor, "b h"]:
    """`scaled`: how queries and keys were brought onto one scale. Their gradient goes past it then."""
    named = isinstance(bandwidth, str)
    settings = (str(bandwidth), 0.0) if named else ("", float(bandwidth))
    key = key.view_as(key) if key is query else key  # torch.compile wants them told apart
    key_mask = told_apart(query_mask, key_mask)
    own = without_own and query.shape[2] == key.shape[2]
    came = (query, key) if scaled is None else scaled.came
    losses: Tensor = _Discrepancy.apply(*came, query_mask, key_mask, scaled, *settings, unbiased, own, products)
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
        scaled: OnOneScale | None,
        *settings: Any,  # as _evaluate has them
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.dtypes = query.dtype, key.dtype
        ctx.way, kept = (None, ()) if scaled is None else (scaled.way, scaled.kept)
        if scaled is None:
            losses, *found = _evaluate(query, key, query_mask, key_mask, wanted, *settings)
        else:
            losses, *found = _by_kernels(kept[0], kept[1], query_mask, key_mask, wanted, *settings)
        ctx.save_for_backward(*found, *kept)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        gradients, rest = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        if ctx.way is not None:
            return *ctx.way.back(gradients, rest[1:], outer[0], rest[0]), *[None] * 8
        # In working precision up to here: a loss scaler's factor may be what keeps them from vanishing in fp16.
        of_query, of_key = (
            (gradient * outer[0][..., None, None]).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return of_query, of_key, *[None] * 8


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
    products: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, h] and what they are differentiated to, in queries and in keys. `typical` names a bandwidth."""
    if kernels.serve(query) and kernels.serve(key):
        settings = with_gradient, typical, bandwidth, unbiased, without_own, products
        return _by_kernels(query, key, query_mask, key_mask, *settings)[:3]
    samples, heads, ends = query.shape[0], query.shape[1], (query.shape[2], query.shape[2] + key.shape[2])
    tokens, squares, weight, peak = _placed(query, key, query_mask, key_mask)
    if typical:
        inverse = 1 / _typical_square(tokens, squares, weight, typical)
    else:  # beyond 1e8 s every distance that is not zero has kernel zero
        inverse = (peak / bandwidth).clamp_max(1e8).square() / 2
    v, w = weight[:, : ends[0]], weight[:, ends[0] :]
    n, m = v.sum(-1), w.sum(-1)
    least = 2 if unbiased else 1
    counted = (n >= least) & (m >= least)
    own = (v * w).sum(-1) if without_own else torch.zeros_like(n)  # pairs of a query and its own key
    # What a pair counts. One of a query and a key comes twice.
    within_x, within_y, across = (
        (factor / pairs.clamp_min(1)).masked_fill(~counted, 0.0)[:, None]
        for factor, pairs in (
            (1.0, n * (n - 1 if unbiased else n)),
            (1.0, m * (m - 1 if unbiased else m)),
            (-1.0, n * m - own),
        )
    )
    losses = torch.zeros_like(n)
    gradients = []
    for first, last, counts in (
        (0, ends[0], torch.cat([within_x * v, across * w], 1)),
        (ends[0], ends[1], torch.cat([across * v, within_y * w], 1)),
    ):
        apart = [0] if unbiased else []  # how far behind a token stand those that it is not paired with
        apart += [ends[0] if first == 0 else -ends[0]] if without_own else []
        pooled = _Pooled(tokens, squares, weight, counts, inverse)
        loss, gradient = _kernel_sum(pooled, slice(first, last), apart, with_gradient)
        losses += loss
        gradients.append(gradient.div_(peak[:, None, None]).unflatten(0, (samples, heads)))
    return losses.view(samples, heads), gradients[0], gradients[1]


def _by_kernels(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    with_gradient: bool,
    typical: str,
    bandwidth: float,
    unbiased: bool,
    without_own: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, and sums of the gradients."""
    from alignattn.matching.kernels.discrepancy import discrepancy

    inverse = _inverse_for_kernels(query, key, query_mask, key_mask, typical, bandwidth)
    how = {"unbiased": unbiased, "without_own": without_own, "with_gradient": with_gradient}
    return discrepancy(query, key, query_mask, key_mask, inverse, products=products, **how)


def _placed(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Float[Tensor, "p t d"], Float[Tensor, "p t"], Float[Tensor, "p t"], Float[Tensor, " p"]]:
    """Queries, then keys, of each problem; their squares; which of them count; and what they were divided by.

    The kernel sees differences alone. Around the mean, over the largest entry, squares cannot overflow.
    """
    sides = ((query, query_mask), (key, key_mask))
    tokens = torch.cat([cleared(side, mask) for side, mask in sides], 2).flatten(0, 1)
    weight = torch.cat([_weights(side, mask, tokens.dtype) for side, mask in sides], 1)
    peak = torch.maximum(tokens.amax((1, 2)), -tokens.amin((1, 2))).clamp_min(1.0)
    tokens /= peak[:, None, None]
    tokens -= (tokens.sum(1) / weight.sum(-1, keepdim=True).clamp_min(1))[:, None]
    return tokens, tokens.square().sum(-1), weight, peak


def _inverse_for_kernels(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    typical: str,
    bandwidth: float,
) -> Float[Tensor, " p"] | None:
    """1/(2 s²) of each problem; None: of the mean, which kernels find themselves."""
    if typical == "mean":
        return None
    if typical == "median":
        tokens, squares, weight, peak = _placed(query, key, query_mask, key_mask)
        return 1 / (_typical_square(tokens, squares, weight, typical).double() * peak.double().square())
    steepest = torch.finfo(torch.float32).max  # of a bandwidth beside which every distance is infinite
    return query.new_full((query.shape[0] * query.shape[1],), min(0.5 / bandwidth**2, steepest))


def _weights(tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None, dtype: torch.dtype) -> Tensor:
    """One for each token that counts, zero for others, in every problem."""
    samples, heads, count = tokens.shape[:3]
    given = torch.ones(samples, count, device=tokens.device) if mask is None else mask
    return given.to(dtype).repeat_interleave(heads, 0)


class _Pooled(NamedTuple):
    """Queries and keys of each problem in one row."""

    tokens: Float[Tensor, "p t d"]
    squares: Float[Tensor, "p t"]  # |x|²
    weight: Float[Tensor, "p t"]  # zero where a token does not count
    counts: Float[Tensor, "p t"]  # what the pair with a token counts
    inverse: Float[Tensor, " p"]  # 1 / (2 s²)


def _kernel_sum(
    pooled: _Pooled, side: slice, apart: list[int], with_gradient: bool
) -> tuple[Float[Tensor, " p"], Float[Tensor, "p n d"]]:
    """Σ_ij weight_i counts_j k(x_i, x_j), i in `side` and j any; and twice its gradient at x_i, tile by tile.

    Twice: what x_i does as the other of a pair is alike. The kernel is a power of two: on CPUs that was measured at a
    third of exp.
    """
    problems, length = pooled.tokens.shape[0], side.stop - side.start
    total = torch.zeros_like(pooled.inverse)
    gradient = torch.zeros_like(pooled.tokens[:, side])
    step = chunks_of(problems, length * pooled.tokens.shape[1], total.device)
    rows = chunks_of(length, pooled.tokens.shape[1] * min(step, problems), total.device)
    room = scratch.empty((min(step, problems), min(rows, length), pooled.tokens.shape[1]), pooled.tokens)
    for start in range(0, problems, step):
        tokens, squares, weight, counts, inverse = (tensor[start : start + step] for tensor in pooled)
        sharpness = (inverse / math.log(2))[:, None]
        heights = -sharpness * squares  # -|x|² of the exponent -|x - y|² = 2 x·y - |x|² - |y|²
        others = (2 * sharpness[..., None] * tokens).mT
        for first in range(side.start, side.stop, rows):
            tile = slice(first, min(first + rows, side.stop))
            own = tokens[:, tile]
            kernel = torch.baddbmm(heights[:, None], own, others, out=room[: len(own), : own.shape[1]])
            kernel.add_(heights[:, tile, None]).clamp_max_(0.0).exp2_().mul_(counts[:, None])
            for offset in apart:
                kernel.diagonal(first + offset, 1, 2).zero_()
            sums = kernel.sum(-1)
            total[start : start + step] += torch.linalg.vecdot(sums, weight[:, tile])
            if with_gradient:
                pull = (kernel @ tokens).addcmul_(sums[..., None], own, value=-1)
                pull *= 4 * inverse[:, None, None] * weight[:, tile, None]
                gradient[start : start + step, tile.start - side.start : tile.stop - side.start] = pull
    return total, gradient


def _squared_distances(x: Float[Tensor, "p n d"], y: Float[Tensor, "p m d"]) -> Float[Tensor, "p n m"]:
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[:, None, :]
    return torch.baddbmm(squares, x, y.mT, alpha=-2).clamp_min(0.0)


def _typical_square(
    tokens: Float[Tensor, "p t d"], squares: Float[Tensor, "p t"], weight: Float[Tensor, "p t"], which: str
) -> Float[Tensor, " p"]:
    """Median or mean of |x-y|² over the distinct pairs of valid tokens; `squares` are |x|² around their mean."""
    spread: Tensor = torch.linalg.vecdot(squares, weight)
    typical = 2 * spread / (weight.sum(-1) - 1).clamp_min(1)  # mean of |x-y|² over i ≠ j
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


class DiscrepancyMatcher(Matcher):
    """MMD has nothing to learn: queries and keys descend it."""

    config: DiscrepancyConfig
    separable = separable_by_heads = replayable = True

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
        config = self.config
        how = (config.bandwidth, config.unbiased, config.without_own, self.products, self.brought(query, key))
        return _mmd(query.flatten(0, 1), key.flatten(0, 1), query_mask, key_mask, *how)
