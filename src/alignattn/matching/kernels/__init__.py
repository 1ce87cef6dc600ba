"""The same mathematics in Triton, for accelerators. Nothing here is imported where Triton does not run.

They are asked for with ALIGNATTN_KERNELS=1: they are tested in Triton's interpreter, and not yet measured on a device.
"""

import functools
import importlib.util
import os

import torch

WIDEST = 128  # wider tokens do not fit the registers
SINGLE = (torch.float32,)
SHORT = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def serve(tensor: torch.Tensor, *, widest: int = WIDEST, dtypes: tuple[torch.dtype, ...] = SINGLE) -> bool:
    """Whether kernels run for such tensors: on accelerators, in single precision or as said; interpreted on a CPU."""
    if os.environ.get("ALIGNATTN_KERNELS") != "1" or tensor.dtype not in dtypes or tensor.shape[-1] > widest:
        return False
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _installed()
