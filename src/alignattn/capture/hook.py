"""Hooks on a user's modules that their copies do not inherit, and what a hook may ask about the pass it runs in."""

import sys
from collections.abc import Callable
from typing import Any

import torch


class Hook:
    """A hook of ours. A deep or pickled copy of the module gets one that does nothing: copies are plain models."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return None if self.function is None else self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def is_compiled_output(tensor: torch.Tensor) -> bool:
    """Whether compiled code has put it out: autograd then sees nothing of what made it."""
    made = tensor if tensor._base is None else tensor._base
    return type(made.grad_fn).__name__ == "CompiledFunctionBackward"


def is_compiled_backward() -> bool:
    """Whether the backward itself is compiled code, which knows nothing of its end."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False)) or torch.compiler.is_compiling()


def in_backward() -> bool:
    """Whether autograd is running a backward pass: then a forward is the recomputation of a checkpoint."""
    return not torch.compiler.is_compiling() and bool(torch._C._current_graph_task_id() != -1)
