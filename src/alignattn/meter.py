"""What an alignment came to, for logs: means since they were last read, gathered without waiting for the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 32  # losses that wait to be added up together

Of = Callable[[Tensor], Tensor]  # what is gathered [losses, _] -> figures [losses, names]


class _Sum:
    """Of values that come together, in one vector; behind them how many there were."""

    # No integer of Python's, as each new one would be compiled for; and written here rather than into the dict of all
    # sums, as compiled code would be compiled anew whenever another joins those.
    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.one = torch.ones(1, device=values.device)  # counts a loss; made once, as a device waits for Python


def _as_they_are(table: Tensor) -> Tensor:
    return table


@dataclass(frozen=True)
class Figures:
    """Of weights and parts [losses, 1 + layers] what the logs show: the weighted loss, before them."""

    counted: int | None  # the loss is the sum of its parts, each counted so many times; None: their mean

    def __call__(self, table: Tensor) -> Tensor:
        """[losses, 2 + layers]."""
        return with_whole(table, self.counted)


def with_whole(table: Tensor, counted: int | None) -> Tensor:
    """What `Figures` makes; by itself for compiled code, which older torch cannot make a dataclass in."""
    weight, parts = table[:, :1], table[:, 1:]
    whole = parts.mean(1, keepdim=True) if counted is None else parts.sum(1, keepdim=True) * counted
    return torch.cat([weight * whole, table], 1)


class Meter:
    """Sums on the device, one addition a loss however many layers there are; one transfer when they are read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], _Sum] = {}
        self._waiting: dict[tuple[tuple[str, ...], Of], list[Sequence[Tensor | float]]] = {}

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

    def gather(self, names: tuple[str, ...], values: Sequence[Tensor | float], of: Of = _as_they_are) -> None:
        """The same, later and for many losses at once: a device that waits for Python is asked little in each step.

        Nobody may write over the values. `of` makes figures of them, if they are none yet.
        """
        waiting = self._waiting.setdefault((names, of), [])
        waiting.append([v.detach() if isinstance(v, Tensor) and v.requires_grad else v for v in values])
        if len(waiting) >= MOST:
            self._catch_up()

    @torch.no_grad()
    def _catch_up(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (names, of), rows in waiting.items():
            device = next(value.device for value in rows[-1] if isinstance(value, Tensor))
            figures = of(torch.stack([_column(values, device) for values in zip(*rows, strict=True)], 1))
            self.add(names, figures[0])
            total = self._sums[names]
            total.values[:-1] += figures[1:].sum(0)
            total.values[-1] += len(rows) - 1

    def read(self) -> dict[str, float]:
        """Means since the last reading; empty if there was no loss."""
        self._catch_up()
        totals: dict[str, tuple[float, float]] = {}
        for names, total in self._sums.items():  # a name may have come in several companies
            *values, count = total.values.tolist()
            total.values = torch.zeros_like(total.values)  # not forgotten: see `expect`
            for name, value in zip(names, values, strict=True) if count else ():
                before, times = totals.get(name, (0.0, 0.0))
                totals[name] = before + value, times + count
        return {name: total / times for name, (total, times) in totals.items()}


def _column(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """One value of each loss."""
    if all(isinstance(value, float) for value in values):
        return torch.tensor(values, dtype=torch.float32, device=device)
    return torch.stack([torch.as_tensor(value).to(device, torch.float32) for value in values])
