"""MMD of many problems and its gradient in two kernels, whatever their length: no matrix of kernels is stored.

For each token x_i of one side, with the tokens x_j of its own side, y_j of the other, and k = exp(-r |x-y|²),

    within_i = Σ_j k(x_i, x_j),   across_i = Σ_j k(x_i, y_j)
    gradient_i = 4 r a Σ_j k(x_i, x_j) (x_j - x_i) + 2 r c Σ_j k(x_i, y_j) (y_j - x_i)
    loss = a_q Σ_i within_i + a_k Σ_i within_i + c Σ_i across_i

A first kernel tells mean, size, r, a and c of each problem. A second places tokens about the mean and over the largest
entry, so that no square overflows, as halves (halves.py), with their squares. In a third a program serves some tokens
of one side of a problem; kernels are made tile by tile in registers. Nothing is added atomically: results are the same
each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import ROOM, product, read_halves, split
from alignattn.matching.kernels.scale import put_felt
from alignattn.matching.kernels.tiles import (
    TILE,
    TWO,
    as_bytes,
    launch,
    read,
    spread,
    total,
    valid_rows,
    width_of,
    write,
)

FACTORS = 5  # of a problem: its size, r, a of queries and of keys, c
WITHIN = tl.constexpr(2.0**13)  # of halves: placed, no number is above two


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
    queries_at, keys_at = query + problem * n * d, key + problem * m * d
    of_query, of_queries, queries, largest_query = total(
        queries_at, query_mask, sample, n, d, d, ROWS, WIDTH, QUERY_MASKED
    )
    of_key, of_keys, keys, largest_key = total(keys_at, key_mask, sample, m, d, d, ROWS, WIDTH, KEY_MASKED)
    count = queries + keys
    mean = ((of_query + of_key) / tl.maximum(count, 1.0)).to(tl.float32)
    tl.store(means + problem * d + e, mean, mask=e < d)
    size = tl.maximum(tl.maximum(largest_query, largest_key), 1.0).to(tl.float64)
    if GIVEN:  # beyond 1e8 bandwidths every distance that is not zero has kernel zero
        r = tl.minimum(tl.load(given + problem).to(tl.float64) * size * size, 0.5e16)
    else:
        about = spread(of_queries + of_keys, of_query + of_key, count)
        typical = 2.0 * about / (size * size) / tl.maximum(count - 1.0, 1.0)
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
def _place(
    query, key, query_mask, key_mask, means, factors, query_high, query_low, key_high, key_low, query_squares,
    key_squares, heads, n, m, d, blocks, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FACTORS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    e = tl.arange(0, WIDTH)
    mean = tl.load(means + problem * d + e, mask=e < d, other=0.0)
    by = WITHIN / tl.load(factors + problem * FACTORS)
    if place < blocks:
        _place_side(
            query, query_mask, mean, by, query_high, query_low, query_squares, problem, sample, place, n, d,
            ROWS, WIDTH, QUERY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _place_side(
            key, key_mask, mean, by, key_high, key_low, key_squares, problem, sample, place - blocks, m, d,
            ROWS, WIDTH, KEY_MASKED, PARTS,
        )  # fmt: skip


@triton.jit
def _place_side(
    tokens, mask, mean, by, high, low, squares, problem, sample, block, count, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(mask, sample, i, count, MASKED)
    values = (read(tokens, problem, i, valid, count, d, WIDTH) - mean[None, :]) * by
    values = tl.where(valid[:, None], values, 0.0)
    first, second, seen = split(values, PARTS)
    write(high, first, problem, i, count, d, WIDTH)
    if PARTS == 3:
        write(low, second, problem, i, count, d, WIDTH)
    seen = tl.where((tl.arange(0, WIDTH) < d)[None, :], seen, 0.0) / WITHIN
    tl.store(squares + problem * count + i, tl.sum(seen * seen, 1), mask=i < count)


@triton.jit
def _toward(
    own, own_rest, height, i, high, low, squares, mask, sharpness, pulled, weighed, problem, sample, count, d,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Σ_j k; and `pulled` with Σ_j k y_j added, `weighed` with Σ_j k: both times ROOM, the first times WITHIN."""
    # The kernel is a power of two, of -|x - y|² = 2 x·y - |x|² - |y|² times its sharpness.
    by = 2.0 * sharpness / (WITHIN * WITHIN)
    summed = tl.zeros([ROWS], tl.float32)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        valid = valid_rows(mask, sample, j, count, MASKED)
        other, rest = read_halves(high, low, problem, j, count, d, WIDTH, PARTS)
        square = tl.load(squares + problem * count + j, mask=j < count, other=0.0)
        across = tl.where(valid, -sharpness * square, float("-inf"))
        near = product(own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS)
        kernel = tl.exp2(tl.minimum(near * by + height[:, None] + across[None, :], 0.0))
        if OWN != "as it is":  # known, and a product of parts would round it
            kernel = tl.where((i[:, None] == j[None, :]) & valid[None, :], 1.0 if OWN == "one" else 0.0, kernel)
        summed += tl.sum(kernel, 1)
        if WITH_GRADIENT:
            above, below, seen = split(kernel * ROOM, PARTS)
            weighed += tl.sum(seen, 1)
            pulled = product(above, below, other, rest, pulled, PARTS)
    return summed, pulled, weighed


