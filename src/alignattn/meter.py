"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

import torch
from torch import Tensor


class Meter:
    """Sums on the device, one addition a loss however many layers there are; one transfer when they are read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}  # of values that come together, in one vector
        self._counts: dict[tuple[str, ...], int] = {}

    @torch.no_grad()
    def add(self, names: tuple[str, ...], values: Tensor) -> None:
        """One value for each name, of one loss."""
        values = values.detach().float().reshape(-1)
        self._sums[names] = self._sums[names] + values if names in self._sums else values
        self._counts[names] = self._counts.get(names, 0) + 1

    def read(self) -> dict[str, float]:
        """Means since the last reading; empty if there was no loss."""
        means: dict[str, float] = {}
        for names, total in self._sums.items():
            means |= zip(names, (total / self._counts[names]).tolist(), strict=True)
        self._sums.clear()
        self._counts.clear()
        return means
