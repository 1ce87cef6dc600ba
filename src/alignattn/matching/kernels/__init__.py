"""The same mathematics in Triton, for accelerators. Nothing here is imported where Triton does not run."""

import functools
import importlib.util
import os

import torch

WIDEST_HEAD = 256  # wider ones do not fit the registers


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def serve(tensor: torch.Tensor) -> bool:
    """Whether kernels run for such tensors: in single precision on accelerators; on a CPU in the interpreter alone."""
    where = tensor.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return where and tensor.dtype == torch.float32 and tensor.shape[-1] <= WIDEST_HEAD and _installed()
