"""How strongly alignment acts: the weight of each update, the clock it goes by, and what is looked at on the way."""

import torch
from torch import Tensor

from alignattn import balance
from alignattn.balance import Balance, Weight
from alignattn.config import AlignmentConfig
from alignattn.distances import Distances
from alignattn.health import Health
from alignattn.weights import Auto


class Strength:
    """Counts the updates that alignment had a part in, and tells the weight of the one under way."""

    def __init__(self, config: AlignmentConfig) -> None:
        self.config = config
        self.closed = 0  # updates that are over
        self.open = False  # a loss was taken since, whose update is still to come
        # Compiled code reads a scheduled weight from here: a number would be compiled for anew at each change.
        self._traced_weight = torch.zeros((), dtype=torch.float32, device="cpu")
        self.balance = Balance(config.weight.share if isinstance(config.weight, Auto) else None, config.first_weight)
        self.distances = Distances()
        self.health = Health(chooses=self.balance.target is not None)
        self.looks = False  # at gradients and health, in the update under way
        self.set_clock(0)

    @property
    def steps(self) -> int:
        """Updates, the one under way included."""
        return self.closed + self.open

    def set_clock(self, updates: int) -> None:
        """So many updates are over, and none is under way."""
        self.closed, self.open = updates, False
        if callable(self.config.weight):
            self._traced_weight.fill_(self.config.weight_at(updates))

    def weight(self) -> Weight:
        """Of the update under way."""
        compiling = torch.compiler.is_compiling()
        if self.balance.target is not None:
            return self.balance.unseen() if compiling else self.balance.weight
        if compiling and callable(self.config.weight):
            return self._traced_weight
        return self.config.weight_at(self.closed)

    def is_time_to_look(self) -> bool:
        """Whether the update under way is one of those that are looked at."""
        return self.closed % balance.EVERY == 0

    def begin(self) -> None:
        """A loss is taken."""
        if not torch.compiler.is_compiling():  # it would be compiled for each number of the clock (terms.py)
            self.looks = self.is_time_to_look()
        self.open = True

    def advance(self, told: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        """The update is over; figures for the logs, if it was looked at. `told` are the matcher's own."""
        figures: dict[str, Tensor] = {}
        if self.looks:
            share = self.balance.settle(self.weight(), self.closed, device=device)
            self.health.chooses = self.balance.target is not None and not self.balance.is_blind
            figures = self.health.settle(share, self.distances.settle(device), told)
        self.looks = False
        self.set_clock(self.steps)
        return figures
