"""How an alignment fares while it trains: figures for the logs, and warnings that say what to do.

Looked at in the updates in which gradients are (balance.py). A warning is given from figures of the look before, so
that nobody waits for the device, and once.
"""

import math
import warnings

import torch
from torch import Tensor

from alignattn.devices import Arriving
from alignattn.distances import Seen
from alignattn.errors import AlignmentWarning

EATING = 0.5  # of the task's gradient: a fifth, always in one direction, is much already
# Queries that are their own keys have an unbiased MMD² of -2 (1 - mean kernel) / tokens, about -0.8 / tokens. At less
# than half of that tasks were seen to suffer.
MERGED = -0.3
BEHIND, COLLAPSED = 0.51, 0.999  # accuracy of a discriminator
PATIENCE = 5  # looks in a row, before anything is said
LOOKS_TO_MOVE = 20

ADVICE = {
    "blind": (
        "weight='auto' sees no gradient of the task, or none of alignment, where queries and keys are made, and leaves "
        "the weight as it is. Are their projections frozen? Give a number, or train them."
    ),
    "eats": (
        f"Alignment's gradient at queries and keys has been more than {EATING:g} of the task's for a while: it eats "
        "the task. Lower the weight, or use weight='auto'."
    ),
    "merged": (
        "The MMD in the logs is far below zero: queries have become their own keys, and tokens look at themselves. "
        "Lower the weight, leave until_met on, or use method='ct'."
    ),
    "still": (
        "Keys and queries are as far apart as at the beginning: alignment does not move them. Raise the weight, use "
        "weight='auto', or see whether their projections are trained."
    ),
    "behind": (
        "The discriminator tells queries from keys no better than a coin: it has been left behind, or has nothing left "
        "to tell. If the MMD in the logs is not small, raise adversary_rate."
    ),
    "collapsed": (
        "The discriminator tells queries from keys without a mistake: its gradient says little. Lower adversary_rate, "
        "or use method='mmd'."
    ),
}


class Health:
    """Figures of one look after another."""

    def __init__(self, *, chooses: bool = False) -> None:
        self.chooses = chooses  # the weight, from the share
        self._last: tuple[list[str], Arriving] | None = None  # of the look before
        self._in_a_row: dict[str, int] = dict.fromkeys(ADVICE, 0)
        self._first_mmd: float | None = None
        self._blind = False  # no gradient came in the look before
        self._looks = 0

    @torch.no_grad()
    def settle(self, share: Tensor | None, seen: Seen | None, told: dict[str, Tensor]) -> dict[str, Tensor]:
        """The figures of this look, for the logs; `told` are the matcher's own; no `share` where it cannot be seen."""
        self._warn()
        figures = dict(told) if share is None else {"alignment_share": share, **told}
        self._blind = self.chooses and share is None
        if seen is not None:
            figures["alignment_mmd"] = seen.mmd
        last = figures if seen is None else figures | {"merged": seen.mmd * seen.tokens}
        self._last = None
        if last:
            device = next(iter(last.values())).device
            together = torch.stack([value.to(device=device, dtype=torch.float32) for value in last.values()])
            self._last = list(last), Arriving(together)
        return figures

    def _warn(self) -> None:
        if self._last is None and not self._blind:
            return
        names, last = self._last or ([], None)
        values = {} if last is None else dict(zip(names, last.values().tolist(), strict=True))
        self._looks += 1
        distance = values.get("alignment_mmd", 0.0)
        self._first_mmd = distance if self._first_mmd is None else self._first_mmd
        accuracy = values.get("discriminator_accuracy", 0.75)
        now = {
            "blind": self.chooses and (self._blind or math.isnan(values.get("alignment_share", 0.0))),
            "eats": values.get("alignment_share", 0.0) > EATING,
            "merged": values.get("merged", 0.0) < MERGED,
            "still": self._looks >= LOOKS_TO_MOVE and distance > 0.95 * self._first_mmd > 0,
            "behind": accuracy < BEHIND,
            "collapsed": accuracy > COLLAPSED,
        }
        for kind, true in now.items():
            self._in_a_row[kind] = self._in_a_row[kind] + 1 if true else 0
            if self._in_a_row[kind] == PATIENCE:
                warnings.warn(ADVICE[kind], AlignmentWarning, stacklevel=2)
