"""The same mathematics in Triton, for accelerators. Nothing here is imported where Triton does not run.

They run on NVIDIA's from Ampere on, whose products of TF32 parts they count on. ALIGNATTN_KERNELS=0 leaves them out. On
first use each is compiled, for some seconds; Triton keeps the result on disk.
"""

import functools
import importlib.util
import os

import torch

WIDEST = 128  # wider tokens do not fit the registers
HIGHWAY = 64  # nor do three gradients of wider weights
SINGLE = (torch.float32,)
SHORT = (torch.float32, torch.bfloat16, torch.float16)


# How products are made: of three TF32 parts or halves (halves.py), about as precise as single precision; or of
# one, which rounds a number to eleven bits. Half precision came with no more.
EXACT, ROUNDED = "tf32x3", "tf32"


def products_for(*dtypes: torch.dtype) -> str:
    """As precise as tokens that came with these types are worth."""
    return ROUNDED if all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes) else EXACT


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def serve(tensor: torch.Tensor, *, widest: int = WIDEST, dtypes: tuple[torch.dtype, ...] = SINGLE) -> bool:
    """Whether kernels run for such tensors: on accelerators, in single precision or as said; interpreted on a CPU."""
    if torch.compiler.is_compiling():  # which makes kernels of its own
        return False
    if tensor.dtype not in dtypes or tensor.shape[-1] > widest or os.environ.get("ALIGNATTN_KERNELS") == "0":
        return False
    if tensor.is_cuda:
        return _installed() and _capable(tensor.device)
    return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("ALIGNATTN_KERNELS") == "1" and _installed()


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