@triton.jit
def _side(
    own_high, own_low, own_squares, own_mask, high, low, squares, other_mask, gradient, losses, means, sums, size, r, a,
    c, problem, sample, block, place, places, count, others, d, COUNT_ACROSS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OWN_MASKED: tl.constexpr,
    OTHER_MASKED: tl.constexpr, UNBIASED: tl.constexpr, WITHOUT_OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(own_mask, sample, i, count, OWN_MASKED)
    sharpness = r * 1.4426950408889634  # over the logarithm of two
    own, own_rest = read_halves(own_high, own_low, problem, i, count, d, WIDTH, PARTS)
    height = -sharpness * tl.load(own_squares + problem * count + i, mask=i < count, other=0.0)
    pulled, weighed = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float32)
    within, pulled, weighed = _toward(
        own, own_rest, height, i, own_high, own_low, own_squares, own_mask, sharpness, pulled, weighed, problem, sample,
        count, d, ROWS, COLUMNS, WIDTH, OWN_MASKED, "none" if UNBIASED else "one", WITH_GRADIENT, PARTS,
    )  # fmt: skip
    more = 2.0 * a / tl.where(c == 0.0, 1.0, c)  # than the other side's these count: one sum holds both
    across, pulled, weighed = _toward(
        own, own_rest, height, i, high, low, squares, other_mask, sharpness, pulled * more, weighed * more, problem,
        sample, others, d, ROWS, COLUMNS, WIDTH, OTHER_MASKED, "none" if WITHOUT_OWN else "as it is", WITH_GRADIENT,
        PARTS,
    )  # fmt: skip
    loss = a * within
    if COUNT_ACROSS:
        loss += c * across
    tl.store(losses + problem * places + place, tl.sum(tl.where(valid, loss, 0.0), 0))
    if WITH_GRADIENT:
        seen = own.to(tl.float32)
        if PARTS == 3:
            seen += own_rest.to(tl.float32)
        values = (pulled - weighed[:, None] * seen) * (2.0 * r * c / (size * ROOM * WITHIN))
        values = tl.where(valid[:, None], values, 0.0)
        write(gradient, values, problem, i, count, d, WIDTH)
        mean = tl.load(means + problem * d + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < d, other=0.0)
        put_felt(sums, problem * places + place, values, seen, size / WITHIN, mean, d, WIDTH)


