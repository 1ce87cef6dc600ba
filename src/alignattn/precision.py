"""Gradients of half precision, which are multiplied in single: a factor may be more, or less, than theirs can hold."""

import sys

import torch
from torch import Tensor

from alignattn.matching import kernels


def at_least_single(gradient: Tensor) -> Tensor:
    """Half precision as single: a gradient scaler's factor alone may be more than fp16 can hold."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def times(tokens: Tensor, by: Tensor, out: Tensor | None = None) -> Tensor:
    """The product with one number, rounded once; written over `out`, if that is given."""
    if has_kernel(tokens):
        from alignattn.matching.kernels import times as kernel

        return kernel.times(tokens, by, out)
    product = (at_least_single(tokens) * by).to(tokens.dtype)
    return product if out is None else out.copy_(product)


def has_kernel(tokens: Tensor) -> bool:
    """Whether the product is made in one pass, with nothing in single precision beside it."""
    return tokens.ndim > 0 and kernels.serve(tokens, widest=sys.maxsize, dtypes=kernels.SHORT)
