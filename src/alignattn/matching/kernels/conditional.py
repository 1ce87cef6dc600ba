"""Conditional transport and its gradient in two kernels, whatever the length: no plan is stored.

    S = navigator(x)·navigator(y),   T = u(x)·u(y),   u = critic / |critic|,   A = softmax of S along its rows
    a first kernel:    l_i = LSE_j S_ij,   r_i = Σ_j A_ij T_ij,   of queries, and with x and y exchanged of keys
    a second:          what tokens feel, of T: -(A + B), of S: -(A (T - r) + B (T - c)); plans.py has the derivation

A and B already hold what a row and a column counts. A program serves some tokens of one side of a problem. Critics are
brought to one length, and navigators clamped, as they are read. Nothing is added atomically: results are the same each
time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, read, valid_rows, width_of, write

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _unit(critic, guard):
    largest = tl.maximum(tl.max(tl.abs(critic), 1), 1.0)
    within = critic / largest[:, None]
    inverse = tl.rsqrt(tl.sum(within * within, 1) + guard / (largest * largest))
    return within * inverse[:, None], inverse / largest


@triton.jit
def _scores(x_nav, x_unit, y_nav, y_unit, PRECISION: tl.constexpr):
    scores = tl.dot(x_nav, tl.trans(y_nav), input_precision=PRECISION)
    return scores, tl.dot(x_unit, tl.trans(y_unit), input_precision=PRECISION)


@triton.jit
def _choices(
    x_critic, x_navigator, y_critic, y_navigator, x_mask, y_mask, logs, means, problem, sample, block, count, others,
    e, f, largest, guard,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, X_MASKED: tl.constexpr,
    Y_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(x_mask, sample, i, count, X_MASKED)
    x_unit, x_inverse = _unit(read(x_critic, problem, i, valid, count, e, CRITIC), guard)
    x_nav = read(x_navigator, problem, i, valid, count, f, NAVIGATOR)
    x_nav = tl.clamp(x_nav, -largest, largest) * LOG2E  # powers of two from here on
    most = tl.full([ROWS], -1e38, tl.float32)
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = valid_rows(y_mask, sample, j, others, Y_MASKED)
        y_unit, y_inverse = _unit(read(y_critic, problem, j, there, others, e, CRITIC), guard)
        y_nav = tl.clamp(read(y_navigator, problem, j, there, others, f, NAVIGATOR), -largest, largest)
        score, similarity = _scores(x_nav, x_unit, y_nav, y_unit, PRECISION)
        score += tl.where(there, 0.0, float("-inf"))[None, :]
        now = tl.maximum(most, tl.max(score, 1))
        faded, choice = tl.exp2(most - now), tl.exp2(score - now[:, None])
        total = total * faded + tl.sum(choice, 1)
        mean = mean * faded + tl.sum(choice * similarity, 1)
        most = now
    some = tl.where(total > 0, total, 1.0)  # none, where the other side has no token
    tl.store(logs + problem * count + i, most + tl.log2(some), mask=i < count)
    tl.store(means + problem * count + i, mean / some, mask=i < count)


@triton.jit
def _pulls(
    x_critic, x_navigator, y_critic, y_navigator, x_mask, y_mask, x_logs, x_means, y_logs, y_means, x_share, y_share,
    of_critic, of_navigator, problem, sample, block, count, others, e, f, largest, guard,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, X_MASKED: tl.constexpr,
    Y_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(x_mask, sample, i, count, X_MASKED)
    x_unit, x_inverse = _unit(read(x_critic, problem, i, valid, count, e, CRITIC), guard)
    x_raw = read(x_navigator, problem, i, valid, count, f, NAVIGATOR)
    x_nav = tl.clamp(x_raw, -largest, largest) * LOG2E
    at = problem * count + i
    x_log, x_mean = tl.load(x_logs + at, mask=i < count, other=0.0), tl.load(x_means + at, mask=i < count, other=0.0)
    mine = tl.load(x_share + sample)
    unit_pull, pull = tl.zeros([ROWS, CRITIC], tl.float32), tl.zeros([ROWS, NAVIGATOR], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = valid_rows(y_mask, sample, j, others, Y_MASKED)
        y_unit, y_inverse = _unit(read(y_critic, problem, j, there, others, e, CRITIC), guard)
        y_nav = tl.clamp(read(y_navigator, problem, j, there, others, f, NAVIGATOR), -largest, largest)
        to = problem * others + j
        y_log = tl.load(y_logs + to, mask=j < others, other=0.0)
        y_mean = tl.load(y_means + to, mask=j < others, other=0.0)
        score, similarity = _scores(x_nav, x_unit, y_nav, y_unit, PRECISION)
        both = valid[:, None] & there[None, :]
        chosen = tl.where(both, mine * tl.exp2(tl.minimum(score - x_log[:, None], 0.0)), 0.0)
        choosing = tl.load(y_share + sample) * tl.exp2(tl.minimum(score - y_log[None, :], 0.0))
        choosing = tl.where(both, choosing, 0.0)
        unit_pull += tl.dot(chosen + choosing, y_unit, input_precision=PRECISION)
        felt = chosen * (similarity - x_mean[:, None]) + choosing * (similarity - y_mean[None, :])
        pull += tl.dot(felt, y_nav, input_precision=PRECISION)
    along = tl.sum(unit_pull * x_unit, 1)
    write(of_critic, (along[:, None] * x_unit - unit_pull) * x_inverse[:, None], problem, i, count, e, CRITIC)
    write(of_navigator, tl.where(tl.abs(x_raw) <= largest, -pull, 0.0), problem, i, count, f, NAVIGATOR)


@triton.jit
def _first(
    query, key, query_nav, key_nav, query_mask, key_mask, query_logs, key_logs, query_means, key_means,
    heads, n, m, e, f, blocks, places, largest, guard,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    if place < blocks:
        _choices(
            query, query_nav, key, key_nav, query_mask, key_mask, query_logs, query_means, problem, sample, place,
            n, m, e, f, largest, guard, ROWS, COLUMNS, CRITIC, NAVIGATOR, QUERY_MASKED, KEY_MASKED, PRECISION,
        )  # fmt: skip
    else:
        _choices(
            key, key_nav, query, query_nav, key_mask, query_mask, key_logs, key_means, problem, sample, place - blocks,
            m, n, e, f, largest, guard, ROWS, COLUMNS, CRITIC, NAVIGATOR, KEY_MASKED, QUERY_MASKED, PRECISION,
        )  # fmt: skip


@triton.jit
def _second(
    query, key, query_nav, key_nav, query_mask, key_mask, query_logs, key_logs, query_means, key_means,
    query_share, key_share, of_query, of_key, of_query_nav, of_key_nav,
    heads, n, m, e, f, blocks, places, largest, guard,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    sample = problem // heads
    if place < blocks:
        _pulls(
            query, query_nav, key, key_nav, query_mask, key_mask, query_logs, query_means, key_logs, key_means,
            query_share, key_share, of_query, of_query_nav, problem, sample, place, n, m, e, f, largest, guard,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, QUERY_MASKED, KEY_MASKED, PRECISION,
        )  # fmt: skip
    else:
        _pulls(
            key, key_nav, query, query_nav, key_mask, query_mask, key_logs, key_means, query_logs, query_means,
            key_share, query_share, of_key, of_key_nav, problem, sample, place - blocks, m, n, e, f, largest, guard,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, KEY_MASKED, QUERY_MASKED, PRECISION,
        )  # fmt: skip


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products: str, largest: float, query_mask: Tensor | None, key_mask: Tensor | None, *given: Tensor
    ) -> Tensor:
        features = [side.contiguous() for side in given]
        query, key, navigator, _ = features
        (samples, heads, n, e), m = query.shape, key.shape[2]
        masks = as_bytes(query_mask, key_mask, query)
        shares = _shares(query_mask, key_mask, samples, n, m, query)
        logs, means = ([query.new_empty(side.shape[:3]) for side in (query, key)] for _ in range(2))
        rows = min(2 * TILE, max(16, triton.next_power_of_2(max(n, m))))
        blocks = triton.cdiv(n, rows)
        places = blocks + triton.cdiv(m, rows)
        guard = 8 * torch.finfo(torch.float32).eps
        sizes = heads, n, m, e, navigator.shape[3], blocks, places, largest, guard
        same = {
            "ROWS": rows,
            "COLUMNS": min(rows, TILE // 2),
            "CRITIC": width_of(query),
            "NAVIGATOR": width_of(navigator),
            "QUERY_MASKED": query_mask is not None,
            "KEY_MASKED": key_mask is not None,
            "PRECISION": products,
            "num_stages": 2,
        }
        programs = samples * heads * places
        launch(_first, programs, *features, *masks, *logs, *means, *sizes, **same)
        if any(ctx.needs_input_grad[4:]):
            gradients = [torch.empty_like(side) for side in features]
            launch(_second, programs, *features, *masks, *logs, *means, *shares, *gradients, *sizes, **same)
            ctx.save_for_backward(*gradients)
        parts = [
            share[:, None] * _summed(1 - mean, mask)
            for share, mean, mask in zip(shares, means, (query_mask, key_mask), strict=True)
        ]
        return parts[0] + parts[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *(gradient * outer[0][..., None, None] for gradient in ctx.saved_tensors)


def _shares(
    query_mask: Tensor | None, key_mask: Tensor | None, samples: int, n: int, m: int, like: Tensor
) -> list[Tensor]:
    """What one token of a side counts in each sample: half of the loss by either side, nothing where one is empty."""
    counts = [
        like.new_full((samples,), float(count)) if mask is None else mask.sum(-1).to(like.dtype)
        for mask, count in ((query_mask, n), (key_mask, m))
    ]
    alive = (counts[0] * counts[1]).sign() / 2
    return [alive / count.clamp_min(1) for count in counts]


def _summed(values: Tensor, mask: Tensor | None) -> Tensor:
    return values.sum(-1) if mask is None else torch.where(mask[:, None], values, 0.0).sum(-1)


def transport(
    products: str,
    critics: tuple[Tensor, Tensor],
    navigators: tuple[Tensor, Tensor],
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    *,
    largest: float,
) -> Tensor:
    """Bidirectional cost [b, h] of each problem, from features [b, h, tokens, _]; navigators count up to `largest`."""
    losses: Tensor = _Transport.apply(products, largest, query_mask, key_mask, *critics, *navigators)
    return losses
