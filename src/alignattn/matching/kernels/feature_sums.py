"""The distance of features (features.py), of what is kept of each tile of tokens: nothing passes over features again.

    Σ |x - c|² = Σ_tiles ( squares + count |mean - c|² ),   Σ (x - c)·(y - c) likewise

A record of a tile holds means of both sides and, where padding leaves some pairs out, sums of what is in pairs about
them; then numbers: of each side how many tokens there are, how many are told apart, and squares about the mean; how
many pairs, and their products about the means. Told of each problem, besides the distance: the centre, what all
features of a side feel, and the multiples of themselves and their own pairs they feel.
"""

import torch
import triton
import triton.language as tl

BLOCKS = 8  # tiles at a time
VECTORS = tl.constexpr(4)
NUMBERS = 8
ROUNDING = (64 * torch.finfo(torch.float32).eps) ** 2  # of features that are all one


@triton.jit
def put(record, at, k, vector, e):
    """A vector of a record."""
    tl.store(record + at * e + k, vector, mask=k < e)


@triton.jit
def _rows(records, at, b, e, blocks, size, HIDDEN: tl.constexpr):
    """A vector of each of these tiles."""
    k = tl.arange(0, HIDDEN)
    inside = (b[:, None] < blocks) & (k[None, :] < e)
    return tl.load(records + b[:, None] * size + at * e + k[None, :], mask=inside, other=0.0)


@triton.jit
def _numbers(records, at, b, e, blocks, size):
    return tl.load(records + b * size + VECTORS * e + at, mask=b < blocks, other=0.0)


@triton.jit
def _totals(records, side, blocks, e, size, HIDDEN: tl.constexpr, BLOCKS: tl.constexpr):
    """Of a side: features, squares of means, how many tokens there are and are told apart, and squares about means."""
    summed, squares = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    many, right, within = tl.zeros([BLOCKS], tl.float32), tl.zeros([BLOCKS], tl.float32), tl.zeros([BLOCKS], tl.float32)
    for start in range(0, blocks, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        mean = _rows(records, side, b, e, blocks, size, HIDDEN)
        count = _numbers(records, 3 * side, b, e, blocks, size)
        summed += tl.sum(mean * count[:, None], 0)
        squares += tl.sum(mean * mean * count[:, None], 0)
        many += count
        right += _numbers(records, 3 * side + 1, b, e, blocks, size)
        within += _numbers(records, 3 * side + 2, b, e, blocks, size)
    return summed, tl.sum(squares, 0), tl.sum(many, 0), tl.sum(right, 0), tl.sum(within, 0)


@triton.jit
def _about(records, side, centre, b, e, blocks, size, HIDDEN: tl.constexpr):
    """Means of these tiles about the centre; with their squares added up, times how many tokens there are."""
    x = _rows(records, side, b, e, blocks, size, HIDDEN) - centre[None, :]
    count = _numbers(records, 3 * side, b, e, blocks, size)[:, None]
    return x, tl.sum(x * count, 0), tl.sum(x * x * count, 0)


@triton.jit
def _put_numbers(to, one, other):
    tl.store(to, one)
    tl.store(to + 1, other)


@triton.jit
def distance(  # noqa: PLR0915
    records, felt, distances, accuracies, n, m, e, blocks, size, rounding,
    HIDDEN: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, HAS_OWN: tl.constexpr,
):  # fmt: skip
    """Of one problem."""
    problem = tl.program_id(0).to(tl.int64)
    records += problem * blocks * size
    k = tl.arange(0, HIDDEN)
    sum_q, square_q, many_q, right_q, within_q = _totals(records, 0, blocks, e, size, HIDDEN, BLOCKS)
    sum_k, square_k, many_k, right_k, within_k = _totals(records, 1, blocks, e, size, HIDDEN, BLOCKS)
    count_q, count_k = tl.maximum(many_q, 1.0), tl.maximum(many_k, 1.0)
    tl.store(accuracies + problem, (right_q / count_q + right_k / count_k) / 2)
    whole = ((square_q + within_q) / (n * e) + (square_k + within_k) / (m * e)) / 2
    centre = (sum_q / count_q + sum_k / count_k) / 2
    sum_x, sum_y = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    squares_x, squares_y = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    products, apart = tl.zeros([HIDDEN], tl.float32), tl.zeros([HIDDEN], tl.float32)
    own, products_within = tl.zeros([BLOCKS], tl.float32), tl.zeros([BLOCKS], tl.float32)
    for start in range(0, blocks, BLOCKS):
        b = start + tl.arange(0, BLOCKS)
        x, of_x, square_x = _about(records, 0, centre, b, e, blocks, size, HIDDEN)
        y, of_y, square_y = _about(records, 1, centre, b, e, blocks, size, HIDDEN)
        sum_x, squares_x, sum_y, squares_y = sum_x + of_x, squares_x + square_x, sum_y + of_y, squares_y + square_y
        if HAS_OWN:
            both = _numbers(records, 6, b, e, blocks, size)
            products_within += _numbers(records, 7, b, e, blocks, size)
            product = x * y * both[:, None]
            pair = (x + y) * both[:, None]
            if MASKED:
                pair_x = _rows(records, 2, b, e, blocks, size, HIDDEN)
                pair_y = _rows(records, 3, b, e, blocks, size, HIDDEN)
                product, pair = product + x * pair_y + y * pair_x, pair + pair_x + pair_y
            products += tl.sum(product, 0)
            apart += tl.sum(pair, 0)
            own += both
    square_x, square_y = tl.sum(squares_x, 0) + within_q, tl.sum(squares_y, 0) + within_k
    product = tl.sum(products, 0) + tl.sum(products_within, 0)
    cross, pairs = tl.sum(sum_x * sum_y, 0) - product, many_q * many_k - tl.sum(own, 0)
    of_x = 1.0 / tl.maximum(many_q * (many_q - 1.0), 1.0)
    of_y = 1.0 / tl.maximum(many_k * (many_k - 1.0), 1.0)
    across = 2.0 / tl.maximum(pairs, 1.0)
    gap = (tl.sum(sum_x * sum_x, 0) - square_x) * of_x + (tl.sum(sum_y * sum_y, 0) - square_y) * of_y - cross * across
    variance = (square_x / count_q + square_y / count_k) / 2
    counts = (many_q >= 2) & (many_k >= 2) & (variance > rounding * e * whole)
    variance = tl.where(counts, variance, 1.0)
    far = tl.where(counts, gap, 0.0) / variance
    tl.store(distances + problem, far)
    scale = tl.where(counts, 1.0, 0.0) / variance
    # What the centre's way gives: nothing where every token has its own pair.
    of_centre = many_q * across * sum_y + many_k * across * sum_x - across * apart
    of_centre -= 2.0 * sum_x / count_q + 2.0 * sum_y / count_k
    shared_x = (2.0 * of_x * sum_x - across * sum_y + of_centre / (2.0 * count_q)) * scale
    shared_y = (2.0 * of_y * sum_y - across * sum_x + of_centre / (2.0 * count_k)) * scale
    alive = tl.where((many_q >= 1) & (many_k >= 1), 1.0, 0.0)
    to = felt + problem * (3 * e + 5)
    put(to, 0, k, centre, e)
    put(to, 1, k, shared_x, e)
    put(to, 2, k, shared_y, e)
    _put_numbers(to + 3 * e, -(2.0 * of_x + far / count_q) * scale, -(2.0 * of_y + far / count_k) * scale)
    _put_numbers(to + 3 * e + 2, alive / count_q, alive / count_k)
    tl.store(to + 3 * e + 4, across * scale)
