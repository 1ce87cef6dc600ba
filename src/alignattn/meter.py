"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

import torch
from torch import Tensor


class Meter:
    """Sums on the device; one transfer when they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor]) -> None:
        """Of one loss."""
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        """Means since the last reading; empty if there was no loss."""
        if not self._sums:
            return {}
        device = next(iter(self._sums.values())).device
        values = torch.stack([value.to(device) for value in self._sums.values()]).tolist()
        means = {name: value / self._counts[name] for name, value in zip(self._sums, values, strict=True)}
        self._sums.clear()
        self._counts.clear()
        return means
