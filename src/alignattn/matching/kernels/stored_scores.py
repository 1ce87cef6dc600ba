"""Sinkhorn with scores in memory, a problem a program: products in single precision cost more than to read them.

    score:  s_ij = x_i·y_j / epsilon
    solve:  f_i = log a_i - LSE_j(g_j + s_ij), and of the same scores, while they are at hand, g_j = log b_j -
            LSE_i(f_i + s_ij), until no marginal is off by more than the tolerance
    value:  of the plan pi_ij = exp(f_i + g_j + s_ij): its cost, its entropy, and by how much marginals are off

An iteration reads the scores once, and a whole solution is one launch, which Python makes in microseconds: made of
launches, these took Python longer than the device. What a plan carries is streamed (sinkhorn.py). Sums are in single
precision. Nothing is added atomically: results are the same each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.sinkhorn import StreamedScores
from alignattn.matching.kernels.tiles import TILE, launch, read, width_of

# Scores that a program has in registers, of one or more whole rows. On an H200, when iterations still took two
# exponentials a score, the best for 128 tokens and, by two hundredths, the second for 512.
HELD = 4096
MOST = 2**18  # scores of a problem: of more the device would take longer than Python
LEAST = 1e-20  # of a sum, and its inverse the most: beyond, what single precision lost may count


def pay(queries: int, keys: int, products: str) -> bool:
    """Whether scores are worth their memory. Products of one part are made faster than read.

    Few problems leave a device idle, and still take it less time than Python takes for many launches; if they are small
    enough for one program.
    """
    return products == EXACT and keys <= HELD and queries * keys <= MOST


@triton.jit
def _score(
    x, y, inverse, scores, n, m, d, down, right,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // (down * right)).to(tl.int64)
    i = tl.program_id(0) // right % down * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) % right * COLUMNS + tl.arange(0, COLUMNS)
    own = read(x, problem, i, i < n, n, d, WIDTH)
    other = read(y, problem, j, j < m, m, d, WIDTH)
    score = tl.dot(own, tl.trans(other), input_precision=PRECISION) * tl.load(inverse + problem)
    at = (problem * n + i[:, None]) * m + j[None, :]
    tl.store(scores + at, score, mask=(i[:, None] < n) & (j[None, :] < m))


@triton.jit
def _read(scores, problem, i, j, n, m):
    at = (problem * n + i[:, None]) * m + j[None, :]
    return tl.load(scores + at, mask=(i[:, None] < n) & (j[None, :] < m), other=float("-inf"))


@triton.jit
def _stable(
    scores, log_a, before, f, across, marginal, problem, iteration, n, m, tolerance,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """An iteration about the largest of each row and column: new g, and how many rows were off."""
    j = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    largest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    off = tl.zeros([ROWS], tl.int32)  # rows that are, by more than the tolerance, or not a number
    for first in range(0, n, ROWS):
        i = first + row
        score = _read(scores, problem, i, j, n, m)
        along = score + across[None, :]
        in_row = tl.max(along, 1)
        in_row = tl.where(in_row == float("-inf"), 0.0, in_row)
        log_sum = in_row + tl.log(tl.sum(tl.exp(along - in_row[:, None]), 1))
        own_marginal = tl.load(log_a + problem * n + i, mask=i < n, other=float("-inf"))
        valid = own_marginal > float("-inf")
        own = tl.where(valid, own_marginal - log_sum, float("-inf"))
        if iteration > 0:
            old = tl.load(before + i, mask=valid, other=0.0)
            close = tl.abs(tl.exp(old - own) - 1.0) <= tolerance
            off += (valid & ~close).to(tl.int32)
        tl.store(f + i, own, mask=i < n)
        down = score + own[:, None]
        now = tl.maximum(largest, tl.max(down, 0))
        finite = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(down - finite[None, :]), 0)
        largest = now
    return tl.where(j < m, marginal - (largest + tl.log(total)), float("-inf")), tl.sum(off, 0)


@triton.jit
def _quick(
    scores, log_a, before, f, across, marginal, problem, n, m, tolerance, LEAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same about the plan of the step before: one exponential of each score, and one sum across threads a tile.

    Its columns are right, so that no row has more than all, and none less than a share of 1/m of what it should: an
    iteration moves potentials by log n or log m at most. Sums beyond LEAST are told last: scores are so large then that
    their rounding moves potentials more.
    """
    j = tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    plan = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows of all tiles, added up
    off = tl.zeros([ROWS], tl.int32)
    lost = tl.zeros([ROWS], tl.int32)
    upcoming = _read(scores, problem, row, j, n, m)
    for first in range(0, n, ROWS):
        i = first + row
        score = upcoming
        upcoming = _read(scores, problem, i + ROWS, j, n, m)  # while these are worked on
        own_marginal = tl.load(log_a + problem * n + i, mask=i < n, other=float("-inf"))
        valid = own_marginal > float("-inf")
        old = tl.load(before + i, mask=valid, other=0.0)
        shift = tl.where(valid, old - own_marginal, float("-inf"))
        share = tl.exp(score + across[None, :] + shift[:, None])
        total = tl.sum(share, 1)  # one, where the row was right
        known = (total > LEAST) & (total < 1 / LEAST)
        lost += (valid & ~known).to(tl.int32)
        off += (valid & ~(tl.abs(total - 1.0) <= tolerance)).to(tl.int32)
        tl.store(f + i, tl.where(valid, old - tl.log(total), float("-inf")), mask=i < n)
        plan += share * tl.where(valid & known, tl.exp(own_marginal) / total, 0.0)[:, None]
    columns = tl.sum(plan, 0)
    present = marginal > float("-inf")
    known = (columns > LEAST) & (columns < 1 / LEAST)
    unknown = tl.sum(lost, 0) + tl.sum((present & ~known).to(tl.int32), 0)
    return tl.where(present, across + marginal - tl.log(columns), float("-inf")), tl.sum(off, 0), unknown


