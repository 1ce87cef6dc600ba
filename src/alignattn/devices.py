"""The device that is current, where a library goes by that and not by its tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Makes an accelerator the current one for a while; nothing for any other device, or none."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
