"""Conditional transport of placed tokens and its gradient in three kernels, whatever the length: no plan is stored.

    S = navigator(x)·navigator(y),   T = u(x)·u(y),   A = softmax of S along its rows
    first:    l_i = LSE_j S_ij,   r_i = u_i · Σ_j A_ij u_j,   of queries, and with x and y exchanged of keys
    settle:   the loss of a problem, 1/2 mean_i (1 - r_i) + 1/2 mean_j (1 - c_j), and what one token counts in it
    second:   what tokens feel, of T: -(A + B), of S: -(A (T - r) + B (T - c)); plans.py has the derivation

A and B of the last already hold what a row and a column counts. A program serves some tokens of one side of a problem.
Nothing is added atomically: results are the same each time. The first kernel alone reads masks: it leaves an infinite
logarithm where no token is, which then neither chooses nor counts, and of what is placed there nothing comes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels.halves import ROOM, product, read_halves, split
from alignattn.matching.kernels.placed import Placed, parts_of
from alignattn.matching.kernels.tiles import TILE, as_bytes, launch, valid_rows, width_of, write

LOG2E = tl.constexpr(1.4426950408889634)
LOG_ROOM = tl.constexpr(14.0)
BLOCK = 512


class Form(NamedTuple):
    """Of the tiles of scores that a program makes, where features are narrow and products of one part."""

    rows: int
    columns: int
    warps: int
    stages: int


# Of the first kernel and of the second, each the fastest of those tried on an H200 (results/bench/h200-variants.txt).
FIRST, SECOND = Form(64, 64, 4, 1), Form(64, 32, 4, 1)


class Chosen(NamedTuple):
    """By tokens of both sides, and by problems."""

    logs: tuple[Tensor, Tensor]  # [p, n] and [p, m], as powers of two
    means: tuple[Tensor, Tensor]  # of T, as products of placed units come
    losses: Tensor  # [p]
    counts: Tensor  # [p, 4]: what a query and a key count, the largest units of queries and keys


@triton.jit
def _choices(
    x_unit, x_unit_low, x_nav, x_nav_low, x_sizes, x_mask, y_unit, y_unit_low, y_nav, y_nav_low, y_sizes, y_mask,
    logs, means, problem, sample, block, count, others, e, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, X_MASKED: tl.constexpr,
    Y_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    nav, nav_low = read_halves(x_nav, x_nav_low, problem, i, count, f, NAVIGATOR, PARTS)
    x_size = tl.load(x_sizes + problem * count + i, mask=i < count, other=1.0)
    most = tl.full([ROWS], -1e38, tl.float32)  # of scores over the row's own size: a power of two, so nothing is lost
    total, carried = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, CRITIC], tl.float32)
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        there = valid_rows(y_mask, sample, j, others, Y_MASKED)
        unit, unit_low = read_halves(y_unit, y_unit_low, problem, j, others, e, CRITIC, PARTS)
        their_nav, their_nav_low = read_halves(y_nav, y_nav_low, problem, j, others, f, NAVIGATOR, PARTS)
        y_size = tl.load(y_sizes + problem * others + j, mask=j < others, other=0.0) * LOG2E
        score = product(nav, nav_low, tl.trans(their_nav), tl.trans(their_nav_low), nothing, PARTS)
        score = score * y_size[None, :] + tl.where(there, 0.0, float("-inf"))[None, :]
        now = tl.maximum(most, tl.max(score, 1))
        faded = tl.exp2((most - now) * x_size)
        choice = tl.exp2(score * x_size[:, None] - (now * x_size - LOG_ROOM)[:, None])
        total = total * faded + tl.sum(choice, 1)
        above, below, _ = split(choice, PARTS)
        carried = product(above, below, unit, unit_low, carried * faded[:, None], PARTS)
        most = now
    own, own_low = read_halves(x_unit, x_unit_low, problem, i, count, e, CRITIC, PARTS)
    mean = tl.sum(carried * own.to(tl.float32), 1)
    if PARTS == 3:
        mean += tl.sum(carried * own_low.to(tl.float32), 1)
    some = tl.where(total > 0, total, 1.0)  # none, where the other side has no token
    log = tl.where(
        valid_rows(x_mask, sample, i, count, X_MASKED), most * x_size + tl.log2(some) - LOG_ROOM, float("inf")
    )
    tl.store(logs + problem * count + i, log, mask=i < count)
    tl.store(means + problem * count + i, mean / some, mask=i < count)


@triton.jit
def _first(
    query, query_low, query_nav, query_nav_low, query_size, query_mask, key, key_low, key_nav, key_nav_low, key_size,
    key_mask, query_logs, query_means, key_logs, key_means, heads, n, m, e, f, blocks, places,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr,
    QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample = problem // heads
    if place < blocks:
        _choices(
            query, query_low, query_nav, query_nav_low, query_size, query_mask, key, key_low, key_nav, key_nav_low,
            key_size, key_mask, query_logs, query_means, problem, sample, place, n, m, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, QUERY_MASKED, KEY_MASKED, PARTS,
        )  # fmt: skip
    else:
        _choices(
            key, key_low, key_nav, key_nav_low, key_size, key_mask, query, query_low, query_nav, query_nav_low,
            query_size, query_mask, key_logs, key_means, problem, sample, place - blocks, m, n, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, KEY_MASKED, QUERY_MASKED, PARTS,
        )  # fmt: skip


@triton.jit
def _tally(logs, means, sizes, problem, count, BLOCK: tl.constexpr):
    """What this side pays together, how many tokens it has, and the largest unit of its navigators."""
    paid, many = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = problem * count + i
        there = tl.load(logs + at, mask=i < count, other=float("inf")) < float("inf")
        paid += tl.where(there, 1.0 - tl.load(means + at, mask=i < count, other=0.0) * (1.0 / (ROOM * ROOM)), 0.0)
        many += there.to(tl.float32)
        most = tl.maximum(most, tl.load(sizes + at, mask=i < count, other=0.0))
    return tl.sum(paid, 0), tl.sum(many, 0), tl.max(most, 0)


@triton.jit
def _settle(
    query_logs, query_means, query_sizes, key_logs, key_means, key_sizes, losses, counts, n, m, BLOCK: tl.constexpr
):
    problem = tl.program_id(0).to(tl.int64)
    by_queries, queries, largest_query = _tally(query_logs, query_means, query_sizes, problem, n, BLOCK)
    by_keys, keys, largest_key = _tally(key_logs, key_means, key_sizes, problem, m, BLOCK)
    query_share, key_share = 0.5 / tl.maximum(queries, 1.0), 0.5 / tl.maximum(keys, 1.0)
    loss = by_queries * query_share + by_keys * key_share
    tl.store(losses + problem, tl.where((queries > 0) & (keys > 0), loss, 0.0))
    to = counts + problem * 4
    tl.store(to, query_share)
    tl.store(to + 1, key_share)
    tl.store(to + 2, largest_query)
    tl.store(to + 3, largest_key)


@triton.jit
def _pulls(
    x_unit, x_unit_low, x_nav, x_nav_low, x_inverses, x_sizes, x_logs, x_means, y_unit, y_unit_low, y_nav, y_nav_low,
    y_sizes, y_logs, y_means, mine, theirs, size, of_critic, of_navigator, problem, block, count, others, e, f,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    i = block * ROWS + tl.arange(0, ROWS)
    at = problem * count + i
    unit, unit_low = read_halves(x_unit, x_unit_low, problem, i, count, e, CRITIC, PARTS)
    nav, nav_low = read_halves(x_nav, x_nav_low, problem, i, count, f, NAVIGATOR, PARTS)
    x_size = tl.load(x_sizes + at, mask=i < count, other=0.0)
    # Over both shares, and over the largest unit of navigators, what is felt is no more than two: it can be split. The
    # shares stand in the exponent: they cost a row and a column something, and no score.
    by = 1.0 / (mine + theirs) * ROOM
    most_chosen, most_choosing = tl.log2(mine * by), tl.log2(theirs * by)
    x_log = tl.load(x_logs + at, mask=i < count, other=float("inf"))
    x_mean = tl.load(x_means + at, mask=i < count, other=0.0)
    unit_pull, pull = tl.zeros([ROWS, CRITIC], tl.float32), tl.zeros([ROWS, NAVIGATOR], tl.float32)
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, others, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        their_unit, their_unit_low = read_halves(y_unit, y_unit_low, problem, j, others, e, CRITIC, PARTS)
        their_nav, their_nav_low = read_halves(y_nav, y_nav_low, problem, j, others, f, NAVIGATOR, PARTS)
        to = problem * others + j
        y_size = tl.load(y_sizes + to, mask=j < others, other=0.0)
        y_log = tl.load(y_logs + to, mask=j < others, other=float("inf"))
        y_mean = tl.load(y_means + to, mask=j < others, other=0.0)
        score = product(nav, nav_low, tl.trans(their_nav), tl.trans(their_nav_low), nothing, PARTS)
        similarity = product(unit, unit_low, tl.trans(their_unit), tl.trans(their_unit_low), nothing, PARTS)
        score = score * (y_size * LOG2E)[None, :] * x_size[:, None]
        chosen = tl.exp2(tl.minimum(score + (most_chosen - x_log)[:, None], most_chosen))
        choosing = tl.exp2(tl.minimum(score + (most_choosing - y_log)[None, :], most_choosing))
        both = chosen + choosing
        above, below, _ = split(both, PARTS)
        unit_pull = product(above, below, their_unit, their_unit_low, unit_pull, PARTS)
        felt = similarity * both - chosen * x_mean[:, None] - choosing * y_mean[None, :]
        above, below, _ = split(felt * (y_size / (size * (ROOM * ROOM)))[None, :], PARTS)
        pull = product(above, below, their_nav, their_nav_low, pull, PARTS)
    there = x_log < float("inf")
    unit_pull = unit_pull * (1.0 / (by * ROOM))
    own = unit.to(tl.float32)
    if PARTS == 3:
        own += unit_low.to(tl.float32)
    own = own * (1.0 / ROOM)
    along = tl.sum(unit_pull * own, 1)
    inverse = tl.load(x_inverses + at, mask=i < count, other=0.0)
    of_unit = tl.where(there[:, None], (along[:, None] * own - unit_pull) * inverse[:, None], 0.0)
    write(of_critic, of_unit, problem, i, count, e, CRITIC)
    write(of_navigator, tl.where(there[:, None], pull * (-size / by), 0.0), problem, i, count, f, NAVIGATOR)


@triton.jit
def _second(
    query, query_low, query_nav, query_nav_low, query_inverse, query_size, query_logs, query_means,
    key, key_low, key_nav, key_nav_low, key_inverse, key_size, key_logs, key_means,
    counts, of_query, of_query_nav, of_key, of_key_nav, n, m, e, f, blocks, places,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    query_share, key_share = tl.load(counts + problem * 4), tl.load(counts + problem * 4 + 1)
    if place < blocks:
        _pulls(
            query, query_low, query_nav, query_nav_low, query_inverse, query_size, query_logs, query_means,
            key, key_low, key_nav, key_nav_low, key_size, key_logs, key_means, query_share, key_share,
            tl.load(counts + problem * 4 + 3), of_query, of_query_nav, problem, place, n, m, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, PARTS,
        )  # fmt: skip
    else:
        _pulls(
            key, key_low, key_nav, key_nav_low, key_inverse, key_size, key_logs, key_means,
            query, query_low, query_nav, query_nav_low, query_size, query_logs, query_means, key_share, query_share,
            tl.load(counts + problem * 4 + 2), of_key, of_key_nav, problem, place - blocks, m, n, e, f,
            ROWS, COLUMNS, CRITIC, NAVIGATOR, PARTS,
        )  # fmt: skip


def choose(
    query: Placed, key: Placed, query_mask: Tensor | None, key_mask: Tensor | None, heads: int, products: str
) -> Chosen:
    """What all problems cost, and what their gradient will ask for."""
    (problems, n, _), m = query.unit.shape, key.unit.shape[1]
    pairs = [tuple(side.size.new_empty(side.size.shape) for side in (query, key)) for _ in range(2)]
    (query_log, key_log), (query_mean, key_mean) = pairs
    masks = as_bytes(query_mask, key_mask, query.unit)
    sides = [(*side.all()[:4], side.size, mask) for side, mask in zip((query, key), masks, strict=True)]
    numbers, tiles = _tiles(query, key, FIRST, products)
    launch(
        _first, problems * numbers[-1], *sides[0], *sides[1], query_log, query_mean, key_log, key_mean, heads, *numbers,
        QUERY_MASKED=query_mask is not None, KEY_MASKED=key_mask is not None, **tiles,
    )  # fmt: skip
    losses, counts = query_log.new_empty(problems), query_log.new_empty(problems, 4)
    ends = (query_log, query_mean, query.size), (key_log, key_mean, key.size)
    launch(_settle, problems, *ends[0], *ends[1], losses, counts, n, m, BLOCK=BLOCK)
    return Chosen((query_log, key_log), (query_mean, key_mean), losses, counts)


def pulls(query: Placed, key: Placed, chosen: Chosen, products: str) -> list[Tensor]:
    """What critic and navigator features of queries feel, then those of keys, where a problem counts one."""
    numbers, tiles = _tiles(query, key, SECOND, products)
    sides = [(*side.all(), log, mean) for side, log, mean in zip((query, key), *chosen[:2], strict=True)]
    shaped = [half for side in (query, key) for half in (side.unit, side.navigator)]
    felt = [torch.empty_like(half, dtype=torch.float32) for half in shaped]
    launch(_second, len(query.unit) * numbers[-1], *sides[0], *sides[1], chosen.counts, *felt, *numbers, **tiles)
    return felt


def _tiles(query: Placed, key: Placed, form: Form, products: str) -> tuple[Sequence[int], dict[str, int]]:
    """Numbers that say who serves what, and how large tiles are."""
    (_, n, e), m, f = query.unit.shape, key.unit.shape[1], query.navigator.shape[2]
    widths = {"CRITIC": width_of(query.unit), "NAVIGATOR": width_of(query.navigator)}
    # Tiles of both features, of several parts or wide, must fit the shared memory of smaller devices too.
    dense = parts_of(products) == 3, max(widths.values()) > TILE
    if any(dense):
        rows = 2 * TILE >> sum(dense)
        form = Form(rows, TILE // 2, 8 if rows == TILE else 4, 2)
    rows = min(form.rows, max(16, triton.next_power_of_2(max(n, m))))
    warps = form.warps if rows == form.rows else 4
    blocks = triton.cdiv(n, rows)
    tiles = {"ROWS": rows, "COLUMNS": min(rows, form.columns), "PARTS": parts_of(products), **widths}
    return (n, m, e, f, blocks, blocks + triton.cdiv(m, rows)), {**tiles, "num_warps": warps, "num_stages": form.stages}
