"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Meter:
    """Sums on the device, one addition a loss however many layers there are; one transfer when they are read."""

    def __init__(self) -> None:
        # Of values that come together, in one vector; behind them how many there were, which in compiled code must be
        # no integer of Python's: each new one would be compiled for.
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def expect(self, names: tuple[str, ...], device: torch.device) -> None:
        """These will come together: code that is compiled for the first of them serves all others then."""
        self._sums.setdefault(names, torch.zeros(len(names) + 1, device=device))

    @torch.no_grad()
    def add(self, names: tuple[str, ...], values: Tensor) -> None:
        """One value for each name, of one loss."""
        values = F.pad(values.detach().float().reshape(-1), (0, 1), value=1.0)
        if names in self._sums:  # on another device, where the model has moved since
            values = self._sums[names].to(values.device) + values
        self._sums[names] = values

    def read(self) -> dict[str, float]:
        """Means since the last reading; empty if there was no loss."""
        totals: dict[str, tuple[float, float]] = {}
        for names, sums in self._sums.items():  # a name may have come in several companies
            *values, count = sums.tolist()
            self._sums[names] = torch.zeros_like(sums)  # not forgotten: see `expect`
            for name, value in zip(names, values, strict=True) if count else ():
                total, times = totals.get(name, (0.0, 0.0))
                totals[name] = total + value, times + count
        return {name: total / times for name, (total, times) in totals.items()}
