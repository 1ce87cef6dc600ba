"""The device that is current, where a library goes by that and not by its tensors; and numbers that come from one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """Makes an accelerator the current one for a while; nothing for any other device, or none."""
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()


class Arriving:
    """Numbers on their way to the host. Nobody waits for them but who asks for them before they are here.

    To ask a tensor itself would wait for all that its device was asked to do since.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=values.is_cuda)  # where torch pins memory, and keeps it for more
        self._event: Any = None
        if values.is_cuda:
            self._event = torch.cuda.current_stream(values.device).record_event()

    def are_here(self) -> bool:
        """Whether nobody would have to wait."""
        if self._event is not None and self._event.query():
            self._event = None  # which need not be asked again
        return self._event is None

    def values(self) -> Tensor:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._values

    def __getstate__(self) -> dict[str, Any]:
        """An event cannot be copied."""
        return {"_values": self.values(), "_event": None}
