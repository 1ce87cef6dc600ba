"""Sinkhorn streaming: scores are made tile by tile in registers, of halves (halves.py), and never stored.

    half-step:  f_i = log a_i - LSE_j(g_j + s_ij),    s_ij = x_i·y_j / epsilon
    carry:      sum_j pi_ij,  sum_j pi_ij y_j  and  sum_j pi_ij log pi_ij,    pi_ij = exp(f_i + g_j + s_ij)
    value:      of such sums what a plan costs

The first two are of rows; columns are the same with x and y exchanged. A program serves some rows of one problem. The
half-step of columns first sees whether the rows were within the tolerance before the last of theirs: then the problem
is done, and its programs end as they begin. Exponentials are powers of two, which is what the device has, and
potentials their exponents from the first half-step to what is carried: where they are large, to convert them would move
them. Sums are in single precision. Nothing is added atomically: results are the same each time.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import ROOM, Halves, halves, product, read_halves, split
from alignattn.matching.kernels.tiles import TILE, has_room, launch, width_of
from alignattn.matching.scores import Problems

LARGEST_TILE = 128  # rows, and half as many columns: of 64 and 128 of each the fastest on an H200
LEAST = 1e-20  # of a sum, and its inverse the most: beyond, what single precision lost may count
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))


@triton.jit
def _are_settled(potential, earlier, log_marginal, count, tolerance, BLOCK: tl.constexpr):
    """Whether no marginal was off by more than the tolerance; NaN is."""
    off = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        valid = tl.load(log_marginal + i, mask=i < count, other=float("-inf")) > float("-inf")
        now = tl.load(potential + i, mask=valid, other=0.0)
        before = tl.load(earlier + i, mask=valid, other=0.0)
        off += (valid & ~(tl.abs(tl.exp2(before - now) - 1.0) <= tolerance)).to(tl.int32)
    return tl.sum(off, 0) == 0


@triton.jit
def goes_on(
    done, iterations, potential, earlier, log_other, m, block, tolerance, FIRST: tl.constexpr, SECOND: tl.constexpr
):
    """Whether a problem takes this half-step, which is counted; all these lie where the problem begins.

    FIRST: of all iterations, and nothing was `earlier`. SECOND: of the two of an iteration.
    """
    going = tl.load(done) == 0
    if SECOND:
        if not FIRST:  # noqa: SIM102  # which Triton decides when it compiles
            if going:  # noqa: SIM102
                if _are_settled(potential, earlier, log_other, m, tolerance, 1024):
                    tl.store(done, 1)  # all programs of this problem find the same
                    going = False
        if going & (block == 0):
            tl.store(iterations, tl.load(iterations) + 1)
    return going


@triton.jit
def _shifted(
    own, own_rest, high, low, by, potential, start, m, d,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The scores of some rows with the columns from `start` on, and the potentials of these."""
    j = start + tl.arange(0, COLUMNS)
    other, rest = read_halves(high, low, 0, j, m, d, WIDTH, PARTS)
    across = tl.load(potential + j, mask=j < m, other=float("-inf"))
    score = product(own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS)
    return score * by + across[None, :]


