"""Queries and keys of each problem as Sinkhorn's kernels take them: about their middle, as halves (halves.py).

    x = (q - middle) times a scale, clamped to a limit, zero at padding;    |x|²/2;    log marginals;    -log n - |x|²/2

The middle is that of both means: distances know none, and about it products are small, and so is their rounding. Both
sides have one unit, a power of two. The tokens of a problem lie in one row, queries and then keys. A sample without
tokens on one side is made one of zeros on both, which are computed like others and count for nothing.

One kernel tells where the tokens of either side are, from end to end; a second places them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import powers, split
from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, read, valid_rows, width_of

FACTS = 4  # of a problem: the unit of its halves, queries, keys, and whether there are both


@dataclass(frozen=True)
class Placed:
    """n queries and m keys of each problem."""

    high: Tensor  # [p, n + m, d]
    low: Tensor  # the high ones again, where one product is enough
    squares: Tensor  # [p, n + m], |x|²/2 as products see it
    log_marginal: Tensor  # [p, n + m]
    start: Tensor  # [p, 2, n + m], log2 marginals - |x|²/2, for two problems of each token
    steps: Tensor  # [p, 2, 3] zeros: of three problems, whether they are done, and after how many iterations
    facts: Tensor  # [p, FACTS]
    ends: Tensor  # [p, 2, 3, d]: of either side the mean, and the least and most of each coordinate
    parts: int  # products that make one


@triton.jit
def _ends_of(
    tokens, mask, ends, counts, problem, side, sample, count, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, WIDTH)
    summed = tl.zeros([ROWS, WIDTH], tl.float32)
    least = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
    most = tl.full([ROWS, WIDTH], float("-inf"), tl.float32)
    many = tl.zeros([ROWS], tl.int32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid = valid_rows(mask, sample, i, count, MASKED)
        tile = read(tokens, problem, i, valid, count, d, WIDTH)
        summed += tile
        least = tl.where(valid[:, None], tl.minimum(least, tile), least)
        most = tl.where(valid[:, None], tl.maximum(most, tile), most)
        many += valid.to(tl.int32)
    counted = tl.sum(many, 0)
    at = ends + (problem * 2 + side) * 3 * d + e
    tl.store(at, tl.sum(summed, 0) / tl.maximum(counted, 1), mask=e < d)
    tl.store(at + d, tl.min(least, 0), mask=e < d)
    tl.store(at + 2 * d, tl.max(most, 0), mask=e < d)
    tl.store(counts + problem * 2 + side, counted)


@triton.jit
def _ends(
    query, key, query_mask, key_mask, ends, counts, heads, n, m, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
):  # fmt: skip
    """Mean, least and most of each coordinate, and how many tokens there are, of either side."""
    problem = (tl.program_id(0) // 2).to(tl.int64)
    sample = problem // heads
    if tl.program_id(0) % 2 == 0:
        _ends_of(query, query_mask, ends, counts, problem, 0, sample, n, d, ROWS, WIDTH, QUERY_MASKED)
    else:
        _ends_of(key, key_mask, ends, counts, problem, 1, sample, m, d, ROWS, WIDTH, KEY_MASKED)


@triton.jit
def origin_of(ends, problem, d, WIDTH: tl.constexpr):
    """The middle of a problem."""
    e = tl.arange(0, WIDTH)
    at = ends + problem * 6 * d + e
    return (tl.load(at, mask=e < d, other=0.0) + tl.load(at + 3 * d, mask=e < d, other=0.0)) / 2


@triton.jit
def _place_side(
    tokens, mask, origin, scale, limit, power, unit, many, alive, high, low, squares, log_marginal, across, within,
    problem, sample, place, block, count, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`place` is that of the side's first token among all."""
    e = tl.arange(0, WIDTH)
    i = block * ROWS + tl.arange(0, ROWS)
    reach = tl.where(alive, count, 0)
    valid = valid_rows(mask, sample, i, count, MASKED) & (i < reach)
    values = (read(tokens, problem, i, valid, count, d, WIDTH) - origin[None, :]) * scale
    values = tl.clamp(values, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    first, second, seen = split(tl.where(valid[:, None], values, 0.0) * power, PARTS)
    at, inside = (place + i[:, None]) * d + e[None, :], (i[:, None] < count) & (e[None, :] < d)
    tl.store(high + at, first, mask=inside)
    if PARTS == 3:
        tl.store(low + at, second, mask=inside)
    square = tl.sum(seen * seen, 1) * (0.5 * unit * unit)
    present = valid | (i >= reach)  # where a side has no tokens all are, and zeros
    tl.store(squares + place + i, square, mask=i < count)
    tl.store(log_marginal + place + i, tl.where(present, -tl.log(many), float("-inf")), mask=i < count)
    start = tl.where(present, -tl.log2(many) - square, float("-inf"))  # where all potentials of costs are zero
    tl.store(across + i, start, mask=i < count)
    tl.store(within + i, start, mask=i < count)


@triton.jit
def _place(
    query, key, query_mask, key_mask, ends, counts, high, low, squares, log_marginal, starts, steps, facts,
    heads, n, m, d, query_blocks, places, scale, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FACTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Halves of tokens, and all that iterations begin with."""
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    e = tl.arange(0, WIDTH)
    at, inside = ends + problem * 6 * d + e, e < d
    origin = origin_of(ends, problem, d, WIDTH)
    least = tl.minimum(tl.load(at + d, mask=inside, other=0.0), tl.load(at + 4 * d, mask=inside, other=0.0))
    most = tl.maximum(tl.load(at + 2 * d, mask=inside, other=0.0), tl.load(at + 5 * d, mask=inside, other=0.0))
    power, unit = powers(tl.minimum(tl.max(tl.maximum(most - origin, origin - least), 0) * scale, limit))
    queries, keys = tl.load(counts + problem * 2), tl.load(counts + problem * 2 + 1)
    alive = (queries > 0) & (keys > 0)
    queries, keys = tl.where(alive, queries, n).to(tl.float32), tl.where(alive, keys, m).to(tl.float32)
    if place == 0:
        to = facts + problem * FACTS
        tl.store(to, unit)
        tl.store(to + 1, queries)
        tl.store(to + 2, keys)
        tl.store(to + 3, alive.to(tl.float32))
        for of in tl.static_range(6):
            tl.store(steps + problem * 6 + of, 0)
    row, across = problem * (n + m), starts + problem * 2 * (n + m)
    within = across + n + m
    if place < query_blocks:
        _place_side(
            query, query_mask, origin, scale, limit, power, unit, queries, alive, high, low, squares, log_marginal,
            across, within, problem, sample, row, place, n, d, ROWS, WIDTH, QUERY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _place_side(
            key, key_mask, origin, scale, limit, power, unit, keys, alive, high, low, squares, log_marginal,
            across + n, within + n, problem, sample, row + n, place - query_blocks, m, d,
            ROWS, WIDTH, KEY_MASKED, PARTS,
        )  # fmt: skip


def place(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    *,
    scale: float,
    limit: float,
    products: str,
    start: Tensor,
) -> Placed:
    """Of queries [b, h, n, d] and keys [b, h, m, d]; what potentials start with is written into `start`."""
    (samples, heads, n, d), m = query.shape, key.shape[2]
    problems, parts = samples * heads, 3 if products == EXACT else 1
    tokens = query.contiguous(), key.contiguous(), *as_bytes(query_mask, key_mask, query)
    ends = query.new_empty(problems, 2, 3, d)
    counts = query.new_empty(problems, 2, dtype=torch.int32)
    masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
    settings = {"ROWS": TILE, "WIDTH": width_of(query), **masked}
    launch(_ends, problems * 2, *tokens, ends, counts, heads, n, m, d, **settings)
    high = query.new_empty(problems, n + m, d, dtype=torch.float16)
    low = torch.empty_like(high) if parts == 3 else high
    squares, log_marginal = query.new_empty(2, problems, n + m).unbind()
    steps = query.new_empty(problems, 2, 3, dtype=torch.int32)
    facts = query.new_empty(problems, FACTS)
    found = high, low, squares, log_marginal, start, steps, facts
    blocks = triton.cdiv(n, TILE)
    places = blocks + triton.cdiv(m, TILE)
    sizes = heads, n, m, d, blocks, places
    settings |= {"PARTS": parts, "FACTS": FACTS}
    launch(_place, problems * places, *tokens, ends, counts, *found, *sizes, scale, limit, **settings)
    return Placed(*found, ends, parts)
