"""A tensor that takes gradients for another and holds none of its numbers."""

from typing import Any

import torch
from torch import Tensor


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.new_zeros(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def stand_in(tensor: Tensor) -> Tensor:
    """Of the same kind and shape, zero everywhere; the gradient it gets is the other's."""
    found: Tensor = _StandIn.apply(tensor)
    return found


_saved_elsewhere = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def is_kept_for_backward() -> bool:
    """Whether what autograd saves now is kept as it is: a checkpoint computes it again, others put it elsewhere.

    Taken to be so where torch is too old to tell: then more memory is used, and nothing else is different.
    """
    return _saved_elsewhere is None or torch.compiler.is_compiling() or _saved_elsewhere(True) is None
