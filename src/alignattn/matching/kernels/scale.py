"""Queries and keys of a problem on one scale, and the way back: two kernels each, where plain code passes over all
tokens a dozen times.

A program serves some tokens of one side of a problem. The first kernel adds up what they have to tell of their problem:
on the way there tokens and their squares, in double precision, on the way back what is felt. The second reads the sums
of all programs of its problem, and the tokens again, and writes. It begins with the last: these are in the cache still.
What is felt may be known before, of whoever made the gradients (put_felt): one launch is enough then.

Queries and keys come as models make them, often with the heads of a token beside each other, and their gradients go
back as they came: to have them otherwise would be a pass over all tokens on either way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import products_for
from alignattn.matching.kernels.tiles import (
    TILE,
    as_bytes,
    as_products_see,
    launch,
    read,
    read_at,
    spread,
    total,
    valid_rows,
    width_of,
    write,
    write_at,
)

Kind = tuple[torch.dtype, tuple[int, ...]]  # and strides


class Form(NamedTuple):
    """Of a kernel's tiles."""

    rows: int  # of tokens up to 64 wide
    warps: int


# Many small programs: a processor then has other tokens to read while it waits for some.
SUMS, SCALED, FELT, HANDED = Form(32, 4), Form(32, 4), Form(32, 4), Form(32, 4)
SPAN = 128  # tokens of a program, at least
MOST = 16  # programs of a side: all of them read what all of them found


@triton.jit
def _reach(block, span, count):
    """Where the tokens of a program begin, and where they end."""
    first = block * span
    return first, tl.minimum(first + span, count)


