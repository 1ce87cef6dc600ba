"""Sinkhorn with scores in memory, a problem a program, for those that are small.

    score:  s_ij = x_i·y_j / epsilon
    solve:  f_i = log a_i - LSE_j(g_j + s_ij), and of the same scores, while they are at hand, g_j = log b_j -
            LSE_i(f_i + s_ij), until no marginal is off by more than the tolerance
    value:  of the plan pi_ij = exp(f_i + g_j + s_ij): its cost, its entropy, and by how much marginals are off

An iteration reads the scores once, and a whole solution is one launch: streamed (sinkhorn.py), iterations are two
launches each, and take Python longer than the device. What a plan carries is streamed. Potentials and scores are
exponents of two there and here. Sums are in single precision. Nothing is added atomically: results are the same each
time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import product, read_halves
from alignattn.matching.kernels.sinkhorn import LEAST, LN_2, LOG2_E, StreamedScores, of_plan, share_off
from alignattn.matching.kernels.tiles import TILE, as_products_see, launch, read_at, width_of
from alignattn.matching.scores import Problems

# Rows that a program has in registers, and scores in all, 16 for each thread: of what was tried on an H200 the fastest
# for 128 and for 512 tokens.
AT_ONCE, HELD, A_WARP = 16, 8192, 512
MOST = 2**18  # scores of a problem: of more the device would take longer than Python
TIMES_TOKENS = 4  # scores, as a multiple of queries and keys: memory stays linear in their number


def pay(queries: int, keys: int, width: int) -> bool:
    """Whether scores are worth their memory.

    Few problems leave a device idle, and still take it less time than Python takes for many launches; if they are small
    enough for one program.
    """
    few = queries * keys <= TIMES_TOKENS * (queries + keys) * width
    return few and keys <= HELD and queries * keys <= MOST


@triton.jit
def _score(
    x, x_low, y, y_low, scale, scores, n, m, d, x_step, y_step, down, right,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of halves, or of tokens as they are where there are no PARTS. `x_step`: tokens from a problem to the next."""
    problem = (tl.program_id(0) // (down * right)).to(tl.int64)
    of_x, of_y = problem * x_step * d, problem * y_step * d
    i = tl.program_id(0) // right % down * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % right * COLUMNS + tl.arange(0, COLUMNS)
    score = tl.zeros([ROWS, COLUMNS], tl.float32)
    if PARTS > 0:
        own, own_rest = read_halves(x + of_x, x_low + of_x, 0, i, n, d, WIDTH, PARTS)
        other, rest = read_halves(y + of_y, y_low + of_y, 0, j, m, d, WIDTH, PARTS)
        score = product(own, own_rest, tl.trans(other), tl.trans(rest), score, PARTS)
    else:
        own = as_products_see(read_at(x + of_x, i, i < n, d, d, WIDTH), PRECISION)
        other = as_products_see(read_at(y + of_y, j, j < m, d, d, WIDTH), PRECISION)
        score = tl.dot(own, tl.trans(other), score, input_precision=PRECISION)
    at = (problem * n + i[:, None]) * m + j[None, :]
    tl.store(scores + at, score * tl.load(scale + problem), mask=(i[:, None] < n) & (j[None, :] < m))


@triton.jit
def _read(scores, problem, i, j, n, m, WHOLE: tl.constexpr):
    """`WHOLE`: tiles end where the problem does, and nothing is masked."""
    at = scores + (problem * n + i[:, None]) * m + j[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(i[:, None] < n) & (j[None, :] < m), other=float("-inf"))


@triton.jit
def _read_rows(log_a, before, i, n):
    """Marginals and potentials of some rows."""
    marginal = tl.load(log_a + i, mask=i < n, other=float("-inf")) * LOG2_E
    return marginal, tl.load(before + i, mask=i < n, other=0.0)


@triton.jit
def _stable(
    scores, log_a, before, f, across, marginal, problem, iteration, n, m, tolerance,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """An iteration about the largest of each row and column: new g, and how many rows were off."""
    j = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    off = tl.zeros([ROWS], tl.int32)  # rows that are, by more than the tolerance, or not a number
    for first in range(0, n, ROWS):
        i = first + row
        score = _read(scores, problem, i, j, n, m, WHOLE)
        along = score + across[None, :]
        in_row = tl.max(along, 1)
        in_row = tl.where(in_row == float("-inf"), 0.0, in_row)
        log_sum = in_row + tl.log2(tl.sum(tl.exp2(along - in_row[:, None]), 1))
        own_marginal = tl.load(log_a + i, mask=i < n, other=float("-inf")) * LOG2_E
        valid = own_marginal > float("-inf")
        own = tl.where(valid, own_marginal - log_sum, float("-inf"))
        if iteration > 0:
            old = tl.load(before + i, mask=valid, other=0.0)
            close = tl.abs(tl.exp2(old - own) - 1.0) <= tolerance
            off += (valid & ~close).to(tl.int32)
        tl.store(f + i, own, mask=i < n)
        down = score + own[:, None]
        now = tl.maximum(largest, tl.max(down, 0))
        finite = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(down - finite[None, :]), 0)
        largest = now
    return tl.where(j < m, marginal - (largest + tl.log2(total)), float("-inf")), tl.sum(off, 0)


@triton.jit
def _quick(
    scores, log_a, before, f, across, marginal, problem, iteration, n, m, tolerance, LEAST: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same about the plan of the step before: one exponential of each score, and one sum across threads a tile.

    Its columns are right, so that no row has more than all, and none less than a share of 1/m of what it should: an
    iteration moves potentials by log n or log m at most. Before the first there is no such plan: rows are taken about
    their largest number then. Sums beyond LEAST are told last: scores are so large then that their rounding moves
    potentials more, or a column is so far off that it has next to nothing in the first.
    """
    j = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    plan = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows of all tiles, added up
    off = tl.zeros([ROWS], tl.int32)
    lost = tl.zeros([ROWS], tl.int32)
    upcoming = _read(scores, problem, row, j, n, m, WHOLE)
    upcoming_marginal, upcoming_old = _read_rows(log_a, before, row, n)
    for first in range(0, n, ROWS):
        i = first + row
        score, own_marginal, old = upcoming, upcoming_marginal, upcoming_old
        following = tl.where(first + ROWS < n, first + ROWS, 0) + row  # read while these are worked on
        upcoming = _read(scores, problem, following, j, n, m, WHOLE)
        upcoming_marginal, upcoming_old = _read_rows(log_a, before, following, n)
        valid = own_marginal > float("-inf")
        along = score + across[None, :]
        shift = old - own_marginal
        if iteration == 0:
            shift = -tl.max(along, 1)
        shift = tl.where(valid, shift, float("-inf"))
        share = tl.exp2(along + shift[:, None])
        total = tl.sum(share, 1)  # one, where the row was right
        known = (total > LEAST) & (total < 1 / LEAST)
        lost += (valid & ~known).to(tl.int32)
        off += (valid & ~(tl.abs(total - 1.0) <= tolerance)).to(tl.int32)
        tl.store(f + i, tl.where(valid, own_marginal + shift - tl.log2(total), float("-inf")), mask=i < n)
        plan += share * tl.where(valid & known, tl.exp2(own_marginal) / total, 0.0)[:, None]
    columns = tl.sum(plan, 0)
    present = marginal > float("-inf")
    known = (columns > LEAST) & (columns < 1 / LEAST)
    unknown = tl.sum(lost, 0) + tl.sum((present & ~known).to(tl.int32), 0)
    return tl.where(present, across + marginal - tl.log2(columns), float("-inf")), tl.sum(off, 0), unknown


@triton.jit
def _solve(
    scores, log_a, log_b, start, both, f, g, iterations, n, m, a_step, b_step, start_step, problems, most_iterations,
    tolerance, to_bits, LEAST: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The steps are from a problem to the next; `to_bits` makes exponents of two of what potentials start with."""
    problem = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    log_a += problem * a_step
    across = tl.load(start + problem * start_step + j, mask=j < m, other=float("-inf")) * to_bits
    marginal = tl.load(log_b + problem * b_step + j, mask=j < m, other=float("-inf")) * LOG2_E
    iteration = 0
    off = 1
    while (iteration < most_iterations) & (off > 0):
        # This f and the one before lie in two buffers, in turns: where this is no step, the one before is the one.
        new = both + (problem + (iteration % 2) * problems) * n
        before = both + (problem + ((iteration + 1) % 2) * problems) * n
        step, off, unknown = _quick(
            scores,
            log_a,
            before,
            new,
            across,
            marginal,
            problem,
            iteration,
            n,
            m,
            tolerance,
            LEAST,
            WHOLE,
            ROWS,
            COLUMNS,
        )
        if unknown > 0:
            step, off = _stable(
                scores, log_a, before, new, across, marginal, problem, iteration, n, m, tolerance, WHOLE, ROWS, COLUMNS
            )
        off = tl.where(iteration == 0, 1, off)
        across = tl.where(off > 0, step, across)
        iteration += (off > 0).to(tl.int32)
        tl.debug_barrier()  # what is stored is read in the next but by other threads
    last = both + (problem + ((iteration + 1) % 2) * problems) * n
    for first in range(0, n, COLUMNS):
        i = first + tl.arange(0, COLUMNS)
        tl.store(f + problem * n + i, tl.load(last + i, mask=i < n, other=0.0), mask=i < n)
    tl.store(g + problem * m + j, across, mask=j < m)
    tl.store(iterations + problem, iteration)


@triton.jit
def _value(
    scores, f, g, alpha, beta, log_a, log_b, epsilon, cost, regularised, error, n, m, a_step, b_step, worth,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`worth`: of alpha and beta, in units of the cost."""
    problem = tl.program_id(0).to(tl.int64)
    alpha, log_a = alpha + problem * a_step, log_a + problem * a_step
    beta, log_b = beta + problem * b_step, log_b + problem * b_step
    j = tl.arange(0, COLUMNS)
    inside = j < m
    across = tl.load(g + problem * m + j, mask=inside, other=float("-inf"))
    plan_sums = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows of all tiles, added up
    paid = tl.zeros([ROWS, COLUMNS], tl.float32)  # pi s
    disorder = tl.zeros([ROWS, COLUMNS], tl.float32)  # pi log pi
    worst = tl.zeros([ROWS], tl.float32)
    from_queries = tl.zeros([ROWS], tl.float32)
    for first in range(0, n, ROWS):
        i = first + tl.arange(0, ROWS)
        score = _read(scores, problem, i, j, n, m, WHOLE)
        own = tl.load(f + problem * n + i, mask=i < n, other=float("-inf"))
        logarithm = of_plan(score, own, across)
        plan = tl.exp2(logarithm)
        here = plan > 0.0
        paid += tl.where(here, plan * score, 0.0)
        disorder += tl.where(here, plan * logarithm, 0.0)
        plan_sums += plan
        row_sums = tl.sum(plan, 1)
        from_queries += row_sums * tl.load(alpha + i, mask=i < n, other=0.0)
        marginal = tl.load(log_a + i, mask=i < n, other=float("-inf"))
        worst = tl.maximum(worst, share_off(row_sums, marginal))
    column_sums = tl.sum(plan_sums, 0)
    marginal = tl.load(log_b + j, mask=inside, other=float("-inf"))
    from_keys = tl.sum(column_sums * tl.load(beta + j, mask=inside, other=0.0), 0)
    scale = tl.load(epsilon + problem)
    total = (tl.sum(from_queries, 0) + from_keys) * worth - tl.sum(tl.sum(paid, 0), 0) * scale * LN_2
    tl.store(cost + problem, total)
    tl.store(regularised + problem, total + scale * LN_2 * tl.sum(tl.sum(disorder, 0), 0))
    largest = tl.maximum(tl.max(worst, 0), tl.max(share_off(column_sums, marginal), 0))
    tl.store(error + problem, largest + (total - total))  # the largest of some is never NaN, where one is


class StoredScores(StreamedScores):
    """The same, which solves with scores in memory, and tells values of them."""

    def __init__(self, x: Tensor, y: Tensor, epsilon: Tensor, products: str = EXACT, *, carried: bool = True) -> None:
        """`carried`: of the same halves that carry() will see, to the last bit. To make them are two launches more."""
        x, y, epsilon = x.contiguous(), y.contiguous(), epsilon.contiguous()
        super().__init__(x, y, epsilon, products)
        # Not by torch, whose products of a problem depend on how many others there are.
        if carried:
            of_x, of_y, scale, _ = self.halved
            self.scores = scores_of((of_x.high, of_x.low), (of_y.high, of_y.low), scale, of_x.parts)
        else:
            self.scores = scores_of((x, x), (y, y), LOG2_E.value / epsilon, 0, precision=products)

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Potentials f and g, as powers of two, and the number of iterations each problem took; begins with this g."""
        return solved(self.scores, log_a.contiguous(), log_b.contiguous(), g.contiguous(), max_iterations, tolerance)

    def value(self, f: Tensor, g: Tensor, problems: Problems) -> tuple[Tensor, Tensor, Tensor]:
        """Cost of the plan, the same with epsilon times sum pi log pi, and by how much marginals are off at most."""
        of = [t.contiguous() for t in (problems.alpha, problems.beta, problems.log_a, problems.log_b)]
        return value_of(self.scores, f, g, of[0], of[1], of[2], of[3], self.epsilon)


# What follows takes rows of tensors where a problem's begin, however far the next one's is.

Halved = tuple[Tensor, Tensor]


def scores_of(x: Halved, y: Halved, scale: Tensor, parts: int, *, precision: str = EXACT) -> Tensor:
    """[p, n, m], of halves [p, n, d] and [p, m, d], or with no parts of tokens; times a scale [p]."""
    (problems, n, d), m = x[0].shape, y[0].shape[1]
    scores = scale.new_empty(problems, n, m)
    rows, columns = (min(TILE, max(16, triton.next_power_of_2(count))) for count in (n, m))
    down, right = triton.cdiv(n, rows), triton.cdiv(m, columns)
    steps = x[0].stride(0) // d, y[0].stride(0) // d
    settings = {"PARTS": parts, "ROWS": rows, "COLUMNS": columns, "WIDTH": width_of(x[0]), "PRECISION": precision}
    launch(_score, problems * down * right, *x, *y, scale, scores, n, m, d, *steps, down, right, **settings)
    return scores


def solved(
    scores: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    g: Tensor,
    max_iterations: int,
    tolerance: float,
    *,
    bits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Potentials f and g, as powers of two, and the number of iterations; begins with this g, of `bits` or natural."""
    problems, n, m = scores.shape
    buffers, f, found = g.new_empty(2, problems, n), g.new_empty(problems, n), g.new_empty(problems, m)
    iterations = torch.empty(problems, dtype=torch.int64, device=g.device)
    steps = log_a.stride(0), log_b.stride(0), g.stride(0)
    given = (log_a, log_b, g, buffers, f, found, iterations, n, m, *steps, problems, max_iterations, tolerance)
    _each(_solve, scores, *given, 1.0 if bits else LOG2_E.value, LEAST=LEAST)
    return f, found, iterations


def value_of(
    scores: Tensor, f: Tensor, g: Tensor, alpha: Tensor, beta: Tensor, log_a: Tensor, log_b: Tensor, epsilon: Tensor,
    *, worth: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cost of the plan, the same with epsilon times sum pi log pi, and by how much marginals are off at most.

    Alpha and beta, which lie as the marginals do, are in units of so much.
    """
    cost, regularised, error = f.new_empty(3, len(f)).unbind()
    steps = log_a.stride(0), log_b.stride(0)
    given = (f, g, alpha, beta, log_a, log_b, epsilon, cost, regularised, error, *scores.shape[1:], *steps, worth)
    _each(_value, scores, *given)
    return cost, regularised, error


def _each(kernel: Any, scores: Tensor, *given: Any, **settings: Any) -> None:
    """A program a problem."""
    problems, n, m = scores.shape
    columns = max(16, triton.next_power_of_2(m))
    rows = max(1, min(AT_ONCE, HELD // columns, triton.next_power_of_2(n)))
    settings |= {"WHOLE": columns == m and n % rows == 0, "ROWS": rows, "COLUMNS": columns}
    launch(kernel, problems, scores, *given, **settings, num_warps=max(4, rows * columns // A_WARP))
