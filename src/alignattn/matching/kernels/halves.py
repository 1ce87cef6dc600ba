"""Tokens as sums of two numbers of half precision: accelerators make products of these twice as fast as TF32's.

    x · 2^k = high + low,    x·y · 2^(k + l) = high·high + low·high + high·low

Each part has eleven bits: together about as many as single precision. Powers of two bring the largest number of a
problem near 2^15, the most that half precision holds; whatever is above 2^-18 of it has both parts whole, and of what
is smaller no more is lost than 2^-40 of it. Tokens that are worth no more are rounded to the high part.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.tiles import launch

BLOCK = 2048
ROOM = tl.constexpr(2.0**14)  # what numbers up to one, or two, are multiplied by to be split


@dataclass(frozen=True)
class Halves:
    """tokens · factor = (high + low) · unit, for each problem."""

    high: Tensor  # [p, n, d]
    low: Tensor
    unit: Tensor  # [p], powers of two
    parts: int  # products that make one: three, or one of the high parts alone


def halves(tokens: Tensor, products: str, factor: Tensor | None = None) -> Halves:
    """Of tokens [p, n, d] times a factor [p]."""
    tokens = tokens.contiguous()
    parts = 3 if products == EXACT else 1
    high = torch.empty_like(tokens, dtype=torch.float16)
    low = torch.empty_like(high) if parts == 3 else high
    unit = tokens.new_empty(len(tokens))
    largest = torch.linalg.vector_norm(tokens, torch.inf, (1, 2))
    size = tokens[0].numel()
    blocks = triton.cdiv(size, BLOCK)
    given = (tokens, largest, largest if factor is None else factor, high, low, unit, size, blocks)
    launch(_split, len(tokens) * blocks, *given, FACTOR=factor is not None, PARTS=parts, BLOCK=BLOCK)
    return Halves(high, low, unit, parts)


@triton.jit
def powers(most):
    """Of two: what brings the largest number to 2^14 or more, and less than twice that; and what takes it back."""
    exponent = (most.to(tl.int32, bitcast=True) >> 23) & 255  # of the largest, and 127
    power = tl.minimum(tl.maximum(268 - exponent, 1), 253)  # and 127 again
    return (power << 23).to(tl.float32, bitcast=True), ((254 - power) << 23).to(tl.float32, bitcast=True)


@triton.jit
def split(number, PARTS: tl.constexpr):
    """Both parts of numbers that half precision holds, the high one twice where one is enough; and what they make."""
    high = number.to(tl.float16)
    seen = high.to(tl.float32)
    low = high
    if PARTS == 3:
        low = (number - seen).to(tl.float16)
        seen += low.to(tl.float32)
    return high, low, seen


@triton.jit
def _split(
    tokens, largest, factor, high, low, unit, size, blocks,
    FACTOR: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(tokens + problem * size + at, mask=inside, other=0.0)
    most = tl.load(largest + problem)
    if FACTOR:
        by = tl.load(factor + problem)
        number, most = number * by, most * by
    power, one = powers(most)
    if block == 0:
        tl.store(unit + problem, one)
    first, second, _ = split(number * power, PARTS)
    tl.store(high + problem * size + at, first, mask=inside)
    if PARTS == 3:
        tl.store(low + problem * size + at, second, mask=inside)


@triton.jit
def read_halves(high, low, problem, i, count, d, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Both parts of these rows of a problem; the high one twice where there is one."""
    e = tl.arange(0, WIDTH)
    at = (problem * count + i[:, None]) * d + e[None, :]
    inside = (i[:, None] < count) & (e[None, :] < d)
    first = tl.load(high + at, mask=inside, other=0.0)
    second = first
    if PARTS == 3:
        second = tl.load(low + at, mask=inside, other=0.0)
    return first, second


@triton.jit
def product(high, low, other_high, other_low, to, PARTS: tl.constexpr):
    """The sum of two halves times that of two others, added `to` something: the small parts first."""
    if PARTS == 3:
        to = tl.dot(low, other_high, to)
        to = tl.dot(high, other_low, to)
    return tl.dot(high, other_high, to)
