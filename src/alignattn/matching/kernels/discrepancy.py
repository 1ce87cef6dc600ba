"""MMD of many problems and its gradient in two kernels, whatever their length: no matrix of kernels is stored.

For each token x_i of one side, with the tokens x_j of its own side, y_j of the other, and k = exp(-r |x-y|²),

    within_i = Σ_j k(x_i, x_j),   across_i = Σ_j k(x_i, y_j)
    gradient_i = 4 r a Σ_j k(x_i, x_j) (x_j - x_i) + 2 r c Σ_j k(x_i, y_j) (y_j - x_i)
    loss = a_q Σ_i within_i + a_k Σ_i within_i + c Σ_i across_i

A first kernel tells mean, size, r, a and c of each problem. Then a program serves some tokens of one side of a problem,
about the mean and over the largest entry, so that no square overflows; kernels are made tile by tile in registers.
Nothing is added atomically: results are the same each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels.tiles import (
    TILE,
    as_bytes,
    as_products_see,
    launch,
    read,
    spread,
    total,
    valid_rows,
    width_of,
    write,
)

FACTORS = 5  # of a problem: its size, r, a of queries and of keys, c


@triton.jit
def _own_pairs(query_mask, key_mask, sample, n, ROWS: tl.constexpr, QUERY: tl.constexpr, KEY: tl.constexpr):
    pairs = tl.zeros([ROWS], tl.float64)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        both = valid_rows(query_mask, sample, i, n, QUERY) & valid_rows(key_mask, sample, i, n, KEY)
        pairs += both.to(tl.float64)
    return tl.sum(pairs, 0)


@triton.jit
def _statistics(
    query, key, query_mask, key_mask, given, means, factors, heads, n, m, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FACTORS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, GIVEN: tl.constexpr, UNBIASED: tl.constexpr, WITHOUT_OWN: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    sample = problem // heads
    e = tl.arange(0, WIDTH)
    of_query, queries, largest_query = total(query, query_mask, problem, sample, n, d, ROWS, WIDTH, QUERY_MASKED)
    of_key, keys, largest_key = total(key, key_mask, problem, sample, m, d, ROWS, WIDTH, KEY_MASKED)
    count = queries + keys
    mean = ((of_query + of_key) / tl.maximum(count, 1.0)).to(tl.float32)
    tl.store(means + problem * d + e, mean, mask=e < d)
    size = tl.maximum(tl.maximum(largest_query, largest_key), 1.0).to(tl.float64)
    if GIVEN:  # beyond 1e8 bandwidths every distance that is not zero has kernel zero
        r = tl.minimum(tl.load(given + problem).to(tl.float64) * size * size, 0.5e16)
    else:
        squares = spread(query, query_mask, mean, problem, sample, n, d, ROWS, WIDTH, QUERY_MASKED)
        squares += spread(key, key_mask, mean, problem, sample, m, d, ROWS, WIDTH, KEY_MASKED)
        typical = 2.0 * squares / (size * size) / tl.maximum(count - 1.0, 1.0)
        r = 1.0 / tl.where(typical <= 1e-28, 1.0, typical)  # all tokens are one: any bandwidth gives zero
    own = 0.0 * count
    if WITHOUT_OWN:
        own += _own_pairs(query_mask, key_mask, sample, n, ROWS, QUERY_MASKED, KEY_MASKED)
    less = 1.0 if UNBIASED else 0.0
    counts = (queries > less) & (keys > less)
    a_query = tl.where(counts, 1.0 / tl.maximum(queries * (queries - less), 1.0), 0.0)
    a_key = tl.where(counts, 1.0 / tl.maximum(keys * (keys - less), 1.0), 0.0)
    c = tl.where(counts, -2.0 / tl.maximum(queries * keys - own, 1.0), 0.0)
    to = factors + problem * FACTORS
    tl.store(to, size.to(tl.float32))
    tl.store(to + 1, r.to(tl.float32))
    tl.store(to + 2, a_query.to(tl.float32))
    tl.store(to + 3, a_key.to(tl.float32))
    tl.store(to + 4, c.to(tl.float32))


@triton.jit
def _placed(tokens, mean, inverse, problem, i, valid, count, d, WIDTH: tl.constexpr):
    values = (read(tokens, problem, i, valid, count, d, WIDTH) - mean[None, :]) * inverse
    return tl.where(valid[:, None], values, 0.0)


@triton.jit
def _toward(
    own, i, tokens, mask, mean, inverse, sharpness, problem, sample, count, d,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The kernel is a power of two, of -|x - y|² = 2 x·y - |x|² - |y|² times its sharpness.
    height = -sharpness * tl.sum(own * own, 1)
    sharpened = (2.0 * sharpness) * own
    summed, weighed = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    pulled = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        valid = valid_rows(mask, sample, j, count, MASKED)
        other = _placed(tokens, mean, inverse, problem, j, valid, count, d, WIDTH)
        across = tl.where(valid, -sharpness * tl.sum(other * other, 1), float("-inf"))
        product = tl.dot(sharpened, tl.trans(other), input_precision=PRECISION)
        kernel = tl.exp2(tl.minimum(product + height[:, None] + across[None, :], 0.0))
        if OWN != "as it is":  # known, and a product of parts would round it
            kernel = tl.where((i[:, None] == j[None, :]) & valid[None, :], 1.0 if OWN == "one" else 0.0, kernel)
        summed += tl.sum(kernel, 1)
        if WITH_GRADIENT:
            kernel = as_products_see(kernel, PRECISION)
            weighed += tl.sum(kernel, 1)
            pulled += tl.dot(kernel, other, input_precision=PRECISION)
    return summed, pulled - weighed[:, None] * own


@triton.jit
def _side(
    own, other, own_mask, other_mask, gradient, losses, mean, size, r, a, c, problem, sample, block,
    place, places, count, others, d, COUNT_ACROSS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, UNBIASED: tl.constexpr, WITHOUT_OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(own_mask, sample, i, count, OWN_MASKED)
    inverse, sharpness = 1.0 / size, r * 1.4426950408889634  # over the logarithm of two
    mine = _placed(own, mean, inverse, problem, i, valid, count, d, WIDTH)
    within, drawn = _toward(
        mine, i, own, own_mask, mean, inverse, sharpness, problem, sample, count, d,
        ROWS, COLUMNS, WIDTH, OWN_MASKED, "none" if UNBIASED else "one", WITH_GRADIENT, PRECISION,
    )  # fmt: skip
    across, pulled = _toward(
        mine, i, other, other_mask, mean, inverse, sharpness, problem, sample, others, d,
        ROWS, COLUMNS, WIDTH, OTHER_MASKED, "none" if WITHOUT_OWN else "as it is", WITH_GRADIENT, PRECISION,
    )  # fmt: skip
    loss = a * within
    if COUNT_ACROSS:
        loss += c * across
    tl.store(losses + problem * places + place, tl.sum(tl.where(valid, loss, 0.0), 0))
    if WITH_GRADIENT:
        values = (4.0 * r * a / size) * drawn + (2.0 * r * c / size) * pulled
        write(gradient, tl.where(valid[:, None], values, 0.0), problem, i, count, d, WIDTH)


@triton.jit
def _sums(
    query, key, query_mask, key_mask, means, factors, losses, of_query, of_key, heads, n, m, d, blocks, places,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FACTORS: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, UNBIASED: tl.constexpr, WITHOUT_OWN: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    e = tl.arange(0, WIDTH)
    mean = tl.load(means + problem * d + e, mask=e < d, other=0.0)
    at = factors + problem * FACTORS
    size, r, c = tl.load(at), tl.load(at + 1), tl.load(at + 4)
    if place < blocks:
        _side(
            query, key, query_mask, key_mask, of_query, losses, mean, size, r, tl.load(at + 2), c, problem, sample,
            place, place, places, n, m, d, True,
            ROWS, COLUMNS, WIDTH, QUERY_MASKED, KEY_MASKED, UNBIASED, WITHOUT_OWN, WITH_GRADIENT, PRECISION,
        )  # fmt: skip
    else:
        _side(
            key, query, key_mask, query_mask, of_key, losses, mean, size, r, tl.load(at + 3), c, problem, sample,
            place - blocks, place, places, m, n, d, False,
            ROWS, COLUMNS, WIDTH, KEY_MASKED, QUERY_MASKED, UNBIASED, WITHOUT_OWN, WITH_GRADIENT, PRECISION,
        )  # fmt: skip


def discrepancy(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    inverse: Tensor | None,
    *,
    unbiased: bool,
    without_own: bool,
    with_gradient: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, h], and their gradients in queries and keys [b, h, tokens, d], zeros where they are not asked for.

    `inverse` [b h] is 1/(2 s²) of the bandwidths; None: of the mean squared distance in each problem.
    """
    (samples, heads, n, d), m = query.shape, key.shape[2]
    problems, width = samples * heads, width_of(query)
    query, key = query.contiguous(), key.contiguous()
    masks = as_bytes(query_mask, key_mask, query)
    means, factors = query.new_empty(problems, d), query.new_empty(problems, FACTORS)
    same = {
        "WIDTH": width,
        "FACTORS": FACTORS,
        "QUERY_MASKED": query_mask is not None,
        "KEY_MASKED": key_mask is not None,
        "UNBIASED": unbiased,
        "WITHOUT_OWN": without_own,
    }
    given = query if inverse is None else inverse.contiguous()
    sizes = heads, n, m, d
    launch(
        _statistics,
        problems,
        query,
        key,
        *masks,
        given,
        means,
        factors,
        *sizes,
        ROWS=TILE,
        GIVEN=inverse is not None,
        **same,
    )
    # Tiles of wide tokens must fit the shared memory of smaller devices too.
    largest = 2 * TILE if width <= 64 else TILE // 2
    rows = min(largest, max(16, triton.next_power_of_2(max(n, m))))
    blocks = triton.cdiv(n, rows)
    places = blocks + triton.cdiv(m, rows)
    losses = query.new_empty(problems, places)
    gradients = [torch.empty_like(side) if with_gradient else torch.zeros_like(side) for side in (query, key)]
    launch(
        _sums, problems * places, query, key, *masks, means, factors, losses, *gradients, *sizes, blocks, places,
        ROWS=rows, COLUMNS=min(rows, TILE), WITH_GRADIENT=with_gradient, PRECISION=products,
        num_warps=8 if rows > TILE else 4, num_stages=2, **same,
    )  # fmt: skip
    return losses.sum(-1).view(samples, heads), gradients[0], gradients[1]
