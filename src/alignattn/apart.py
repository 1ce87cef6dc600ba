"""What is done within a user's forward and is none of it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


@contextmanager
def apart() -> Iterator[None]:
    """Within a user's forward: neither a checkpoint nor another tap is to see what matching does."""
    # A selective checkpoint keeps what operators put out, by the order in which they are called.
    selective = any(type(mode).__module__ == checkpoint.__name__ for mode in _get_current_dispatch_mode_stack())
    with (
        torch._C.DisableTorchFunction(),
        saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        _disable_current_modes() if selective else nullcontext(),
    ):
        yield
