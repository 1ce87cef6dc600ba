"""Tokens of conditional transport as its kernels read them: a unit vector of the critic, features of the navigator.

    u = critic / |critic|,   navigator = placed · size

Both as halves (halves.py), navigators of each token in a unit of its own. Padding is placed as zeros: whatever it is
chosen with, nothing comes of it, and no kernel that sums over tokens has to ask for masks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels import EXACT
from alignattn.matching.kernels.halves import ROOM, powers, split
from alignattn.matching.kernels.highway import store

GUARD = 8 * torch.finfo(torch.float32).eps  # of a length, as in tokens.py


@dataclass(frozen=True)
class Placed:
    """One side of all problems."""

    unit: Tensor  # [p, n, e]
    unit_low: Tensor
    navigator: Tensor  # [p, n, f]
    navigator_low: Tensor
    inverse: Tensor  # [p, n], of the critic's length
    size: Tensor  # [p, n], powers of two

    def all(self) -> tuple[Tensor, ...]:
        """In the order in which kernels write them."""
        return self.unit, self.unit_low, self.navigator, self.navigator_low, self.inverse, self.size


def room_for(problems: int, count: int, e: int, f: int, products: str, like: Tensor) -> Placed:
    """To be written."""
    halves: list[Tensor] = []
    for width in (e, f):
        high = like.new_empty(problems, count, width, dtype=torch.float16)
        halves += [high, torch.empty_like(high) if parts_of(products) == 3 else high]
    inverse, size = (like.new_empty(problems, count) for _ in range(2))
    return Placed(halves[0], halves[1], halves[2], halves[3], inverse, size)


def parts_of(products: str) -> int:
    """Products of halves that make one."""
    return 3 if products == EXACT else 1


@triton.jit
def tokens_there(mask, layer, i, count, length, heads, MASKED: tl.constexpr):
    """Which of these rows of a layer, problem after problem, are tokens."""
    there = i < count
    if MASKED:
        sample = layer * (count // (length * heads)) + i // (length * heads)
        there = there & (tl.load(mask + sample * length + i % length, mask=there, other=0) != 0)
    return there


@triton.jit
def _unit(critic, guard):
    largest = tl.maximum(tl.max(tl.abs(critic), 1), 1.0)
    within = critic / largest[:, None]
    inverse = tl.rsqrt(tl.sum(within * within, 1) + guard / (largest * largest))
    return within * inverse[:, None], inverse / largest


@triton.jit
def place(
    critic, navigator, there, unit_high, unit_low, nav_high, nav_low, inverses, sizes, layer, start, count, e, f, guard,
    ROWS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write these rows of a layer."""
    i = start + tl.arange(0, ROWS)
    unit, inverse = _unit(tl.where(there[:, None], critic, 0.0), guard)
    tl.store(inverses + layer * count + i, inverse, mask=i < count)
    first, second, _ = split(unit * ROOM, PARTS)
    store(unit_high, first, layer, start, count, e, ROWS, CRITIC)
    if PARTS == 3:
        store(unit_low, second, layer, start, count, e, ROWS, CRITIC)
    navigator = tl.where(there[:, None], navigator, 0.0)
    power, size = powers(tl.max(tl.abs(navigator), 1))
    tl.store(sizes + layer * count + i, size, mask=i < count)
    first, second, _ = split(navigator * power[:, None], PARTS)
    store(nav_high, first, layer, start, count, f, ROWS, NAVIGATOR)
    if PARTS == 3:
        store(nav_low, second, layer, start, count, f, ROWS, NAVIGATOR)
