"""Tokens of one problem, some rows at a time, as the kernels read and write them. Padding is read as zeros."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from alignattn.devices import on_device
from alignattn.errors import AlignmentError

TILE = 64
TWO = 128  # registers of a thread: a processor holds two programs of eight warps, and one works while the other waits
WIDE = 160 * 2**10  # bytes


@triton.jit
def valid_rows(mask, sample, i, count, MASKED: tl.constexpr):
    """Which of these rows are tokens."""
    inside = i < count
    if MASKED:
        inside = inside & (tl.load(mask + sample * count + i, mask=inside, other=0) != 0)
    return inside


@triton.jit
def read(tokens, problem, i, valid, count, d, WIDTH: tl.constexpr):
    """These rows of a problem, in single precision."""
    return read_at(tokens + problem * count * d, i, valid, d, d, WIDTH)


@triton.jit
def read_at(tokens, i, valid, stride, d, WIDTH: tl.constexpr):
    """The same, where rows begin `stride` numbers after each other."""
    e = tl.arange(0, WIDTH)
    at = tokens + i[:, None] * stride + e[None, :]
    return tl.load(at, mask=valid[:, None] & (e[None, :] < d), other=0.0).to(tl.float32)


@triton.jit
def write(tokens, values, problem, i, count, d, WIDTH: tl.constexpr):
    """These rows of a problem, in the precision they have there."""
    write_at(tokens + problem * count * d, values, i, count, d, d, WIDTH)


@triton.jit
def write_at(tokens, values, i, count, stride, d, WIDTH: tl.constexpr):
    """The same, where rows begin `stride` numbers after each other."""
    e = tl.arange(0, WIDTH)
    at = tokens + i[:, None] * stride + e[None, :]
    tl.store(at, values.to(tokens.dtype.element_ty), mask=(i[:, None] < count) & (e[None, :] < d))


@triton.jit
def as_products_see(values, PRECISION: tl.constexpr):
    """Rounded to what a product of one TF32 part takes of them. Itself it cuts the rest off: all would be too small."""
    if PRECISION == "tf32":
        rounded = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        values = tl.where(values - values == 0.0, rounded, values)  # bits of NaN may overflow
    return values


@triton.jit
def total(tokens, mask, sample, count, stride, d, ROWS: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Sums of the valid tokens of a problem that begins there, of their squares, of ones; and the largest entry.

    Places of a tile are added up apart: threads wait for each other once, and not for each tile. In double precision
    squares of the largest numbers stay finite, and of those far from zero what is left about their mean is known as
    well as they are themselves.
    """
    summed, squares = tl.zeros([ROWS, WIDTH], tl.float64), tl.zeros([ROWS, WIDTH], tl.float64)
    largest, many = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.float64)
    row = tl.arange(0, ROWS)
    # Padding is read too: to ask first what is some would be to wait twice.
    upcoming = read_at(tokens, row, row < count, stride, d, WIDTH)
    upcoming_valid = valid_rows(mask, sample, row, count, MASKED)
    for start in range(0, count, ROWS):
        tile, valid = upcoming, upcoming_valid
        following = start + ROWS + row  # is read while this one is added
        upcoming = read_at(tokens, following, following < count, stride, d, WIDTH)
        upcoming_valid = valid_rows(mask, sample, following, count, MASKED)
        if MASKED:
            tile = tl.where(valid[:, None], tile, 0.0)
        largest = tl.maximum(largest, tl.abs(tile))
        number = tile.to(tl.float64)
        summed += number
        squares += number * number
        many += valid.to(tl.float64)
    return tl.sum(summed, 0), tl.sum(tl.sum(squares, 0), 0), tl.sum(many, 0), tl.max(tl.max(largest, 0), 0)


@triton.jit
def spread(squares, summed, count):
    """The sum of squares about the mean, of such sums."""
    about = squares - tl.sum(summed * summed, 0) / tl.maximum(count, 1.0)
    return tl.where(about < 0.0, 0.0, about)  # rounding; NaN stays


def launch(kernel: Any, programs: int, *given: Any, **settings: Any) -> None:
    """Run so many programs where the tensors are, the first of what is given: Triton goes by the current device."""
    with on_device(given[0].device):
        try:
            kernel[(programs,)](*given, **settings)
        except OutOfResources as error:
            raise AlignmentError(
                f"This accelerator is too small for a kernel of alignattn: {error}. ALIGNATTN_KERNELS=0 in the "
                "environment leaves kernels out; torch computes the same then."
            ) from error


def has_room(device: torch.device) -> bool:
    """Whether a processor shares enough memory for tiles of 64 wide tokens; those of gaming cards do not."""
    return device.type != "cuda" or _shared_memory(device) >= WIDE


@functools.cache
def _shared_memory(device: torch.device) -> int:
    found: Any = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 0))


def as_bytes(query_mask: Tensor | None, key_mask: Tensor | None, instead: Tensor) -> list[Tensor]:
    """Masks as kernels read them; any tensor where there is none, which is not read."""
    return [instead if mask is None else mask.contiguous().view(torch.uint8) for mask in (query_mask, key_mask)]


def width_of(tokens: Tensor) -> int:
    """Of a tile: a power of two that products can be made of."""
    return max(16, int(triton.next_power_of_2(tokens.shape[-1])))
