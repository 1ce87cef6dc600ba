"""How far apart the queries and keys of each head are while it trains, and which heads are left alone for it.

Looked at in the updates in which gradients are (balance.py), on a few samples, and on some tokens of long ones: the
unbiased squared MMD, with the mean squared distance for a bandwidth, which costs nothing. A head whose estimate,
smoothed over looks, is below zero has queries and keys that cannot be told apart. To push it on makes each query its
own key, and the task was seen to suffer: with `until_met` it gets no gradient until they can be told apart again.
(Departure: the paper pushes all heads always.)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from alignattn.devices import on_device
from alignattn.matching.discrepancy import mmd
from alignattn.processes import several

SAMPLES = 4  # of a batch
TOKENS = 2048  # of a sample, evenly spaced: all pairs of a graph's 20,000 nodes would take longer than ten updates
MEMORY = 0.5  # of a head's distance, from one look to the next


class Seen(NamedTuple):
    """One look: means over heads, layers and samples."""

    mmd: Tensor
    tokens: Tensor  # of a sample, as far as they were looked at


class Distances:
    """Of every layer, by name; the same in all processes."""

    def __init__(self) -> None:
        self._now: dict[str, list[Tensor]] = {}  # [heads] each, of the update under way
        self._tokens: list[Tensor] = []
        self._smoothed: dict[str, Tensor] = {}  # [heads]
        self._factors: dict[tuple[str, ...], Tensor] = {}  # until the next look
        self._heads: dict[str, int] = {}  # of the layers that some process saw in its first look

    @torch.no_grad()
    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Measure a few samples of each layer, [l, b, h, tokens, d]."""
        some = [_spaced(t[:, :SAMPLES].flatten(0, 1), 2).float() for t in (query, key)]
        masks = [None if m is None else _spaced(m[:, :SAMPLES].flatten(0, 1), 1) for m in (query_mask, key_mask)]
        found = mmd(some[0], some[1], bandwidth="mean", query_mask=masks[0], key_mask=masks[1])
        for name, of_layer in zip(names, found.unflatten(0, (len(names), -1)).mean(1).unbind(), strict=True):
            self._now.setdefault(_key(name, len(of_layer)), []).append(of_layer)
        if masks[0] is None:
            self._tokens.append(torch.full((), float(some[0].shape[2]), device=query.device))
        else:
            self._tokens.append(masks[0].sum(-1, dtype=torch.float32).mean())

    @torch.no_grad()
    def settle(self, device: torch.device | None = None) -> Seen | None:
        """The look is over; None where nothing was seen. Every process must call this together."""
        now, tokens = self._now, self._tokens
        self._now, self._tokens, self._factors = {}, [], {}
        device = tokens[0].device if tokens else device
        means = {name: _mean([part.to(device) for part in parts]) for name, parts in now.items()}
        self._smooth(self._over_processes(means, device))
        if not means:
            return None
        return Seen(torch.cat(list(means.values())).mean(), _mean([count.to(device) for count in tokens]))

    def _smooth(self, means: dict[str, Tensor]) -> None:
        """Over looks, [heads] each; those of as many heads at once."""
        alike: dict[Any, list[str]] = {}
        for name, mean in means.items():
            alike.setdefault((mean.shape, mean.device), []).append(name)
        for (shape, device), names in alike.items():
            rows = []
            for name in names:
                known = self._smoothed.get(name)
                rows.append(means[name] if known is None or known.shape != shape else known.to(device))
            now = torch.stack([means[name] for name in names])
            before = torch.stack(rows)
            both = torch.where(before.isfinite(), MEMORY * before + (1 - MEMORY) * now, now)
            self._smoothed |= zip(names, torch.where(now.isfinite(), both, before).unbind(), strict=True)

    def _over_processes(self, means: dict[str, Tensor], device: torch.device | None) -> dict[str, Tensor]:
        """Means over the processes that saw a layer, NaN if none did. What came later stays one's own."""
        if not several():
            return means
        if not self._heads:
            told: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
            with on_device(device):  # objects go by way of the current one
                dist.all_gather_object(told, {name: len(mean) for name, mean in means.items()})
            self._heads = {name: heads for one in told for name, heads in one.items()}
        if not self._heads:
            return means
        rows = []
        for name, heads in self._heads.items():
            mean = means.get(name)
            nothing = torch.zeros(heads + 1, device=device)
            rows.append(nothing if mean is None else F.pad(mean, (0, 1), value=1.0))  # behind it: of how many processes
        flat = torch.cat(rows)
        dist.all_reduce(flat)
        parts = flat.split([len(row) for row in rows])
        return means | {name: part[:-1] / part[-1] for name, part in zip(self._heads, parts, strict=True)}

    def acting(self, names: list[str], heads: int, device: torch.device) -> Float[Tensor, "l 1 h"] | None:
        """One for every head that still acts, zero for those that have met; None: nothing is known yet."""
        if not self._smoothed:
            return None
        keys = tuple(_key(name, heads) for name in names)
        if keys not in self._factors or self._factors[keys].device != device:
            known = [self._smoothed.get(key) for key in keys]
            rows = [torch.zeros(heads, device=device) if row is None else row.to(device) for row in known]
            self._factors[keys] = (~(torch.stack(rows) < 0)).float()[:, None]
        return self._factors[keys]

    def state_dict(self) -> dict[str, Tensor]:
        """What was learnt of each head, by its layer's name and the number of them."""
        return dict(self._smoothed)

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from what state_dict() gave."""
        self._smoothed, self._factors = dict(saved), {}


def _mean(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)


def _spaced(tokens: Tensor, axis: int) -> Tensor:
    """Of many, some."""
    length = tokens.shape[axis]
    if length <= TOKENS:
        return tokens
    return tokens.index_select(axis, torch.arange(TOKENS, device=tokens.device) * length // TOKENS)


def _key(name: str, heads: int) -> str:
    """Who records by hand may give one name to several attentions."""
    return f"{name}/{heads}"
