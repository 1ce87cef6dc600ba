"""Transport of many problems, and of either side onto itself, in a dozen launches whatever their number.

Tokens stand about the middle of both means, times sqrt(log2 e / epsilon) and what the cost has, as halves (halves.py).
So of all three problems scores are products of the same halves, and exponents of two as they come:

    log2 pi_ij = f_i + g_j + x_i·y_j,    cost c_ij = |x_i - y_j|²/2,    r and s the sums of a plan's rows and columns
    R = sum_ij pi_ij (c_ij + log2 pi_ij) = sum_i r_i (|x_i|²/2 + f_i) + sum_j s_j (|y_j|²/2 + g_j)
    loss = R(x, y) - R(x, x)/2 - R(y, y)/2,    or the cost of the first plan alone
    gradient at x_i = sum_j pi_ij (x_i - y_j) - sum_j (pi_ij + pi_ji)/2 (x_i - x_j), the second pi that of R(x, x)

A first kernel tells where the tokens of either side are, a second places them. Half-steps are those of sinkhorn.py, of
all three problems in one launch. In the last a program serves some tokens of one side: what they add to the loss, and
its gradient. Of one score it takes both directions of a side's own plan. The columns of a plan were set right last, so
that no pi is more than its column may have: what halves of it are multiplied by is known beforehand. Nothing is added
atomically: results are the same each time.

Per problem the tokens of queries and keys, n and then m, lie in one row; so do their potentials, twice: between the
sides, and of each side's own problem.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.divergence import Asked
from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import powers, product, read_halves, split
from alignattn.matching.kernels.sinkhorn import LEAST, goes_on, half_step, tile_of
from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, read, valid_rows, width_of

CARRIED = 32  # columns of a tile whose plan is carried: of more a processor holds one program, for its registers
FACTS = tl.constexpr(4)  # of a problem: the unit of its halves, queries, keys, and whether there are both
LIFT = tl.constexpr(14.0)  # bits by which a plan is lifted, beside the number of columns: before, it is one at most
MOST = tl.constexpr(14.9)  # bits of a lifted plan, two of which half precision still holds
ALMOST = tl.constexpr(0.999)  # of the limit: halves of what was clamped may be rounded down


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
    start = tl.where(present, -tl.log2(many) - square, float("-inf"))  # of a potential that is zero
    tl.store(across + i, start, mask=i < count)
    tl.store(within + i, start, mask=i < count)


@triton.jit
def _place(
    query, key, query_mask, key_mask, ends, counts, high, low, squares, log_marginal, potentials, steps, facts,
    heads, n, m, d, query_blocks, places, scale, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FACTS: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Halves of tokens, and all that iterations begin with. `potentials` are those of columns."""
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    e = tl.arange(0, WIDTH)
    at, inside = ends + problem * 6 * d + e, e < d
    origin = (tl.load(at, mask=inside, other=0.0) + tl.load(at + 3 * d, mask=inside, other=0.0)) / 2
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
        for of in tl.static_range(6):  # of three problems, whether they are done, and after how many iterations
            tl.store(steps + problem * 6 + of, 0)
    row, across = problem * (n + m), potentials + problem * 2 * (n + m)
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


