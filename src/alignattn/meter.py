"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

import torch
from torch import Tensor


class _Sum:
    """Of values that come together, in one vector; behind them how many there were."""

    # No integer of Python's, as each new one would be compiled for; and written here rather than into the dict of all
    # sums, as compiled code would be compiled anew whenever another joins those.
    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.one = torch.ones(1, device=values.device)  # counts a loss; made once, as a device waits for Python


class Meter:
    """Sums on the device, one addition a loss however many layers there are; one transfer when they are read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}

    def expect(self, names: tuple[str, ...], device: torch.device) -> None:
        """These will come together: code that is compiled for the first of them serves all others then."""
        if names not in self._sums:
            self._sums[names] = _Sum(torch.zeros(len(names) + 1, device="cpu" if device.type == "meta" else device))

    @torch.no_grad()
    def add(self, names: tuple[str, ...], values: Tensor) -> None:
        """One value for each name, of one loss."""
        self.expect(names, values.device)
        total = self._sums[names]
        if total.values.device != values.device:  # the model may have moved since
            total.values, total.one = total.values.to(values.device), total.one.to(values.device)
        values = values if values.ndim == 1 else values.reshape(1)
        total.values = total.values + torch.cat([values.float(), total.one])

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