@triton.jit
def _solve(
    scores, log_a, log_b, start, f, g, iterations, n, m, problems, most_iterations, tolerance, LEAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    across = tl.load(start + problem * m + j, mask=j < m, other=float("-inf"))
    marginal = tl.load(log_b + problem * m + j, mask=j < m, other=float("-inf"))
    iteration = 0
    off = 1
    while (iteration < most_iterations) & (off > 0):
        # This f and the one before lie in two buffers, in turns: where this is no step, the one before is the one.
        new = f + (problem + (iteration % 2) * problems) * n
        before = f + (problem + ((iteration + 1) % 2) * problems) * n
        step = across
        unknown = 1
        if iteration > 0:
            step, off, unknown = _quick(
                scores, log_a, before, new, across, marginal, problem, n, m, tolerance, LEAST, ROWS, COLUMNS
            )
        if unknown > 0:
            step, off = _stable(
                scores, log_a, before, new, across, marginal, problem, iteration, n, m, tolerance, ROWS, COLUMNS
            )
        off = tl.where(iteration == 0, 1, off)
        across = tl.where(off > 0, step, across)
        iteration += (off > 0).to(tl.int32)
        tl.debug_barrier()  # what is stored is read in the next but by other threads
    tl.store(g + problem * m + j, across, mask=j < m)
    tl.store(iterations + problem, iteration)


@triton.jit
def _value(
    scores, f, g, log_a, log_b, alpha, beta, epsilon, cost, regularised, error, n, m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, COLUMNS)
    inside = j < m
    across = tl.load(g + problem * m + j, mask=inside, other=float("-inf"))
    from_key = tl.load(beta + problem * m + j, mask=inside, other=0.0)
    column_sums = tl.zeros([COLUMNS], tl.float32)
    paid = tl.zeros([ROWS], tl.float32)  # sum pi c, less what depends on one token alone
    entropy = tl.zeros([ROWS], tl.float32)  # sum pi log pi
    worst = tl.zeros([ROWS], tl.float32)
    from_queries = tl.zeros([ROWS], tl.float32)
    for first in range(0, n, ROWS):
        i = first + tl.arange(0, ROWS)
        score = _read(scores, problem, i, j, n, m)
        own = tl.load(f + problem * n + i, mask=i < n, other=float("-inf"))
        logarithm = score + own[:, None] + across[None, :]
        plan = tl.exp(logarithm)
        here = plan > 0.0
        paid += tl.sum(tl.where(here, plan * score, 0.0), 1)
        entropy += tl.sum(tl.where(here, plan * logarithm, 0.0), 1)
        row_sums = tl.sum(plan, 1)
        from_queries += row_sums * tl.load(alpha + problem * n + i, mask=i < n, other=0.0)
        marginal = tl.load(log_a + problem * n + i, mask=i < n, other=float("-inf"))
        worst = tl.maximum(worst, _off(row_sums, marginal))
        column_sums += tl.sum(plan, 0)
    marginal = tl.load(log_b + problem * m + j, mask=inside, other=float("-inf"))
    scale = tl.load(epsilon + problem)
    total = tl.sum(from_queries, 0) + tl.sum(column_sums * from_key, 0) - tl.sum(paid, 0) * scale
    tl.store(cost + problem, total)
    tl.store(regularised + problem, total + scale * tl.sum(entropy, 0))
    largest = tl.maximum(tl.max(worst, 0), tl.max(_off(column_sums, marginal), 0))
    tl.store(error + problem, largest + (total - total))  # the largest of some is never NaN, where one is


@triton.jit
def _off(sums, log_marginal):
    valid = log_marginal > float("-inf")
    return tl.where(valid, tl.abs(sums / tl.exp(tl.where(valid, log_marginal, 0.0)) - 1.0), 0.0)


class StoredScores(StreamedScores):
    """The same, which solves with scores in memory, and tells values without what is carried."""

    def __init__(self, x: Tensor, y: Tensor, epsilon: Tensor) -> None:
        super().__init__(x, y, epsilon, EXACT)
        self.epsilon = epsilon.contiguous()
        (problems, n, d), m = x.shape, y.shape[1]
        self.scores = x.new_empty(problems, n, m)
        # Not by torch, whose products of a problem depend on how many others there are.
        settings = {"ROWS": _tile(n), "COLUMNS": _tile(m), "WIDTH": width_of(x), "PRECISION": EXACT}
        down, right = triton.cdiv(n, settings["ROWS"]), triton.cdiv(m, settings["COLUMNS"])
        given = (self.x, self.y, self.inverse, self.scores, n, m, d, down, right)
        launch(_score, problems * down * right, *given, **settings)

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Potentials f and g, beginning with this g, and the number of iterations each problem took."""
        problems, n, m = self.scores.shape
        both, found = g.new_empty(2, problems, n), g.new_empty(problems, m)
        iterations = torch.empty(problems, dtype=torch.int64, device=g.device)
        given = (log_a.contiguous(), log_b.contiguous(), g.contiguous(), both, found, iterations)
        self._each(_solve, *given, n, m, problems, max_iterations, tolerance, LEAST)
        return torch.where((iterations % 2 == 1)[:, None], both[0], both[1]), found, iterations

    def value(
        self, f: Tensor, g: Tensor, log_a: Tensor, log_b: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cost of the plan, the same with epsilon times sum pi log pi, and by how much marginals are off at most."""
        given = [tensor.contiguous() for tensor in (f, g, log_a, log_b, alpha, beta)]
        found = self.epsilon.new_empty(3, len(f)).unbind()
        self._each(_value, *given, self.epsilon, *found, *self.scores.shape[1:])
        return found[0], found[1], found[2]

    def _each(self, kernel: object, *given: Tensor | float) -> None:
        """A program a problem."""
        problems, n, m = self.scores.shape
        columns = max(16, triton.next_power_of_2(m))
        rows = max(1, min(HELD // columns, triton.next_power_of_2(n)))
        launch(kernel, problems, self.scores, *given, ROWS=rows, COLUMNS=columns)


def _tile(count: int) -> int:
    return int(min(TILE, max(16, triton.next_power_of_2(count))))
