"""Conditional transport and its gradient in three kernels, whatever the length: no plan is stored.

    S = navigator(x)·navigator(y),   T = u(x)·u(y),   u = critic / |critic|,   A = softmax of S along its rows
    a second kernel:   l_i = LSE_j S_ij,   r_i = Σ_j A_ij T_ij,   of queries, and with x and y exchanged of keys
    a third:           what tokens feel, of T: -(A + B), of S: -(A (T - r) + B (T - c)); plans.py has the derivation

A and B already hold what a row and a column counts. A first kernel brings critics to one length, clamps navigators, and
leaves both as halves (halves.py), navigators of each token in a unit of its own. A program serves some tokens of one
side of a problem. Nothing is added atomically: results are the same each time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import ROOM, powers, product, read_halves, split
from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, read, valid_rows, width_of, write

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _unit(critic, guard):
    largest = tl.maximum(tl.max(tl.abs(critic), 1), 1.0)
    within = critic / largest[:, None]
    inverse = tl.rsqrt(tl.sum(within * within, 1) + guard / (largest * largest))
    return within * inverse[:, None], inverse / largest


@triton.jit
def _place_side(
    critic, navigator, mask, unit_high, unit_low, nav_high, nav_low, inverses, sizes, problem, sample, block, count,
    e, f, largest, guard,
    ROWS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(mask, sample, i, count, MASKED)
    unit, inverse = _unit(read(critic, problem, i, valid, count, e, CRITIC), guard)
    tl.store(inverses + problem * count + i, inverse, mask=i < count)
    first, second, _ = split(unit * ROOM, PARTS)
    write(unit_high, first, problem, i, count, e, CRITIC)
    if PARTS == 3:
        write(unit_low, second, problem, i, count, e, CRITIC)
    nav = tl.clamp(read(navigator, problem, i, valid, count, f, NAVIGATOR), -largest, largest)
    power, size = powers(tl.max(tl.abs(nav), 1))
    tl.store(sizes + problem * count + i, size, mask=i < count)
    first, second, _ = split(nav * power[:, None], PARTS)
    write(nav_high, first, problem, i, count, f, NAVIGATOR)
    if PARTS == 3:
        write(nav_low, second, problem, i, count, f, NAVIGATOR)


@triton.jit
def _place(
    query, key, query_nav, key_nav, query_mask, key_mask,
    query_unit, query_unit_low, query_placed, query_placed_low, key_unit, key_unit_low, key_placed, key_placed_low,
    query_inverse, key_inverse, query_size, key_size, heads, n, m, e, f, blocks, places, largest, guard,
    ROWS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    if place < blocks:
        _place_side(
            query, query_nav, query_mask, query_unit, query_unit_low, query_placed, query_placed_low, query_inverse,
            query_size, problem, sample, place, n, e, f, largest, guard, ROWS, CRITIC, NAVIGATOR, QUERY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _place_side(
            key, key_nav, key_mask, key_unit, key_unit_low, key_placed, key_placed_low, key_inverse,
            key_size, problem, sample, place - blocks, m, e, f, largest, guard,
            ROWS, CRITIC, NAVIGATOR, KEY_MASKED, PARTS,
        )  # fmt: skip


@triton.jit
def _scores(
    x_nav, x_nav_low, x_unit, x_unit_low, x_size, y_nav, y_nav_low, y_unit, y_unit_low, y_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """S as powers of two, and T."""
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    score = product(x_nav, x_nav_low, tl.trans(y_nav), tl.trans(y_nav_low), nothing, PARTS)
    similarity = product(x_unit, x_unit_low, tl.trans(y_unit), tl.trans(y_unit_low), nothing, PARTS)
    return score * (x_size * LOG2E)[:, None] * y_size[None, :], similarity * (1.0 / (ROOM * ROOM))


@triton.jit
def _choices(
    x_unit, x_unit_low, x_nav, x_nav_low, y_unit, y_unit_low, y_nav, y_nav_low, y_mask, x_sizes, y_sizes, logs,
    means, problem, sample, block, count, others, e, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, Y_MASKED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    unit, unit_low = read_halves(x_unit, x_unit_low, problem, i, count, e, CRITIC, PARTS)
    nav, nav_low = read_halves(x_nav, x_nav_low, problem, i, count, f, NAVIGATOR, PARTS)
    x_size = tl.load(x_sizes + problem * count + i, mask=i < count, other=0.0)
    most = tl.full([ROWS], -1e38, tl.float32)
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = valid_rows(y_mask, sample, j, others, Y_MASKED)
        their_unit, their_unit_low = read_halves(y_unit, y_unit_low, problem, j, others, e, CRITIC, PARTS)
        their_nav, their_nav_low = read_halves(y_nav, y_nav_low, problem, j, others, f, NAVIGATOR, PARTS)
        y_size = tl.load(y_sizes + problem * others + j, mask=j < others, other=0.0)
        score, similarity = _scores(
            nav, nav_low, unit, unit_low, x_size, their_nav, their_nav_low, their_unit, their_unit_low, y_size,
            ROWS, COLUMNS, PARTS,
        )  # fmt: skip
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
def _most(sizes, problem, count, BLOCK: tl.constexpr):
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(sizes + problem * count + i, mask=i < count, other=0.0))
    return tl.max(most, 0)


@triton.jit
def _pulls(
    x_unit, x_unit_low, x_nav, x_nav_low, y_unit, y_unit_low, y_nav, y_nav_low, x_mask, y_mask, x_navigator, x_inverses,
    x_sizes, y_sizes, x_logs, x_means, y_logs, y_means, x_share, y_share, of_critic, of_navigator,
    problem, sample, block, count, others, e, f, largest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, X_MASKED: tl.constexpr,
    Y_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    valid = valid_rows(x_mask, sample, i, count, X_MASKED)
    unit, unit_low = read_halves(x_unit, x_unit_low, problem, i, count, e, CRITIC, PARTS)
    nav, nav_low = read_halves(x_nav, x_nav_low, problem, i, count, f, NAVIGATOR, PARTS)
    at = problem * count + i
    x_log, x_mean = tl.load(x_logs + at, mask=i < count, other=0.0), tl.load(x_means + at, mask=i < count, other=0.0)
    x_size = tl.load(x_sizes + at, mask=i < count, other=0.0)
    # Over both shares, and over the largest unit of navigators, what is felt is no more than two: it can be split.
    size = _most(y_sizes, problem, others, COLUMNS)
    mine, theirs = tl.load(x_share + sample), tl.load(y_share + sample)
    whole = mine + theirs
    by = ROOM / tl.where(whole > 0.0, whole, 1.0)
    unit_pull, pull = tl.zeros([ROWS, CRITIC], tl.float32), tl.zeros([ROWS, NAVIGATOR], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = valid_rows(y_mask, sample, j, others, Y_MASKED)
        their_unit, their_unit_low = read_halves(y_unit, y_unit_low, problem, j, others, e, CRITIC, PARTS)
        their_nav, their_nav_low = read_halves(y_nav, y_nav_low, problem, j, others, f, NAVIGATOR, PARTS)
        to = problem * others + j
        y_size = tl.load(y_sizes + to, mask=j < others, other=0.0)
        y_log = tl.load(y_logs + to, mask=j < others, other=0.0)
        y_mean = tl.load(y_means + to, mask=j < others, other=0.0)
        score, similarity = _scores(
            nav, nav_low, unit, unit_low, x_size, their_nav, their_nav_low, their_unit, their_unit_low, y_size,
            ROWS, COLUMNS, PARTS,
        )  # fmt: skip
        both = valid[:, None] & there[None, :]
        chosen = tl.where(both, mine * by * tl.exp2(tl.minimum(score - x_log[:, None], 0.0)), 0.0)
        choosing = tl.where(both, theirs * by * tl.exp2(tl.minimum(score - y_log[None, :], 0.0)), 0.0)
        above, below, _ = split(chosen + choosing, PARTS)
        unit_pull = product(above, below, their_unit, their_unit_low, unit_pull, PARTS)
        felt = chosen * (similarity - x_mean[:, None]) + choosing * (similarity - y_mean[None, :])
        above, below, _ = split(felt * (y_size / size)[None, :], PARTS)
        pull = product(above, below, their_nav, their_nav_low, pull, PARTS)
    unit_pull = unit_pull * (1.0 / (by * ROOM))
    own = unit.to(tl.float32)
    if PARTS == 3:
        own += unit_low.to(tl.float32)
    own = own * (1.0 / ROOM)
    along = tl.sum(unit_pull * own, 1)
    inverse = tl.load(x_inverses + at, mask=i < count, other=0.0)
    write(of_critic, (along[:, None] * own - unit_pull) * inverse[:, None], problem, i, count, e, CRITIC)
    raw = read(x_navigator, problem, i, valid, count, f, NAVIGATOR)
    write(of_navigator, tl.where(tl.abs(raw) <= largest, pull * (-size / by), 0.0), problem, i, count, f, NAVIGATOR)


@triton.jit
def _first(
    query, query_low, query_nav, query_nav_low, key, key_low, key_nav, key_nav_low, query_mask, key_mask,
    query_size, key_size, query_logs, key_logs, query_means, key_means, heads, n, m, e, f, blocks, places,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    sample = problem // heads
    if place < blocks:
        _choices(
            query, query_low, query_nav, query_nav_low, key, key_low, key_nav, key_nav_low, key_mask, query_size,
            key_size, query_logs, query_means, problem, sample, place, n, m, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, KEY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _choices(
            key, key_low, key_nav, key_nav_low, query, query_low, query_nav, query_nav_low, query_mask, key_size,
            query_size, key_logs, key_means, problem, sample, place - blocks, m, n, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, QUERY_MASKED, PARTS,
        )  # fmt: skip


@triton.jit
def _second(
    query, query_low, query_nav, query_nav_low, key, key_low, key_nav, key_nav_low, query_mask, key_mask,
    query_size, key_size, query_logs, key_logs, query_means, key_means, query_navigator, key_navigator, query_inverse,
    key_inverse,
    query_share, key_share, of_query, of_key, of_query_nav, of_key_nav, heads, n, m, e, f, blocks, places, largest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    sample = problem // heads
    if place < blocks:
        _pulls(
            query, query_low, query_nav, query_nav_low, key, key_low, key_nav, key_nav_low, query_mask, key_mask,
            query_navigator, query_inverse, query_size, key_size, query_logs, query_means, key_logs, key_means,
            query_share, key_share, of_query, of_query_nav, problem, sample, place, n, m, e, f, largest,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, QUERY_MASKED, KEY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _pulls(
            key, key_low, key_nav, key_nav_low, query, query_low, query_nav, query_nav_low, key_mask, query_mask,
            key_navigator, key_inverse, key_size, query_size, key_logs, key_means, query_logs, query_means,
            key_share, query_share, of_key, of_key_nav, problem, sample, place - blocks, m, n, e, f, largest,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, KEY_MASKED, QUERY_MASKED, PARTS,
        )  # fmt: skip


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, products: str, largest: float, query_mask: Tensor | None, key_mask: Tensor | None, *given: Tensor
    ) -> Tensor:
        features = [side.contiguous() for side in given]
        query, key, *navigators = features
        (samples, heads, n, e), m, f = query.shape, key.shape[2], navigators[0].shape[3]
        masks = as_bytes(query_mask, key_mask, query)
        shares = _shares(query_mask, key_mask, samples, n, m, query)
        logs, means, inverses, sizes = ([query.new_empty(side.shape[:3]) for side in (query, key)] for _ in range(4))
        parts = 3 if products == EXACT else 1
        widths = {"CRITIC": width_of(query), "NAVIGATOR": width_of(navigators[0])}
        # Tiles of both features, of several parts or wide, must fit the shared memory of smaller devices too.
        dense = parts == 3, max(widths.values()) > TILE
        rows = min(2 * TILE >> sum(dense), max(16, triton.next_power_of_2(max(n, m))))
        blocks = triton.cdiv(n, rows)
        places = blocks + triton.cdiv(m, rows)
        guard = 8 * torch.finfo(torch.float32).eps
        masked = {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
        same = {"ROWS": rows, "PARTS": parts, **widths, **masked}
        placed = []  # of queries, of keys: units, their low parts, navigators, theirs
        for side in (query, navigators[0], key, navigators[1]):
            high = torch.empty_like(side, dtype=torch.float16)
            placed += [high, torch.empty_like(high) if parts == 3 else high]
        numbers = heads, n, m, e, f, blocks, places
        programs = samples * heads * places
        launch(_place, programs, *features, *masks, *placed, *inverses, *sizes, *numbers, largest, guard, **same)
        found = (*placed, *masks, *sizes, *logs, *means)
        warps = 8 if rows > TILE or (rows == TILE and any(dense)) else 4
        tiles = {"COLUMNS": min(rows, TILE // 2), "num_warps": warps, "num_stages": 2}
        launch(_first, programs, *found, *numbers, **same, **tiles)
        if any(ctx.needs_input_grad[4:]):
            gradients = [torch.empty_like(side) for side in features]
            more = (*navigators, *inverses, *shares, *gradients)
            launch(_second, programs, *found, *more, *numbers, largest, **same, **tiles)
            ctx.save_for_backward(*gradients)
        sums = [
            share[:, None] * _summed(1 - mean, mask)
            for share, mean, mask in zip(shares, means, (query_mask, key_mask), strict=True)
        ]
        return sums[0] + sums[1]

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
