"""The same mathematics in Triton, for accelerators. Nothing here is imported where Triton does not run.

They are asked for with ALIGNATTN_KERNELS=1: they are tested in Triton's interpreter, and not yet measured on a device.
"""

import functools
import importlib.util
import os

import torch

WIDEST = 128  # wider tokens do not fit the registers


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def serve(tensor: torch.Tensor, *, widest: int = WIDEST) -> bool:
    """Whether kernels run for such tensors: in single precision on accelerators; on a CPU in the interpreter alone."""
    if os.environ.get("ALIGNATTN_KERNELS") != "1" or tensor.dtype != torch.float32 or tensor.shape[-1] > widest:
        return False
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _installed()