@triton.jit
def _half_steps(
    high, low, facts, log_marginal, potential, earlier, before, after, steps,
    n, m, d, query_blocks, key_blocks, places, tolerance, FACTS: tl.constexpr, LEAST: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of queries and keys, of the queries' own problem and of the keys', block after block."""
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    across = query_blocks
    if SECOND:
        across = key_blocks
    kind = (place >= across).to(tl.int32) + (place >= across + query_blocks).to(tl.int32)
    block = place - tl.where(kind > 0, across, 0) - tl.where(kind > 1, query_blocks, 0)
    of_keys, with_keys = kind == 2, kind != 1
    if SECOND:
        of_keys, with_keys = kind != 1, kind == 2
    count, others = tl.where(of_keys, m, n), tl.where(with_keys, m, n)
    row, at = problem * (n + m), (problem * 2 + tl.minimum(kind, 1)) * (n + m)
    own, other = tl.where(of_keys, n, 0), tl.where(with_keys, n, 0)
    if not goes_on(
        steps + problem * 6 + kind, steps + problem * 6 + 3 + kind, potential + at + other, earlier + at + other,
        log_marginal + row + other, others, block, tolerance, FIRST, SECOND,
    ):  # fmt: skip
        return
    unit = tl.load(facts + problem * FACTS)
    half_step(
        high + (row + own) * d, low + (row + own) * d, high + (row + other) * d, low + (row + other) * d, unit * unit,
        potential + at + other, before + at + own, log_marginal + row + own, after + at + own, count, others, d, block,
        LEAST, FIRST, PARTS, ROWS, COLUMNS, WIDTH,
    )  # fmt: skip


@triton.jit
def _plan(score, of_row, across):
    """Lifted. More is rounding, of potentials that are larger than all their bits."""
    return tl.exp2(tl.minimum(score + of_row[:, None] + across[None, :], MOST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _carried(
    high, low, squares, log_marginal, potentials, steps, facts, losses, of_query, of_key, n, m, d, query_blocks, places, turn,
    limit, worth, slope, FACTS: tl.constexpr, DEBIASED: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`turn`: from this f to the one of the other iterations, and from there to g. `worth`, `slope`: of a loss of one,
    and of a gradient, where scores are exponents of two.
    """
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    is_key = place >= query_blocks
    block = place - tl.where(is_key, query_blocks, 0)
    count, others = tl.where(is_key, m, n), tl.where(is_key, n, m)
    first, away = tl.where(is_key, n, 0), tl.where(is_key, 0, n)
    unit = tl.load(facts + problem * FACTS)
    keys, alive = tl.load(facts + problem * FACTS + 2), tl.load(facts + problem * FACTS + 3)
    by = unit * unit
    row, between = problem * (n + m) + first, problem * 2 * (n + m)
    i = block * ROWS + tl.arange(0, ROWS)
    own, own_rest = read_halves(high + row * d, low + row * d, 0, i, count, d, WIDTH, PARTS)
    height = tl.load(squares + row + i, mask=i < count, other=0.0)
    many = tl.load(facts + problem * FACTS + tl.where(is_key, 2, 1))
    valid = tl.load(log_marginal + row + i, mask=i < count, other=float("-inf")) > float("-inf")
    apart = tl.where(valid, height + tl.log2(many), 0.0)
    pulled = tl.zeros([ROWS, WIDTH], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    loss = tl.zeros([ROWS], tl.float32)
    if DEBIASED:
        mine = between + n + m + first
        f = potentials + ((tl.load(steps + problem * 6 + tl.where(is_key, 5, 4)) + 1) % 2).to(tl.int64) * turn + mine
        g = potentials + 2 * turn + mine
        lift = tl.log2(many) + (LIFT - 1)  # both directions are added
        of_row = tl.load(f + i, mask=i < count, other=float("-inf"))
        of_column = tl.load(g + i, mask=i < count, other=float("-inf"))
        rows, columns = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
        for start in range(0, count, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            other, rest = read_halves(high + row * d, low + row * d, 0, j, count, d, WIDTH, PARTS)
            score = product(
                own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS
            )
            score *= by
            there = _plan(score, of_row + lift, tl.load(g + j, mask=j < count, other=float("-inf")))
            back = _plan(score, of_column + lift, tl.load(f + j, mask=j < count, other=float("-inf")))
            rows += tl.sum(there, 1)
            columns += tl.sum(back, 1)
            if WITH_GRADIENT:
                above, below, _ = split(there + back, PARTS)
                pulled = product(above, below, other, rest, pulled, PARTS)
        loss = -rows * (apart + tl.where(valid, of_row, 0.0)) / many
        loss -= columns * (apart + tl.where(valid, of_column, 0.0)) / many
        pulled *= -keys / many  # from here on as much as what comes
        weight = (rows + columns) * (-keys / many)
    f_at = ((tl.load(steps + problem * 6 + 3) + 1) % 2).to(tl.int64) * turn + between
    g_at = 2 * turn + between + n
    mine, theirs = potentials + tl.where(is_key, g_at, f_at), potentials + tl.where(is_key, f_at, g_at)
    of_row = tl.load(mine + i, mask=i < count, other=float("-inf"))
    lift = tl.log2(keys) + LIFT
    far = problem * (n + m) + away
    sums = tl.zeros([ROWS], tl.float32)
    paid = tl.zeros([ROWS], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other, rest = read_halves(high + far * d, low + far * d, 0, j, others, d, WIDTH, PARTS)
        score = product(own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS)
        score *= by
        plan = _plan(score, of_row + lift, tl.load(theirs + j, mask=j < others, other=float("-inf")))
        sums += tl.sum(plan, 1)
        if not DEBIASED:
            paid += tl.sum(plan * score, 1)
        if WITH_GRADIENT:
            above, below, _ = split(plan, PARTS)
            pulled = product(above, below, other, rest, pulled, PARTS)
    if DEBIASED:
        loss += sums * (apart + tl.where(valid, of_row, 0.0)) / keys
    else:
        loss = (sums * height - paid / 2) / keys  # each side tells half of the products
    total = tl.sum(loss, 0) * worth
    tl.store(losses + problem * places + place, tl.where(alive > 0.0, total, 0.0))
    if WITH_GRADIENT:
        # Read again: kept in registers since the first time, there would be room for half as many programs.
        own, own_rest = read_halves(high + row * d, low + row * d, 0, i, count, d, WIDTH, PARTS)
        seen = own.to(tl.float32)
        if PARTS == 3:
            seen += own_rest.to(tl.float32)
        values = ((weight + sums)[:, None] * seen - pulled) * (unit * slope / keys)
        # Not where tokens were clamped.
        values = tl.where(valid[:, None] & (tl.abs(seen) * unit < limit * ALMOST), values, 0.0)
        e = tl.arange(0, WIDTH)
        at, inside = i[:, None] * d + e[None, :], (i[:, None] < count) & (e[None, :] < d)
        if is_key:
            tl.store(of_key + problem * m * d + at, values, mask=inside)
        else:
            tl.store(of_query + problem * n * d + at, values, mask=inside)


def divergence(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    asked: Asked,
    *,
    with_gradient: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [b, h], and their gradients in queries and keys [b, h, tokens, d], empty where they are not asked for."""
    (samples, heads, n, d), m = query.shape, key.shape[2]
    problems, parts = samples * heads, 3 if products == EXACT else 1
    tokens = query.contiguous(), key.contiguous(), *as_bytes(query_mask, key_mask, query)
    masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
    tile = tile_of(max(n, m), max(n, m), query)
    blocks = triton.cdiv(n, tile["ROWS"]), triton.cdiv(m, tile["ROWS"])
    bits = math.sqrt(math.log2(math.e) / asked.epsilon)  # of a token: scores are exponents of two

    ends = query.new_empty(problems, 2, 3, d)
    counts = query.new_empty(problems, 2, dtype=torch.int32)
    settings = {"ROWS": TILE, "WIDTH": width_of(query), **masked}
    launch(_ends, problems * 2, *tokens, ends, counts, heads, n, m, d, **settings)

    high = query.new_empty(problems, n + m, d, dtype=torch.float16)
    low = torch.empty_like(high) if parts == 3 else high
    squares, log_marginal = query.new_empty(2, problems, n + m).unbind()
    potentials = query.new_empty(3, problems, 2, n + m)  # f and the one before, in turns; g
    steps = query.new_empty(problems, 2, 3, dtype=torch.int32)
    facts = query.new_empty(problems, FACTS.value)
    settings |= {"ROWS": tile["ROWS"], "PARTS": parts, "FACTS": FACTS}
    placed = high, low, squares, log_marginal, potentials[2], steps, facts
    more = asked.scale * bits, asked.limit * bits
    launch(
        _place, problems * sum(blocks), *tokens, ends, counts, *placed, heads, n, m, d, blocks[0], sum(blocks), *more,
        **settings,
    )  # fmt: skip

    same = {"PARTS": parts, "FACTS": FACTS, **tile}
    own = sum(blocks) if asked.debiased else 0  # blocks of either side's own problem
    *both, g = potentials.unbind()
    for iteration in range(asked.iterations):
        f, before = both[iteration % 2], both[1 - iteration % 2]
        for second, given in ((False, (g, g, before, f)), (True, (f, before, g, g))):
            places = blocks[second] + own
            launch(
                _half_steps, problems * places, high, low, facts, log_marginal, *given, steps, n, m, d, *blocks, places,
                asked.tolerance, LEAST=LEAST, FIRST=iteration == 0, SECOND=second, **same,
            )  # fmt: skip

    losses = query.new_empty(problems, sum(blocks))
    of_query, of_key = (side.new_empty(side.shape if with_gradient else 0) for side in (query, key))
    worth = 1 / (bits * bits * 2**LIFT.value)
    same["COLUMNS"] = min(CARRIED, tile["COLUMNS"])
    launch(
        _carried, problems * sum(blocks), high, low, squares, log_marginal, potentials, steps, facts, losses, of_query, of_key,
        n, m, d, blocks[0], sum(blocks), potentials.stride(0), asked.limit * bits, worth, asked.scale * bits * worth,
        DEBIASED=asked.debiased, WITH_GRADIENT=with_gradient, **same,
    )  # fmt: skip
    return losses.sum(-1).view(samples, heads), of_query, of_key
