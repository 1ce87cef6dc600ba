"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor


class _Sum:
    """Of values that come together, in one vector; behind them how many there were."""

    # No integer of Python's, as each new one would be compiled for; and written here rather than into the dict of all
    # sums, as compiled code would be compiled anew whenever another joins those.
    def __init__(self, values: Tensor) -> None:
        self.values = values


class Meter:
    """Sums on the device, one addition a loss however many layers there are; one transfer when they are read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def expect(self, names: tuple[str, ...], device: torch.device) -> None:
        """These will come together: code that is compiled for the first of them serves all others then."""
        held = "cpu" if device.type == "meta" else device
        self._sums.setdefault(names, _Sum(torch.zeros(len(names) + 1, device=held)))

    @torch.no_grad()
    def add(self, names: tuple[str, ...], values: Tensor) -> None:
        """One value for each name, of one loss."""
        values = F.pad(values.detach().float().reshape(-1), (0, 1), value=1.0)
        if names in self._sums:
            total = self._sums[names]
            total.values = total.values.to(values.device) + values  # the model may have moved since
        else:
            self._sums[names] = _Sum(values)

    def read(self) -> dict[str, float]:
        """Means since the last reading; empty if there was no loss."""
        totals: dict[str, tuple[float, float]] = {}
        for names, total in self._sums.items():  # a name may have come in several companies
            *values, count = total.values.tolist()
            total.values = torch.zeros_like(total.values)  # not forgotten: see `expect`
            for name, value in zip(names, values, strict=True) if count else ():
                before, times = totals.get(name, (0.0, 0.0))
                totals[name] = before + value, times + count
        return {name: total / times for name, (total, times) in totals.items()}
