"""Functions that torch.compile calls and does not look into: loops that end by what they compute, tiles, sorting.

Traced, they would break the graph, or unroll into thousands of operations for nothing.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def opaque(name: str, *, like: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """In traced code the operator `alignattn::name`, which has no gradient; elsewhere the function itself.

    `like` makes outputs of the right shape, dtype and device without computing them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        undifferentiated = torch.no_grad()(function)
        operator = torch.library.custom_op(f"alignattn::{name}", undifferentiated, mutates_args=())
        operator.register_fake(like)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                return undifferentiated(*args, **kwargs)
            # `like` tells strides too: of contiguous inputs all functions here make contiguous outputs.
            plain = [arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args]
            result: R = operator(*plain, **kwargs)
            return result

        return call

    return decorate
