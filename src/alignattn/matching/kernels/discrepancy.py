"""Sums of a Gaussian kernel and their gradients, streaming: what MMD needs of one side, in one pass over both.

For each token x_i, with weights v of its own side and w of the other,

    within_i = Σ_j v_j k(x_i, x_j),   across_i = Σ_j w_j k(x_i, y_j),   k = exp(-r |x-y|²)
    gradient_i = within_factor Σ_j v_j k(x_i, x_j) (x_j - x_i) + across_factor Σ_j w_j k(x_i, y_j) (y_j - x_i)

A program serves some tokens of one problem; kernels are made tile by tile in registers, and never stored. Products are
of three TF32 parts, about as precise as single precision. Nothing is added atomically: results are the same each time.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE = 64


@triton.jit
def _toward(
    own, i, tokens, weights, problem, count, d, r,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    WITHOUT_OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, WIDTH)
    square = tl.sum(own * own, 1)
    total = tl.zeros([ROWS], tl.float32)
    pulled = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        to = tokens + problem * count * d + j[:, None] * d + e[None, :]
        other = tl.load(to, mask=(j[:, None] < count) & (e[None, :] < d), other=0.0)
        weight = tl.load(weights + problem * count + j, mask=j < count, other=0.0)
        product = tl.dot(own, tl.trans(other), input_precision=PRECISION)
        distance = square[:, None] + tl.sum(other * other, 1)[None, :] - 2.0 * product
        kernel = tl.exp(-r * tl.maximum(distance, 0.0)) * weight[None, :]
        if WITHOUT_OWN:
            kernel = tl.where(i[:, None] == j[None, :], 0.0, kernel)
        total += tl.sum(kernel, 1)
        if WITH_GRADIENT:
            pulled += tl.dot(kernel, other, input_precision=PRECISION)
    return total, pulled - total[:, None] * own


@triton.jit
def _sums(
    x, y, v, w, inverse, within_factor, across_factor, within, across, gradient, n, m, d, blocks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    WITHOUT_OWN: tl.constexpr, WITH_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    i = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, WIDTH)
    r = tl.load(inverse + problem)
    at = problem * n * d + i[:, None] * d + e[None, :]
    inside = (i[:, None] < n) & (e[None, :] < d)
    own = tl.load(x + at, mask=inside, other=0.0)
    total, moved = _toward(own, i, x, v, problem, n, d, r, ROWS, COLUMNS, WIDTH, False, WITH_GRADIENT, PRECISION)
    tl.store(within + problem * n + i, total, mask=i < n)
    if WITH_GRADIENT:
        moved = moved * tl.load(within_factor + problem)
    total, pull = _toward(own, i, y, w, problem, m, d, r, ROWS, COLUMNS, WIDTH, WITHOUT_OWN, WITH_GRADIENT, PRECISION)
    tl.store(across + problem * n + i, total, mask=i < n)
    if WITH_GRADIENT:
        tl.store(gradient + at, moved + pull * tl.load(across_factor + problem), mask=inside)


def sums(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    w: Tensor,
    inverse: Tensor,
    within_factor: Tensor,
    across_factor: Tensor,
    *,
    without_own: bool,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`within` and `across` [p, n], and `gradient` [p, n, d] of tokens x [p, n, d] beside y [p, m, d]."""
    problems, n, d = x.shape
    width = max(16, triton.next_power_of_2(d))
    rows, columns = (min(TILE, max(16, triton.next_power_of_2(side.shape[1]))) for side in (x, y))
    blocks = triton.cdiv(n, rows)
    within, across = x.new_empty(problems, n), x.new_empty(problems, n)
    gradient = x.new_empty(x.shape if with_gradient else (0,))
    given = [tensor.contiguous() for tensor in (x, y, v, w, inverse, within_factor, across_factor)]
    _sums[(problems * blocks,)](
        *given,
        within,
        across,
        gradient,
        n,
        y.shape[1],
        d,
        blocks,
        ROWS=rows,
        COLUMNS=columns,
        WIDTH=width,
        WITHOUT_OWN=without_own,
        WITH_GRADIENT=with_gradient,
        PRECISION="tf32x3",
    )
    return within, across, gradient
