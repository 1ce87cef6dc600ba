"""Numbers times one number that lies on the device, in single precision whatever theirs is, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from alignattn.matching.kernels.tiles import launch

BLOCK = 4096


@triton.jit
def _times(values, by, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    product = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * tl.load(by).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


def times(values: Tensor, by: Tensor) -> Tensor:
    """`values` · `by`, of no dimension, in the precision of the values."""
    values = values.contiguous()
    out = torch.empty_like(values)
    launch(_times, triton.cdiv(values.numel(), BLOCK), values, by, out, values.numel(), BLOCK=BLOCK)
    return out