@triton.jit
def half_step(
    own_high, own_low, high, low, by, potential, before, log_own, after, n, m, d, block, LEAST: tl.constexpr,
    FIRST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of a block of rows of a problem; all these lie where the problem begins. FIRST: nothing is known `before`.

    After the first the plan has right columns, so that no row has more than all, and none less than a share of 1/m of
    what it should: about the plan as it is, sums neither vanish nor overflow. Those that do, beyond LEAST, are taken
    about their largest number: scores are so large then that their rounding moves potentials more.
    """
    i = block * ROWS + tl.arange(0, ROWS)
    own, own_rest = read_halves(own_high, own_low, 0, i, n, d, WIDTH, PARTS)
    marginal = tl.load(log_own + i, mask=i < n, other=float("-inf")) * LOG2_E
    valid = marginal > float("-inf")
    total = tl.zeros([ROWS], tl.float32)
    found = total
    lost = 1
    if not FIRST:
        shift = tl.where(valid, tl.load(before + i, mask=valid, other=0.0) - marginal, 0.0)
        for start in range(0, m, COLUMNS):
            score = _shifted(own, own_rest, high, low, by, potential, start, m, d, PARTS, ROWS, COLUMNS, WIDTH)
            total += tl.sum(tl.exp2(score + shift[:, None]), 1)
        found = shift - tl.log2(total)
        lost = tl.sum((valid & ~((total > LEAST) & (total < 1 / LEAST))).to(tl.int32), 0)
    if lost > 0:
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, m, COLUMNS):
            score = _shifted(own, own_rest, high, low, by, potential, start, m, d, PARTS, ROWS, COLUMNS, WIDTH)
            now = tl.maximum(largest, tl.max(score, 1))
            finite = tl.where(now == float("-inf"), 0.0, now)
            total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(score - finite[:, None]), 1)
            largest = now
        found = -(largest + tl.log2(total))
    tl.store(after + i, tl.where(valid, marginal + found, float("-inf")), mask=i < n)


@triton.jit
def _half_step(
    own_high, own_low, high, low, scale, potential, earlier, log_other, before, log_own, after, done, iterations,
    n, m, d, blocks, tolerance, LEAST: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    rows, columns = problem * n, problem * m
    if not goes_on(
        done + problem, iterations + problem, potential + columns, earlier + columns, log_other + columns, m, block,
        tolerance, FIRST, SECOND,
    ):  # fmt: skip
        return
    half_step(
        own_high + rows * d, own_low + rows * d, high + columns * d, low + columns * d, tl.load(scale + problem),
        potential + columns, before + rows, log_own + rows, after + rows, n, m, d, block,
        LEAST, FIRST, PARTS, ROWS, COLUMNS, WIDTH,
    )  # fmt: skip


@triton.jit
def of_plan(score, of_row, across):
    """Its logarithm. No plan is above one: more is rounding, of potentials larger than all their bits."""
    return tl.minimum(score + of_row[:, None] + across[None, :], 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _carry(
    own_high, own_low, high, low, scale, f, g, unit, sums, entropy, carried, paid, n, m, d, blocks,
    CARRIES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """About the largest number of each row: so halves of the plan have all their bits. `paid`: sum_j pi_ij s_ij."""
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    i = block * ROWS + tl.arange(0, ROWS)
    own, own_rest = read_halves(own_high, own_low, problem, i, n, d, WIDTH, PARTS)
    by = tl.load(scale + problem)
    of_row = tl.load(f + problem * n + i, mask=i < n, other=float("-inf"))
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    disorder = tl.zeros([ROWS], tl.float32)
    cost = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, m, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        other, rest = read_halves(high, low, problem, j, m, d, WIDTH, PARTS)
        across = tl.load(g + problem * m + j, mask=j < m, other=float("-inf"))
        score = product(own, own_rest, tl.trans(other), tl.trans(rest), tl.zeros([ROWS, COLUMNS], tl.float32), PARTS)
        score = score * by
        logarithm = of_plan(score, of_row, across)
        now = tl.maximum(largest, tl.max(logarithm, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)
        kept = tl.exp2(largest - finite)
        plan = tl.exp2(logarithm - finite[:, None])
        total = total * kept + tl.sum(plan, 1)
        disorder = disorder * kept + tl.sum(tl.where(plan > 0.0, plan * logarithm, 0.0), 1)
        if CARRIES:
            above, below, _ = split(plan * ROOM, PARTS)
            mean = product(above, below, other, rest, mean * kept[:, None], PARTS)
        else:
            cost = cost * kept + tl.sum(tl.where(plan > 0.0, plan * score, 0.0), 1)
        largest = now
    back = tl.exp2(tl.where(largest == float("-inf"), 0.0, largest))
    tl.store(sums + problem * n + i, total * back, mask=i < n)
    tl.store(entropy + problem * n + i, disorder * back * LN_2, mask=i < n)
    if CARRIES:
        e = tl.arange(0, WIDTH)
        at = (problem * n + i[:, None]) * d + e[None, :]
        mean = mean * (back * (tl.load(unit + problem) / ROOM))[:, None]
        tl.store(carried + at, mean, mask=(i[:, None] < n) & (e[None, :] < d))
    else:
        tl.store(paid + problem * n + i, cost * back * LN_2, mask=i < n)


@triton.jit
def _value_of_sums(
    rows, entropy, paid, columns, alpha, beta, log_a, log_b, epsilon, cost, regularised, error, n, m,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of sums: what a problem's plan costs, and how right they are."""
    problem = tl.program_id(0).to(tl.int64)
    scale = tl.load(epsilon + problem)
    total = tl.zeros([BLOCK], tl.float32)
    disorder = tl.zeros([BLOCK], tl.float32)
    worst = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = problem * n + i
        sums = tl.load(rows + at, mask=i < n, other=0.0)
        total += sums * tl.load(alpha + at, mask=i < n, other=0.0) - scale * tl.load(paid + at, mask=i < n, other=0.0)
        disorder += tl.load(entropy + at, mask=i < n, other=0.0)
        worst = tl.maximum(worst, share_off(sums, tl.load(log_a + at, mask=i < n, other=float("-inf"))))
    for start in range(0, m, BLOCK):
        j = start + tl.arange(0, BLOCK)
        at = problem * m + j
        sums = tl.load(columns + at, mask=j < m, other=0.0)
        total += sums * tl.load(beta + at, mask=j < m, other=0.0)
        worst = tl.maximum(worst, share_off(sums, tl.load(log_b + at, mask=j < m, other=float("-inf"))))
    found = tl.sum(total, 0)
    tl.store(cost + problem, found)
    tl.store(regularised + problem, found + scale * tl.sum(disorder, 0))
    tl.store(error + problem, tl.max(worst, 0) + (found - found))  # the largest of some is never NaN, where one is


@triton.jit
def share_off(sums, log_marginal):
    """By what share marginals are off; by none where there is no token."""
    valid = log_marginal > float("-inf")
    return tl.where(valid, tl.abs(sums / tl.exp2(tl.where(valid, log_marginal, 0.0) * LOG2_E) - 1.0), 0.0)


class StreamedScores:
    """x·y/epsilon of a stack of problems x [p, n, d] and y [p, m, d], and what Sinkhorn takes of it."""

    def __init__(
        self, x: Tensor, y: Tensor, epsilon: Tensor, products: str = EXACT, *, largest_tile: int = LARGEST_TILE
    ) -> None:
        self.tokens = x, y
        self.epsilon = epsilon
        self.products = products
        self.largest_tile = largest_tile

    @functools.cached_property
    def halved(self) -> tuple[Halves, Halves, Tensor, Tensor]:
        """Both sides; what makes scores of their products; and x of its halves."""
        to_bits = LOG2_E.value / self.epsilon
        # In full precision it is part of the tokens, where its rounding is another in each number of them. Rounded ones
        # are those that came.
        exact = self.products == EXACT
        x = halves(self.tokens[0], self.products, to_bits if exact else None)
        y = halves(self.tokens[1], self.products)
        scale = x.unit * y.unit
        return (x, y, scale, x.unit / to_bits) if exact else (x, y, scale * to_bits, x.unit)

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Potentials f and g, as powers of two, and the number of iterations each problem took; begins with this g."""
        x, y, _, _ = self.halved
        log_a, log_b, g = log_a.contiguous(), log_b.contiguous(), (g * LOG2_E.value).contiguous()
        # This f and the one before, in turns: where a problem is done, the one before is the one.
        both = log_a.new_empty(2, *log_a.shape)
        done, iterations = torch.zeros(2, len(g), dtype=torch.int32, device=g.device).unbind()
        for iteration in range(max_iterations):
            f, before = both[iteration % 2], both[1 - iteration % 2]
            settings = {"LEAST": LEAST, "FIRST": iteration == 0}
            rows = (g, g, log_b, before, log_a, f, done, iterations)
            self._launch(_half_step, x, y, rows, tolerance, SECOND=False, **settings)
            columns = (f, before, log_a, g, log_b, g, done, iterations)
            self._launch(_half_step, y, x, columns, tolerance, SECOND=True, **settings)
            if iteration and iteration % look_every == 0 and done.all():
                break
        return torch.where((iterations % 2 == 1)[:, None], both[0], both[1]), g, iterations.long()

    def carry(self, f: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Sums of the plan's rows, and what they carry; the same of columns; sum pi log pi, by rows."""
        f, g = f.contiguous(), g.contiguous()
        x, y, _, unit = self.halved
        found = []
        for own, other, mine, theirs, of in ((x, y, f, g, y.unit), (y, x, g, f, unit)):
            sums, entropy = mine.new_empty(2, *mine.shape).unbind()
            carried = mine.new_empty(own.high.shape)
            self._launch(_carry, own, other, (mine, theirs, of, sums, entropy, carried, sums), CARRIES=True)
            found.append((sums, carried, entropy))
        (rows, to_keys, entropy), (columns, to_queries, _) = found
        return (rows, to_keys), (columns, to_queries), entropy.sum(-1)

    def value(self, f: Tensor, g: Tensor, problems: Problems) -> tuple[Tensor, Tensor, Tensor]:
        """Cost of the plan, the same with epsilon times sum pi log pi, and by how much marginals are off at most."""
        f, g = f.contiguous(), g.contiguous()
        x, y, _, _ = self.halved
        rows, columns = f.new_empty(3, *f.shape).unbind(), g.new_empty(3, *g.shape).unbind()
        for own, other, mine, theirs, (sums, entropy, paid) in ((x, y, f, g, rows), (y, x, g, f, columns)):
            self._launch(_carry, own, other, (mine, theirs, own.unit, sums, entropy, sums, paid), CARRIES=False)
        cost, regularised, error = f.new_empty(3, len(f)).unbind()
        of = [t.contiguous() for t in (problems.alpha, problems.beta, problems.log_a, problems.log_b, problems.epsilon)]
        given = (*rows, columns[0], *of, cost, regularised, error, f.shape[1], g.shape[1])
        launch(_value_of_sums, len(f), *given, BLOCK=1024)
        return cost, regularised, error

    def _launch(
        self, kernel: Any, own: Halves, other: Halves, tensors: tuple[Tensor, ...], *more: float, **of: Any
    ) -> None:
        (problems, n, d), m = own.high.shape, other.high.shape[1]
        settings = tile_of(n, m, own.high, self.largest_tile)
        blocks = triton.cdiv(n, settings["ROWS"])
        given = (own.high, own.low, other.high, other.low, self.halved[2], *tensors, n, m, d, blocks, *more)
        launch(kernel, problems * blocks, *given, **settings, PARTS=own.parts, **of)


def tile_of(rows: int, columns: int, tokens: Tensor, largest: int = LARGEST_TILE) -> dict[str, int]:
    """How scores of so many rows and columns are divided among programs and threads."""
    width = width_of(tokens)
    largest = largest if width <= TILE or has_room(tokens.device) else largest // 2
    rows = min(largest, max(16, triton.next_power_of_2(rows)))
    columns = min(max(16, largest // 2), max(16, triton.next_power_of_2(columns)))
    warps = 8 if rows > TILE else 4
    return {"ROWS": rows, "COLUMNS": columns, "WIDTH": width, "num_warps": warps, "num_stages": 2}
