"""Sinkhorn streaming: scores are made tile by tile in registers, and never stored.

    half-step:  f_i = log a_i - LSE_j(g_j + x_i·y_j / epsilon)
    settle:     whether the step before was within the tolerance; if not, the new f is the one
    carry:      sum_j pi_ij,  sum_j pi_ij y_j  and  sum_j pi_ij log pi_ij,    pi_ij = exp(f_i + g_j + x_i·y_j / epsilon)

Half-steps and what is carried are of rows; columns are the same with x and y exchanged. A program serves some rows of
one problem, or settles one. A problem that is done is left alone: its programs end as they begin. Sums are in single
precision. Nothing is added atomically: results are the same each time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.tiles import TILE, as_products_see, has_room, launch

LARGEST_TILE = 64  # of 64 and 128 the faster on an H200


@triton.jit
def _half_step(
    x, y, g, inverse, log_marginal, done, f, n, m, d, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    if tl.load(done + problem) != 0:
        return
    i = block * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)
    scale = tl.load(inverse + problem)
    at = x + problem * n * d + i[:, None] * d + e[None, :]
    own = as_products_see(tl.load(at, mask=(i[:, None] < n) & (e[None, :] < d), other=0.0), PRECISION)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, m, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = y + problem * m * d + j[None, :] * d + e[:, None]
        other = as_products_see(tl.load(there, mask=(j[None, :] < m) & (e[:, None] < d), other=0.0), PRECISION)
        potential = tl.load(g + problem * m + j, mask=j < m, other=float("-inf"))
        score = tl.dot(own, other, input_precision=PRECISION) * scale + potential[None, :]
        now = tl.maximum(largest, tl.max(score, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp(largest - finite) + tl.sum(tl.exp(score - finite[:, None]), 1)
        largest = now
    marginal = tl.load(log_marginal + problem * n + i, mask=i < n, other=0.0)
    tl.store(f + problem * n + i, marginal - (largest + tl.log(total)), mask=i < n)


@triton.jit
def _settle(f, new, log_marginal, done, iterations, n, tolerance, FIRST: tl.constexpr, ROWS: tl.constexpr):
    problem = tl.program_id(0).to(tl.int64)
    if tl.load(done + problem) != 0:
        return
    if not FIRST:
        off = tl.zeros([ROWS], tl.int32)  # rows that are, by more than the tolerance, or not a number
        for start in range(0, n, ROWS):
            i = start + tl.arange(0, ROWS)
            inside = i < n
            valid = tl.load(log_marginal + problem * n + i, mask=inside, other=float("-inf")) > float("-inf")
            before = tl.load(f + problem * n + i, mask=valid, other=0.0)
            after = tl.load(new + problem * n + i, mask=valid, other=0.0)
            within = tl.abs(tl.exp(before - after) - 1.0) <= tolerance
            off += (valid & ~within).to(tl.int32)
        if tl.sum(off, 0) == 0:
            tl.store(done + problem, 1)
            return
    tl.store(iterations + problem, tl.load(iterations + problem) + 1)
    for start in range(0, n, ROWS):
        i = start + tl.arange(0, ROWS)
        tl.store(f + problem * n + i, tl.load(new + problem * n + i, mask=i < n, other=0.0), mask=i < n)


@triton.jit
def _carry(
    x, y, f, g, inverse, sums, carried, entropy, n, m, d, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    i = block * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)
    scale = tl.load(inverse + problem)
    at = problem * n * d + i[:, None] * d + e[None, :]
    inside = (i[:, None] < n) & (e[None, :] < d)
    own = as_products_see(tl.load(x + at, mask=inside, other=0.0), PRECISION)
    potential = tl.load(f + problem * n + i, mask=i < n, other=float("-inf"))
    total = tl.zeros([ROWS], tl.float32)
    disorder = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, m, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        to = y + problem * m * d + j[:, None] * d + e[None, :]
        other = as_products_see(tl.load(to, mask=(j[:, None] < m) & (e[None, :] < d), other=0.0), PRECISION)
        across = tl.load(g + problem * m + j, mask=j < m, other=float("-inf"))
        score = tl.dot(own, tl.trans(other), input_precision=PRECISION) * scale
        logarithm = score + potential[:, None] + across[None, :]
        plan = tl.exp(logarithm)
        disorder += tl.sum(tl.where(plan > 0.0, plan * logarithm, 0.0), 1)
        total += tl.sum(plan, 1)
        mean += tl.dot(as_products_see(plan, PRECISION), other, input_precision=PRECISION)
    tl.store(sums + problem * n + i, total, mask=i < n)
    tl.store(entropy + problem * n + i, disorder, mask=i < n)
    tl.store(carried + at, mean, mask=inside)


class StreamedScores:
    """x·y/epsilon of a stack of problems x [p, n, d] and y [p, m, d], and what Sinkhorn takes of it."""

    def __init__(
        self, x: Tensor, y: Tensor, epsilon: Tensor, products: str = EXACT, *, largest_tile: int = LARGEST_TILE
    ) -> None:
        self.x, self.y = x.contiguous(), y.contiguous()
        self.inverse = 1 / epsilon
        self.products = products
        self.largest_tile = largest_tile

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Potentials f and g, beginning with this g, and the number of iterations each problem took."""
        log_a, log_b, g = log_a.contiguous(), log_b.contiguous(), g.clone(memory_format=torch.contiguous_format)
        f, new = torch.empty_like(log_a), torch.empty_like(log_a)
        done = torch.zeros(len(g), dtype=torch.uint8, device=g.device)
        iterations = torch.zeros(len(g), dtype=torch.int64, device=g.device)
        rows = min(1024, triton.next_power_of_2(f.shape[1]))
        for iteration in range(max_iterations):
            self._launch(_half_step, self.x, self.y, g, self.inverse, log_a, done, new)
            settings = {"FIRST": iteration == 0, "ROWS": rows}
            launch(_settle, len(f), f, new, log_a, done, iterations, f.shape[1], tolerance, **settings)
            if iteration and iteration % look_every == 0 and done.all():
                break
            self._launch(_half_step, self.y, self.x, f, self.inverse, log_b, done, g)
        return f, g, iterations

    def carry(self, f: Tensor, g: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Sums of the plan's rows, and what they carry; the same of columns; sum pi log pi, by rows."""
        found, entropies = [], []
        for x, y, own, other in ((self.x, self.y, f, g), (self.y, self.x, g, f)):
            sums, carried, entropy = x.new_empty(x.shape[:2]), torch.empty_like(x), x.new_empty(x.shape[:2])
            self._launch(_carry, x, y, own.contiguous(), other.contiguous(), self.inverse, sums, carried, entropy)
            found.append((sums, carried))
            entropies.append(entropy)
        return found[0], found[1], entropies[0].sum(-1)

    def _launch(self, kernel: Any, x: Tensor, y: Tensor, *tensors: Tensor) -> None:
        width = max(16, triton.next_power_of_2(x.shape[2]))
        largest = self.largest_tile if width <= TILE or has_room(x.device) else self.largest_tile // 2
        rows, columns = (min(largest, max(16, triton.next_power_of_2(side.shape[1]))) for side in (x, y))
        blocks = triton.cdiv(x.shape[1], rows)
        sizes = (x.shape[1], y.shape[1], x.shape[2], blocks)
        settings = {"ROWS": rows, "COLUMNS": columns, "WIDTH": width, "PRECISION": self.products}
        launch(kernel, len(x) * blocks, x, y, *tensors, *sizes, **settings)