@triton.jit
def _put_total(
    tokens, mask, to, sample, block, span, count, stride, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    first, end = _reach(block, span, count)
    e = tl.arange(0, WIDTH)
    summed, squares, many, _ = total(
        tokens + first * stride, mask + sample * count + first, 0, end - first, stride, d, ROWS, WIDTH, MASKED
    )
    tl.store(to + e, summed, mask=e < d)
    tl.store(to + d, squares)
    tl.store(to + d + 1, many)


@triton.jit
def _standardise_sums(
    query, key, query_mask, key_mask, sums, heads, n, m, d, query_sample, query_head, query_row, key_sample, key_head,
    key_row, span, blocks, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places  # first the blocks of queries, then those of keys
    sample, head = problem // heads, problem % heads
    to = sums + (problem * places + place) * (d + 2)
    if place < blocks:
        query += sample * query_sample + head * query_head
        _put_total(query, query_mask, to, sample, place, span, n, query_row, d, ROWS, WIDTH, QUERY_MASKED)
    else:
        key += sample * key_sample + head * key_head
        _put_total(key, key_mask, to, sample, place - blocks, span, m, key_row, d, ROWS, WIDTH, KEY_MASKED)


@triton.jit
def _added(sums, problem, places, size, d, WIDTH: tl.constexpr, PLACES: tl.constexpr):
    """The vectors that the programs of a problem found, added up; where the numbers behind each lie, and which do."""
    j, e = tl.arange(0, PLACES), tl.arange(0, WIDTH)
    at = sums + (problem * places + j) * size
    there = j < places
    vector = tl.load(at[:, None] + e[None, :], mask=there[:, None] & (e[None, :] < d), other=0.0)
    return tl.sum(vector, 0), at + d, there


@triton.jit
def _scaled_side(
    tokens, mask, out, mean, inverse, problem, sample, block, span, count, stride, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, end = _reach(block, span, count)
    for start in range(first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        # Padding too: to ask first what is some would be to wait twice.
        values = (read_at(tokens, i, i < count, stride, d, WIDTH) - mean[None, :]) * inverse
        valid = valid_rows(mask, sample, i, count, MASKED)
        write(out, tl.where(valid[:, None], as_products_see(values, PRECISION), 0.0), problem, i, count, d, WIDTH)


@triton.jit
def _standardise(
    query, key, query_mask, key_mask, out_query, out_key, sums, inverse, counts, heads, n, m, d,
    query_sample, query_head, query_row, key_sample, key_head, key_row, least, span, blocks, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    problem, place = (program // places).to(tl.int64), program % places
    sample, head = problem // heads, problem % heads
    summed, further, there = _added(sums, problem, places, d + 2, d, WIDTH, PLACES)
    squares = tl.sum(tl.load(further, mask=there, other=0.0), 0)
    count = tl.maximum(tl.sum(tl.load(further + 1, mask=there, other=0.0), 0), 1.0)
    mean = (summed / count).to(tl.float32)
    factor = (1.0 / tl.sqrt(spread(squares, summed, count) / (count * d) + least)).to(tl.float32)
    if place == 0:
        tl.store(inverse + problem, factor)
        tl.store(counts + problem, count.to(tl.float32))
    if place < blocks:
        query += sample * query_sample + head * query_head
        _scaled_side(
            query, query_mask, out_query, mean, factor, problem, sample, place, span, n, query_row, d,
            ROWS, WIDTH, QUERY_MASKED, PRECISION,
        )  # fmt: skip
    else:
        key += sample * key_sample + head * key_head
        _scaled_side(
            key, key_mask, out_key, mean, factor, problem, sample, place - blocks, span, m, key_row, d,
            ROWS, WIDTH, KEY_MASKED, PRECISION,
        )  # fmt: skip


@triton.jit
def put_felt(sums, at, gradient, placed, size, origin, d, WIDTH: tl.constexpr):
    """What some tokens feel: the sum of their gradients, and of these times tokens, which are placed · size + origin.

    Any kernel that makes gradients of tokens on one scale may tell this of its own: they are not read for it then.
    """
    e = tl.arange(0, WIDTH)
    to, summed = sums + at * (d + 1), tl.sum(gradient, 0)
    tl.store(to + e, summed, mask=e < d)
    tl.store(to + d, tl.sum(tl.sum(gradient * placed, 0), 0) * size + tl.sum(summed * origin, 0))


@triton.jit
def _put_felt(
    gradient, scaled, mask, to, problem, sample, block, span, count, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    first, end = _reach(block, span, count)
    e = tl.arange(0, WIDTH)
    summed, products = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        g = read(gradient, problem, i, i < end, count, d, WIDTH)
        y = read(scaled, problem, i, i < end, count, d, WIDTH)
        g = tl.where(valid_rows(mask, sample, i, count, MASKED)[:, None], g, 0.0)
        summed += g
        products += g * y
    tl.store(to + e, tl.sum(summed, 0), mask=e < d)
    tl.store(to + d, tl.sum(tl.sum(products, 0), 0))


@triton.jit
def _standardise_back_sums(
    of_query, of_key, query, key, query_mask, key_mask, sums, heads, n, m, d, span, blocks, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // places).to(tl.int64)
    place = tl.program_id(0) % places
    sample = problem // heads
    to = sums + (problem * places + place) * (d + 1)
    if place < blocks:
        _put_felt(of_query, query, query_mask, to, problem, sample, place, span, n, d, ROWS, WIDTH, QUERY_MASKED)
    else:
        _put_felt(of_key, key, key_mask, to, problem, sample, place - blocks, span, m, d, ROWS, WIDTH, KEY_MASKED)


@triton.jit
def _handed_side(
    gradient, scaled, mask, out, shared, factor, inverse, problem, sample, block, span, count, stride, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    first, end = _reach(block, span, count)
    for start in range(first, end, ROWS):
        i = start + tl.arange(0, ROWS)
        g = read(gradient, problem, i, i < count, count, d, WIDTH)
        y = read(scaled, problem, i, i < count, count, d, WIDTH)
        values = (g - shared[None, :] - y * factor) * inverse
        valid = valid_rows(mask, sample, i, count, MASKED)
        write_at(out, tl.where(valid[:, None], values, 0.0), i, count, stride, d, WIDTH)


@triton.jit
def _standardise_back(
    of_query, of_key, query, key, query_mask, key_mask, out_query, out_key, sums, inverse, counts, heads, n, m, d,
    query_sample, query_head, query_row, key_sample, key_head, key_row, told, span, blocks, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, QUERY_MASKED: tl.constexpr,
    KEY_MASKED: tl.constexpr,
):  # fmt: skip
    """`told`: sums of a problem."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    problem, place = (program // places).to(tl.int64), program % places
    sample, head = problem // heads, problem % heads
    count, by = tl.load(counts + problem), tl.load(inverse + problem)
    summed, further, there = _added(sums, problem, told, d + 1, d, WIDTH, PLACES)
    shared, factor = summed / count, tl.sum(tl.load(further, mask=there, other=0.0), 0) / (count * d)
    if place < blocks:
        out_query += sample * query_sample + head * query_head
        _handed_side(
            of_query, query, query_mask, out_query, shared, factor, by, problem, sample, place, span, n, query_row, d,
            ROWS, WIDTH, QUERY_MASKED,
        )  # fmt: skip
    else:
        out_key += sample * key_sample + head * key_head
        _handed_side(
            of_key, key, key_mask, out_key, shared, factor, by, problem, sample, place - blocks, span, m, key_row, d,
            ROWS, WIDTH, KEY_MASKED,
        )  # fmt: skip


def kind_of(tokens: Tensor) -> Kind:
    """As their gradient is to be: with the heads of a token beside each other, where those of [p, h, n, d] are so."""
    _, heads, count, d = tokens.shape
    by_tokens = tokens.transpose(1, 2).is_contiguous()
    return tokens.dtype, tokens.stride() if by_tokens else (heads * count * d, count * d, d, 1)


def place_of(kind: Kind, like: Tensor, there: Tensor | None) -> Tensor:
    """Where a gradient of this kind is to be written: there, if rows lie whole, or in memory of its own."""
    if there is not None and there.stride(3) == 1:
        return there
    return torch.empty_strided(like.shape, kind[1], dtype=kind[0], device=like.device)


def forward(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, least: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised queries and keys [p, h, tokens, d] in single precision; 1/deviation and valid tokens, [p, h].

    Those that came in half precision are rounded to what products will take of them.
    """
    (samples, heads, n, d), m = query.shape, key.shape[2]
    sides = query, key
    # One behind the other: they are one tensor then to whoever takes them together (beside.py).
    both = query.new_empty(query.numel() + key.numel(), dtype=torch.float32).split([side.numel() for side in sides])
    scaled = [part.view(side.shape) for part, side in zip(both, sides, strict=True)]
    inverse, counts = (torch.empty(samples, heads, dtype=torch.float32, device=query.device) for _ in range(2))
    query, key = (side if side.stride(3) == 1 else side.contiguous() for side in (query, key))
    given, strides = (query, key, *as_bytes(query_mask, key_mask, query)), (*query.stride()[:3], *key.stride()[:3])
    divided, masked = _divided(n, m), _masked(query_mask, key_mask)
    programs = samples * heads * divided.places
    sums = torch.empty(programs, d + 2, dtype=torch.float64, device=query.device)
    launch(
        _standardise_sums, programs, *given, sums, heads, n, m, d, *strides, *divided, **_shape(SUMS, query), **masked
    )
    launch(
        _standardise, programs, *given, *scaled, sums, inverse, counts, heads, n, m, d, *strides, least, *divided,
        PLACES=triton.next_power_of_2(divided.places), PRECISION=products_for(query.dtype, key.dtype),
        **_shape(SCALED, query), **masked,
    )  # fmt: skip
    return scaled[0], scaled[1], inverse, counts


def backward(
    gradients: tuple[Tensor, Tensor],
    scaled: tuple[Tensor, Tensor],
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    inverse: Tensor,
    counts: Tensor,
    found: Sequence[Tensor],
    sums: Tensor | None = None,
) -> None:
    """Gradients of what was standardised, written where they are to be `found`; `sums` of those that came, if known."""
    query, key = scaled
    (samples, heads, n, d), m = query.shape, key.shape[2]
    given = *(g.contiguous() for g in gradients), *scaled, *as_bytes(query_mask, key_mask, query)
    divided, masked = _divided(n, m), _masked(query_mask, key_mask)
    programs = samples * heads * divided.places
    if sums is None or sums.shape[1] > 2 * MOST:
        sums = query.new_empty(samples * heads, divided.places, d + 1)
        launch(
            _standardise_back_sums, programs, *given, sums, heads, n, m, d, *divided, **_shape(FELT, query), **masked
        )
    launch(
        _standardise_back, programs, *given, *found, sums, inverse, counts, heads, n, m, d,
        *found[0].stride()[:3], *found[1].stride()[:3], sums.shape[1], *divided,
        PLACES=triton.next_power_of_2(sums.shape[1]),
        **_shape(HANDED, query), **masked,
    )  # fmt: skip


class _Divided(NamedTuple):
    """The tokens of a problem, among programs."""

    span: int  # tokens of a program
    blocks: int  # programs of queries
    places: int  # and of both sides


def _divided(n: int, m: int) -> _Divided:
    span = SPAN * triton.cdiv(max(n, m), SPAN * MOST)
    blocks = triton.cdiv(n, span)
    return _Divided(span, blocks, blocks + triton.cdiv(m, span))


def _shape(form: Form, tokens: Tensor) -> dict[str, Any]:
    width = width_of(tokens)
    return {"ROWS": form.rows if width <= TILE else form.rows // 2, "WIDTH": width, "num_warps": form.warps}


def _masked(query_mask: Tensor | None, key_mask: Tensor | None) -> dict[str, bool]:
    return {"QUERY_MASKED": query_mask is not None, "KEY_MASKED": key_mask is not None}
