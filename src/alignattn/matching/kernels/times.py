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


def times(values: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
    """`values` · `by`, of no dimension, in the precision of the values; written over `out`, if that is given.

    The last axes but one may have changed places, and have in the product.
    """
    if values.ndim > 2 and not values.is_contiguous() and values.transpose(-3, -2).is_contiguous():
        product = times(values.transpose(-3, -2), by, None if out is None else out.transpose(-3, -2))
        return product.transpose(-3, -2) if out is None else out
    values = values.contiguous()
    product = torch.empty_like(values) if out is None or not out.is_contiguous() else out
    launch(_times, triton.cdiv(values.numel(), BLOCK), values, by, product, values.numel(), BLOCK=BLOCK)
    return product if out is None or product is out else out.copy_(product)
