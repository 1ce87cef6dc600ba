"""Whether anybody may keep a gradient that is handed to a tensor: else its memory may be written over later."""

from typing import Any

from torch import Tensor

# What autograd's nodes hand on as it is, or as another view of it; and those that make something new of it.
PASSED_ON = frozenset(
    f"{name}Backward0"
    for name in ("Add", "View", "UnsafeView", "_ReshapeAlias", "Transpose", "Permute", "Unsqueeze", "Squeeze")
)
CONSUMED = frozenset(
    f"{name}Backward0"
    for name in ("Mm", "Bmm", "Linear", "Mul", "NativeLayerNorm", "Split", "SplitWithSizes", "Unbind")
)


def is_consumed(target: Tensor) -> bool:
    """Whether no parameter can get the gradient itself, nor anybody who is known to have asked for it."""
    if target.grad_fn is None or target.retains_grad or target._backward_hooks:
        return False
    return _makes_anew(target.grad_fn)


def _makes_anew(node: Any) -> bool:
    """Whether this node hands on none of the gradient it gets, nor any behind it that gets the same."""
    while True:
        name = type(node).__name__  # of autograd's own nodes it is that of the node; to ask them for it takes longer
        if name in PASSED_ON:
            following = [one for one, _ in node.next_functions if one is not None]
            if len(following) != 1:
                return all(map(_makes_anew, following))
            node = following[0]
        elif name == "AddmmBackward0":  # to what is added it goes as it is, if that is as large
            bias, number = node.next_functions[0]
            if bias is None or _is_smaller(bias, number):
                return True
            node = bias
        else:
            return name in CONSUMED


def _is_smaller(node: Any, number: int) -> bool:
    """Than a product of matrices: then its gradient is a sum."""
    if type(node).__name__ == "AccumulateGrad":
        return bool(node.variable.ndim < 2)
    known = getattr(node, "_input_metadata", None)  # not in older torch
    return known is not None and len(known[number].shape) < 2