@triton.jit
def _sums(
    query_high, query_low, key_high, key_low, query_squares, key_squares, query_mask, key_mask, means, factors, losses,
    of_query, of_key, sums, heads, n, m, d, blocks, places,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FACTORS: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, UNBIASED: tl.constexpr, WITHOUT_OWN: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    sample = problem // heads
    at = factors + problem * FACTORS
    size, r, c = tl.load(at), tl.load(at + 1), tl.load(at + 4)
    if place < blocks:
        _side(
            query_high, query_low, query_squares, query_mask, key_high, key_low, key_squares, key_mask, of_query,
            losses, means, sums, size, r, tl.load(at + 2), c, problem, sample, place, place, places, n, m, d, True,
            ROWS, COLUMNS, WIDTH, QUERY_MASKED, KEY_MASKED, UNBIASED, WITHOUT_OWN, WITH_GRADIENT, PARTS,
        )  # fmt: skip
    else:
        _side(
            key_high, key_low, key_squares, key_mask, query_high, query_low, query_squares, query_mask, of_key,
            losses, means, sums, size, r, tl.load(at + 3), c, problem, sample, place - blocks, place, places, m, n, d,
            False, ROWS, COLUMNS, WIDTH, KEY_MASKED, QUERY_MASKED, UNBIASED, WITHOUT_OWN, WITH_GRADIENT, PARTS,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [b, h], their gradients in queries and keys [b, h, tokens, d], and sums of these as scale.py takes them.

    Where they are not asked for gradients are zeros, and sums anything.

    `inverse` [b h] is 1/(2 s²) of the bandwidths; None: of the mean squared distance in each problem.
    """
    (samples, heads, n, d), m = query.shape, key.shape[2]
    problems, width = samples * heads, width_of(query)
    query, key = query.contiguous(), key.contiguous()
    masks = as_bytes(query_mask, key_mask, query)
    means, factors = query.new_empty(problems, d), query.new_empty(problems, FACTORS)
    masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
    same = {"WIDTH": width, "FACTORS": FACTORS, **masked}
    kind = {"UNBIASED": unbiased, "WITHOUT_OWN": without_own}
    given = query if inverse is None else inverse.contiguous()
    sizes = heads, n, m, d
    tokens = (query, key, *masks)
    launch(
        _statistics, problems, *tokens, given, means, factors, *sizes,
        ROWS=TILE if width <= TILE else TILE // 2, GIVEN=inverse is not None, num_warps=8, maxnreg=TWO, **same, **kind,
    )  # fmt: skip
    # Tiles of wide tokens must fit the shared memory of smaller devices too.
    largest = 2 * TILE if width <= TILE else TILE
    rows = min(largest, max(16, triton.next_power_of_2(max(n, m))))
    blocks = triton.cdiv(n, rows)
    places = blocks + triton.cdiv(m, rows)
    parts = 3 if products == EXACT else 1
    placed = [
        torch.empty_like(side, dtype=torch.float16) for side in (query, key) for _ in range(2 if parts == 3 else 1)
    ]
    placed = placed if parts == 3 else [placed[0], placed[0], placed[1], placed[1]]
    squares = [query.new_empty(problems, count) for count in (n, m)]
    launch(
        _place, problems * places, *tokens, means, factors, *placed, *squares, *sizes, blocks, places,
        ROWS=rows, PARTS=parts, **same,
    )  # fmt: skip
    losses, sums = query.new_empty(problems, places), query.new_empty(problems, places, d + 1)
    two = {"maxnreg": TWO} if parts == 1 and width <= TILE else {}  # others would leave the registers
    gradients = [torch.empty_like(side) if with_gradient else torch.zeros_like(side) for side in (query, key)]
    launch(
        _sums, problems * places, *placed, *squares, *masks, means, factors, losses, *gradients, sums, *sizes, blocks,
        places, ROWS=rows, COLUMNS=min(rows, TILE if width <= TILE else TILE // 2), WITH_GRADIENT=with_gradient,
        PARTS=parts, num_warps=8 if rows > TILE or width > TILE else 4, num_stages=2, **two, **same, **kind,
    )  # fmt: skip
    return losses.sum(-1).view(samples, heads), gradients[0], gradients[1], sums
