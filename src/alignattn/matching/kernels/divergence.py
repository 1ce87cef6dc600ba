"""Transport of many problems, and of either side onto itself, in a dozen launches whatever their number.

Scores of all three are products of the same tokens (about_origin.py), times sqrt(log2 e / epsilon): exponents of two as
they come. With costs c_ij = |x_i - y_j|²/2, and r and s the sums of a plan's rows and columns,

    log2 pi_ij = f_i + g_j + x_i·y_j
    R = sum_ij pi_ij (c_ij + log2 pi_ij) = sum_i r_i (|x_i|²/2 + f_i) + sum_j s_j (|y_j|²/2 + g_j)
    loss = R(x, y) - R(x, x)/2 - R(y, y)/2,    or the cost of the first plan alone
    gradient at x_i = sum_j pi_ij (x_i - y_j) - sum_j (pi_ij + pi_ji)/2 (x_i - x_j), the second pi that of R(x, x)

Half-steps are those of sinkhorn.py, of all three problems in one launch. In the last a program serves some tokens of
one side: what they add to the loss, and its gradient; of one score it takes both directions of a side's own plan. The
columns of a plan were set right last: all of it is one, so that logarithms of marginals cancel in the loss, and no pi
is more than its column may have, so that it is known beforehand what halves of it are to be multiplied by. Nothing is
added atomically: results are the same each time.

Potentials lie as tokens do, those of queries and then those of keys, twice: between the sides, and of each side's own
problem.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.divergence import Asked
from alignattn.matching.kernels.about_origin import FACTS, origin_of, place
from alignattn.matching.kernels.halves import product, read_halves, split
from alignattn.matching.kernels.scale import put_felt
from alignattn.matching.kernels.sinkhorn import LEAST, goes_on, half_step, tile_of
from alignattn.matching.kernels.tiles import TILE, TWO, launch

CARRIED = 32  # columns of a tile whose plan is carried: of more a processor holds one program, for its registers
LIFT = tl.constexpr(14.0)  # bits by which a plan is lifted, beside the number of columns: before, it is one at most
MOST = tl.constexpr(14.9)  # bits of a lifted plan, two of which half precision still holds
ALMOST = tl.constexpr(0.999)  # of the limit: halves of what was clamped may be rounded down


@triton.jit
def _half_steps(
    high, low, facts, log_marginal, potential, earlier, before, after, steps,
    n, m, d, query_blocks, key_blocks, places, tolerance, FACTS: tl.constexpr, LEAST: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Of queries and keys, of the queries' own problem and of the keys', block after block."""
    problem = (tl.program_id(0) // places).to(tl.int64)
    at = tl.program_id(0) % places
    across = query_blocks
    if SECOND:
        across = key_blocks
    kind = (at >= across).to(tl.int32) + (at >= across + query_blocks).to(tl.int32)
    block = at - tl.where(kind > 0, across, 0) - tl.where(kind > 1, query_blocks, 0)
    of_keys, with_keys = kind == 2, kind != 1
    if SECOND:
        of_keys, with_keys = kind != 1, kind == 2
    count, others = tl.where(of_keys, m, n), tl.where(with_keys, m, n)
    own, other = problem * (n + m) + tl.where(of_keys, n, 0), problem * (n + m) + tl.where(with_keys, n, 0)
    further = (problem + tl.minimum(kind, 1)) * (n + m)  # lie potentials than tokens
    if not goes_on(
        steps + problem * 6 + kind, steps + problem * 6 + 3 + kind, potential + further + other,
        earlier + further + other, log_marginal + other, others, block, tolerance, FIRST, SECOND,
    ):  # fmt: skip
        return
    unit = tl.load(facts + problem * FACTS)
    # The first of all is about where it starts: potentials of costs that are zero.
    half_step(
        high + own * d, low + own * d, high + other * d, low + other * d, unit * unit, potential + further + other,
        before + further + own, log_marginal + own, after + further + own, count, others, d, block,
        LEAST, False, PARTS, ROWS, COLUMNS, WIDTH,
    )  # fmt: skip


@triton.jit
def _plan(score, of_row, across):
    """Lifted. More is rounding, of potentials that are larger than all their bits."""
    return tl.exp2(tl.minimum(score + of_row[:, None] + across[None, :], MOST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _tile(
    own, own_rest, high, low, by, j, count, d,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Other tokens, and the scores with these."""
    other, rest = read_halves(high, low, 0, j, count, d, WIDTH, PARTS)
    score = product(own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS)
    return other, rest, score * by


@triton.jit
def _within(
    own, own_rest, high, low, by, f, g, of_row, of_column, lift, count, d, WITH_GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a side's own plan: sums of its rows, of its columns, and what both together carry."""
    rows, columns = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    pulled = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other, rest, score = _tile(own, own_rest, high, low, by, j, count, d, PARTS, ROWS, COLUMNS, WIDTH)
        there = _plan(score, of_row + lift, tl.load(g + j, mask=j < count, other=float("-inf")))
        back = _plan(score, of_column + lift, tl.load(f + j, mask=j < count, other=float("-inf")))
        rows += tl.sum(there, 1)
        columns += tl.sum(back, 1)
        if WITH_GRADIENT:
            above, below, _ = split(there + back, PARTS)
            pulled = product(above, below, other, rest, pulled, PARTS)
    return rows, columns, pulled


@triton.jit
def _across(
    own, own_rest, high, low, by, theirs, of_row, lift, pulled, count, d,
    PAID: tl.constexpr, WITH_GRADIENT: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of the plan between the sides: its sums, `pulled` with what it carries added, and sum_j pi_ij x_i·y_j."""
    sums, paid = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other, rest, score = _tile(own, own_rest, high, low, by, j, count, d, PARTS, ROWS, COLUMNS, WIDTH)
        plan = _plan(score, of_row + lift, tl.load(theirs + j, mask=j < count, other=float("-inf")))
        sums += tl.sum(plan, 1)
        if PAID:
            paid += tl.sum(plan * score, 1)
        if WITH_GRADIENT:
            above, below, _ = split(plan, PARTS)
            pulled = product(above, below, other, rest, pulled, PARTS)
    return sums, pulled, paid


@triton.jit
def _potentials(potentials, steps, problem, kind, slot):
    """Where f of this problem and kind lies, and where g: there are two f, of which the last is the one."""
    last = (tl.load(steps + problem * 6 + 3 + kind) + 1) % 2
    return potentials + last.to(tl.int64) * slot, potentials + 2 * slot


@triton.jit
def _felt(  # noqa: PLR0915
    high, low, squares, log_marginal, potentials, steps, facts, ends, losses, of_query, of_key, felt,
    n, m, d, query_blocks, places, slot, limit, scale, worth, slope, FACTS: tl.constexpr, DEBIASED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`slot`: from potentials to the next. `worth`, `slope`: of a lifted loss and gradient, in units of the cost.

    `scale`: of tokens, as they were placed. `felt`: sums of gradients (scale.py).
    """
    problem = (tl.program_id(0) // places).to(tl.int64)
    at = tl.program_id(0) % places
    is_key = at >= query_blocks
    block = at - tl.where(is_key, query_blocks, 0)
    count, others = tl.where(is_key, m, n), tl.where(is_key, n, m)
    first = problem * (n + m)
    start, away = first + tl.where(is_key, n, 0), first + tl.where(is_key, 0, n)
    fact = facts + problem * FACTS
    unit, keys, alive = tl.load(fact), tl.load(fact + 2), tl.load(fact + 3)
    by, many = unit * unit, tl.load(fact + tl.where(is_key, 2, 1))
    i = block * ROWS + tl.arange(0, ROWS)
    own, own_rest = read_halves(high + start * d, low + start * d, 0, i, count, d, WIDTH, PARTS)
    valid = tl.load(log_marginal + start + i, mask=i < count, other=float("-inf")) > float("-inf")
    square = tl.load(squares + start + i, mask=i < count, other=0.0)
    height = square + tl.log2(many)  # potentials are taken over marginals
    weight, loss = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    pulled = tl.zeros([ROWS, WIDTH], tl.float32)
    if DEBIASED:
        f, g = _potentials(potentials, steps, problem, tl.where(is_key, 2, 1), slot)
        f, g = f + first + n + m + start, g + first + n + m + start
        of_row = tl.load(f + i, mask=i < count, other=float("-inf"))
        of_column = tl.load(g + i, mask=i < count, other=float("-inf"))
        rows, columns, pulled = _within(  # both directions are added: each is lifted by a bit less
            own, own_rest, high + start * d, low + start * d, by, f, g, of_row, of_column, tl.log2(many) + (LIFT - 1),
            count, d, WITH_GRADIENT, PARTS, ROWS, COLUMNS, WIDTH,
        )  # fmt: skip
        loss = -(rows * (height + of_row) + columns * (height + of_column)) / many
        pulled *= -keys / many  # from here on lifted as what is between the sides
        weight = (rows + columns) * (-keys / many)
    f, g = _potentials(potentials, steps, problem, 0, slot)
    mine = tl.load(tl.where(is_key, g, f) + first + start + i, mask=i < count, other=float("-inf"))
    theirs = tl.where(is_key, f, g) + first + away
    sums, pulled, paid = _across(
        own, own_rest, high + away * d, low + away * d, by, theirs, mine, tl.log2(keys) + LIFT, pulled, others, d,
        not DEBIASED, WITH_GRADIENT, PARTS, ROWS, COLUMNS, WIDTH,
    )  # fmt: skip
    if DEBIASED:
        loss += sums * (height + mine) / keys
    else:
        loss = (sums * square - paid / 2) / keys  # each side tells half of the products
    total = tl.sum(tl.where(valid, loss, 0.0), 0) * worth
    tl.store(losses + problem * places + at, tl.where(alive > 0.0, total, 0.0))
    if WITH_GRADIENT:
        # Read again: kept in registers since the first time, there would be room for half as many programs.
        own, own_rest = read_halves(high + start * d, low + start * d, 0, i, count, d, WIDTH, PARTS)
        seen = own.to(tl.float32)
        if PARTS == 3:
            seen += own_rest.to(tl.float32)
        values = ((weight + sums)[:, None] * seen - pulled) * (unit * slope / keys)
        # Not where tokens were clamped.
        values = tl.where(valid[:, None] & (tl.abs(seen) * unit < limit * ALMOST), values, 0.0)
        e = tl.arange(0, WIDTH)
        to, inside = i[:, None] * d + e[None, :], (i[:, None] < count) & (e[None, :] < d)
        if is_key:
            tl.store(of_key + problem * m * d + to, values, mask=inside)
        else:
            tl.store(of_query + problem * n * d + to, values, mask=inside)
        put_felt(felt, problem * places + at, values, seen, unit / scale, origin_of(ends, problem, d, WIDTH), d, WIDTH)


def divergence(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    asked: Asked,
    *,
    with_gradient: bool,
    products: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses [b, h], their gradients in queries and keys [b, h, tokens, d], and sums of these as scale.py takes them.

    What is not asked for is empty, or anything.
    """
    (samples, heads, n, d), m = query.shape, key.shape[2]
    problems = samples * heads
    bits = math.sqrt(math.log2(math.e) / asked.epsilon)
    scale, limit = asked.scale * bits, asked.limit * bits
    potentials = query.new_empty(3, problems, 2, n + m)
    *both, g = potentials.unbind()  # f and the one before, in turns
    sides = query, key, query_mask, key_mask
    placed = place(*sides, scale=scale, limit=limit, products=products, start=g)
    high, low, steps, facts = placed.high, placed.low, placed.steps, placed.facts
    tile = tile_of(max(n, m), max(n, m), query) | {"PARTS": placed.parts, "FACTS": FACTS}
    blocks = triton.cdiv(n, tile["ROWS"]), triton.cdiv(m, tile["ROWS"])
    own = sum(blocks) if asked.debiased else 0  # of either side's own problem
    for iteration in range(asked.iterations):
        f, before = both[iteration % 2], both[1 - iteration % 2]
        for second, given in ((False, (g, g, before if iteration else g, f)), (True, (f, before, g, g))):
            places = blocks[second] + own
            launch(
                _half_steps, problems * places, high, low, facts, placed.log_marginal, *given, steps, n, m, d, *blocks,
                places, asked.tolerance, LEAST=LEAST, FIRST=iteration == 0, SECOND=second, **tile,
            )  # fmt: skip
    losses = query.new_empty(problems, sum(blocks))
    of_query, of_key = (side.new_empty(side.shape if with_gradient else 0) for side in (query, key))
    sums = query.new_empty(problems, sum(blocks), d + 1)
    worth = 1 / (bits * bits * 2**LIFT.value)
    two = {"maxnreg": TWO} if placed.parts == 1 and tile["num_warps"] == 8 and tile["WIDTH"] <= TILE else {}
    tile |= {"COLUMNS": min(CARRIED, tile["COLUMNS"]), "DEBIASED": asked.debiased, "WITH_GRADIENT": with_gradient}
    launch(
        _felt, problems * sum(blocks), high, low, placed.squares, placed.log_marginal, potentials, steps, facts,
        placed.ends, losses, of_query, of_key, sums, n, m, d, blocks[0], sum(blocks), potentials.stride(0), limit,
        scale, worth, scale * worth, **tile, **two,
    )  # fmt: skip
    return losses.sum(-1).view(samples, heads), of_query, of_key, sums
