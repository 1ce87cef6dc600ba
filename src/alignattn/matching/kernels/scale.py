"""Queries and keys of a problem on one scale, and the way back: one kernel each, where plain code passes over all
tokens a dozen times.

A program serves one problem: it adds up its tokens and their squares, in double precision, then writes. The second
time it finds them in the cache. (Many programs for a problem, of which the first add up and others write, were no
faster on an H200.) On the way back it adds up what is felt, unless whoever made the gradients has told it (put_felt).

Queries and keys come as models make them, often with the heads of a token beside each other, and their gradients go
back as they came: to have them otherwise would be a pass over all tokens on either way.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import products_for
from alignattn.matching.kernels.tiles import (
    TILE,
    TWO,
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
PLACES = 16  # in which a problem's sums are told, that are read at once


@triton.jit
def _scaled(
    tokens, mask, out, mean, inverse, problem, sample, count, stride, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid = valid_rows(mask, sample, i, count, MASKED)
        values = (read_at(tokens, i, valid, stride, d, WIDTH) - mean[None, :]) * inverse
        values = as_products_see(values, PRECISION)
        write(out, tl.where(valid[:, None], values, 0.0), problem, i, count, d, WIDTH)


@triton.jit
def _standardise(
    query, key, query_mask, key_mask, out_query, out_key, inverse, counts, heads, n, m, d,
    query_sample, query_head, query_row, key_sample, key_head, key_row, least,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    sample, head = problem // heads, problem % heads
    query += sample * query_sample + head * query_head
    key += sample * key_sample + head * key_head
    of_query, of_queries, queries, _ = total(query, query_mask, sample, n, query_row, d, ROWS, WIDTH, QUERY_MASKED)
    of_key, of_keys, keys, _ = total(key, key_mask, sample, m, key_row, d, ROWS, WIDTH, KEY_MASKED)
    count = tl.maximum(queries + keys, 1.0)
    mean = ((of_query + of_key) / count).to(tl.float32)
    about = spread(of_queries + of_keys, of_query + of_key, count)
    factor = (1.0 / tl.sqrt(about / (count * d) + least)).to(tl.float32)
    tl.store(inverse + problem, factor)
    tl.store(counts + problem, count.to(tl.float32))
    _scaled(
        query, query_mask, out_query, mean, factor, problem, sample, n, query_row, d,
        ROWS, WIDTH, QUERY_MASKED, PRECISION,
    )  # fmt: skip
    _scaled(key, key_mask, out_key, mean, factor, problem, sample, m, key_row, d, ROWS, WIDTH, KEY_MASKED, PRECISION)


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
def _told(sums, problem, places, d, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """The same of a problem, which was told in so many places: a few at a time."""
    e, j = tl.arange(0, WIDTH), tl.arange(0, PLACES)
    summed, products = tl.zeros([PLACES, WIDTH], tl.float32), tl.zeros([PLACES], tl.float32)
    for start in range(0, places, PLACES):
        there = start + j < places
        at = sums + (problem * places + start + j) * (d + 1)
        summed += tl.load(at[:, None] + e[None, :], mask=there[:, None] & (e[None, :] < d), other=0.0)
        products += tl.load(at + d, mask=there, other=0.0)
    return tl.sum(summed, 0), tl.sum(products, 0)


@triton.jit
def _felt(
    gradient, scaled, mask, problem, sample, count, d, ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    summed, products = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid = valid_rows(mask, sample, i, count, MASKED)
        g = read(gradient, problem, i, valid, count, d, WIDTH)
        summed += g
        products += g * read(scaled, problem, i, valid, count, d, WIDTH)
    return tl.sum(summed, 0), tl.sum(tl.sum(products, 0), 0)


@triton.jit
def _handed(
    gradient, scaled, mask, out, shared, factor, inverse, problem, sample, count, stride, d,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        valid = valid_rows(mask, sample, i, count, MASKED)
        g = read(gradient, problem, i, valid, count, d, WIDTH)
        values = (g - shared[None, :] - read(scaled, problem, i, valid, count, d, WIDTH) * factor) * inverse
        write_at(out, tl.where(valid[:, None], values, 0.0), i, count, stride, d, WIDTH)


@triton.jit
def _standardise_back(
    of_query, of_key, query, key, query_mask, key_mask, out_query, out_key, sums, inverse, counts, heads, n, m, d,
    query_sample, query_head, query_row, key_sample, key_head, key_row, places,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, QUERY_MASKED: tl.constexpr, KEY_MASKED: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    problem = tl.program_id(0).to(tl.int64)
    sample, head = problem // heads, problem % heads
    out_query += sample * query_sample + head * query_head
    out_key += sample * key_sample + head * key_head
    count = tl.load(counts + problem)
    if PLACES > 0:
        shared, factor = _told(sums, problem, places, d, PLACES, WIDTH)
    else:
        first, of_first = _felt(of_query, query, query_mask, problem, sample, n, d, ROWS, WIDTH, QUERY_MASKED)
        second, of_second = _felt(of_key, key, key_mask, problem, sample, m, d, ROWS, WIDTH, KEY_MASKED)
        shared, factor = first + second, of_first + of_second
    shared, factor = shared / count, factor / (count * d)
    by = tl.load(inverse + problem)
    _handed(
        of_query, query, query_mask, out_query, shared, factor, by, problem, sample, n, query_row, d,
        ROWS, WIDTH, QUERY_MASKED,
    )  # fmt: skip
    _handed(of_key, key, key_mask, out_key, shared, factor, by, problem, sample, m, key_row, d, ROWS, WIDTH, KEY_MASKED)


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
    samples, heads = query.shape[:2]
    sides = query, key
    # One behind the other: they are one tensor then to whoever takes them together (beside.py).
    both = query.new_empty(query.numel() + key.numel(), dtype=torch.float32).split([side.numel() for side in sides])
    scaled = [part.view(side.shape) for part, side in zip(both, sides, strict=True)]
    inverse, counts = (torch.empty(samples, heads, dtype=torch.float32, device=query.device) for _ in range(2))
    query, key = (side if side.stride(3) == 1 else side.contiguous() for side in (query, key))
    given = query, key, *as_bytes(query_mask, key_mask, query)
    sizes = heads, query.shape[2], key.shape[2], query.shape[3], *query.stride()[:3], *key.stride()[:3]
    settings = _shapes(query, query_mask, key_mask)
    settings["PRECISION"] = products_for(query.dtype, key.dtype)
    launch(_standardise, samples * heads, *given, *scaled, inverse, counts, *sizes, least, maxnreg=TWO, **settings)
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
    samples, heads = query.shape[:2]
    given = *(g.contiguous() for g in gradients), *scaled, *as_bytes(query_mask, key_mask, query)
    strides = *found[0].stride()[:3], *found[1].stride()[:3]
    sizes = heads, query.shape[2], key.shape[2], query.shape[3], *strides
    settings = _shapes(query, query_mask, key_mask)
    places = 0 if sums is None else sums.shape[1]
    launch(
        _standardise_back, samples * heads, *given, *found, query if sums is None else sums, inverse, counts, *sizes,
        places, PLACES=PLACES if places else 0, **settings,
    )  # fmt: skip


def _shapes(query: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> dict[str, object]:
    return {
        "num_warps": 8,  # problems may be few, and each has much to wait for
        "ROWS": TILE if width_of(query) <= TILE else TILE // 2,
        "WIDTH": width_of(query),
        "QUERY_MASKED": query_mask is not None,
        "KEY_MASKED": key_mask is not None,
    }
