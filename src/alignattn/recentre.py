"""Keys brought to where the queries are by a shift that the model cannot feel.

Most of what separates keys from queries in a pretrained model is a constant: the mean of the queries minus that of the
keys. Softmax is blind to a constant added to all keys, so their projection's bias can take it in with no output of the
model changed, but for rounding. What the losses then have to do is the rest. (Departure: the paper leaves the means to
the losses, whose gradient on that bias is as slow as any.)
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from alignattn.capture import QueryKey
from alignattn.capture.keybias import KeyBias, are_projected, shift_each
from alignattn.processes import several

RATE = 0.5  # of the gap, after the first time: batches differ


class Recentring:
    """Gathers the gap between means in updates that are looked at, and closes it when such an update is over."""

    def __init__(self, biases: Mapping[str, KeyBias]) -> None:
        self.biases = dict(biases)
        # Whether a module is blind to a shift of its keys; what is missing here is not known yet.
        self.blind: dict[str, bool] = {name: True for name, bias in biases.items() if bias.projection is None}
        self._same: dict[str, Tensor] = {}  # whether keys are what their projection put out
        # By layers that came together, [l, 2, heads, d + 1]: sums of all queries, of all keys; behind them how many.
        self._sums: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def look(self, record: QueryKey) -> None:
        """See whether its keys are just what their projection put out."""
        if record.name in self.biases and record.name not in self.blind:
            same = are_projected(record.key, record.key_output)
            before = self._same.get(record.name)
            self._same[record.name] = same if before is None else before.to(same.device) & same

    @torch.no_grad()
    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Add up the queries and the keys, from [l, b, h, tokens, d]."""
        sums = torch.stack([_sum_of_tokens(query, query_mask), _sum_of_tokens(key, key_mask)], 1)
        before = self._sums.get(tuple(names))
        # A model may have been moved since.
        self._sums[tuple(names)] = sums if before is None else before.to(sums.device) + sums

    @property
    def is_sure(self) -> bool:
        """Whether it is known of every module if it is blind: then nothing is asked of projections any more."""
        return all(name in self.blind for name in self.biases)

    def forget(self) -> None:
        """What was gathered is not needed."""
        self._sums, self._same = {}, {}

    @torch.no_grad()
    def close(self, *, first: bool) -> None:
        """Shift the keys by what was gathered. Every process must call this together."""
        sums, same = self._gathered(), self._same
        self.forget()
        if not self.biases or not (sums or several()):
            return
        rows = self._rows(sums, same)
        if several():
            device = next(iter(rows.values())).device
            flat = torch.cat([row.to(device) for row in rows.values()])
            dist.all_reduce(flat)
            rows = dict(zip(rows, flat.split([len(row) for row in rows.values()]), strict=True))
        for name in self.biases:
            if name not in self.blind:
                *_, counts, objections = rows[name].split([len(rows[name]) - 3, 2, 1])
                if bool((counts > 0).all()):
                    self.blind[name] = not bool(objections > 0)
        blind = [name for name in self.biases if self.blind.get(name)]
        for some in _alike(blind, lambda name: (rows[name].shape, rows[name].device)):
            size = self.biases[some[0]].size
            queries, keys, counts, _ = torch.stack([rows[name] for name in some]).split([size, size, 2, 1], 1)
            gaps = queries / counts[:, :1] - keys / counts[:, 1:]
            gaps = torch.where(gaps.isfinite().all(1, keepdim=True), gaps, 0.0)  # nothing may have come
            shift_each([self.biases[name] for name in some], gaps if first else RATE * gaps)

    def _gathered(self) -> dict[str, Tensor]:
        """The sums of each module, [2, heads, d + 1]."""
        sums: dict[str, Tensor] = {}
        for names, some in self._sums.items():
            for name, one in zip(names, some.unbind(), strict=True):
                if name in self.biases:
                    sums[name] = sums[name].to(one.device) + one if name in sums else one
        return sums

    def _rows(self, sums: dict[str, Tensor], same: dict[str, Tensor]) -> dict[str, Float[Tensor, " e"]]:
        """What a process knows of each module: sums of queries and keys a key head, their counts, 1 if it is not blind.

        Those of one size at once.
        """
        rows: dict[str, Tensor] = {}
        for names in _alike(sums, lambda name: (self.biases[name].size, sums[name].shape, sums[name].device)):
            some, size = torch.stack([sums[name] for name in names]), self.biases[names[0]].size  # (l, 2, h, d + 1)
            width = some.shape[3] - 1
            of_groups = some[..., :-1].unflatten(2, (size // width, -1)).mean(3)  # queries may share a key head
            objections = some.new_zeros(len(names), 1)
            for place, name in enumerate(names):
                if name in same:
                    objections[place] = ~same[name]
            rows |= zip(
                names, torch.cat([of_groups.flatten(1), some[:, :, 0, -1], objections], 1).unbind(), strict=True
            )
        for name, bias in self.biases.items():
            if name not in rows:
                rows[name] = torch.zeros(2 * bias.size + 3, device=bias.parameter.device)
        return {name: rows[name] for name in self.biases}  # in the order that all processes have


def _alike(names: Iterable[str], kind: Callable[[str], Any]) -> list[list[str]]:
    """Those of one kind together."""
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(kind(name), []).append(name)
    return list(found.values())


def _sum_of_tokens(tokens: Float[Tensor, "l b h n d"], mask: Bool[Tensor, "l b n"] | None) -> Float[Tensor, "l h e"]:
    """The sum of all valid tokens of all samples, and behind it how many they are."""
    if mask is None:
        total = tokens.sum((1, 3), dtype=torch.float32)  # (l, h, d)
        return F.pad(total, (0, 1), value=float(tokens.shape[1] * tokens.shape[3]))
    total = tokens.masked_fill(~mask[:, :, None, :, None], 0.0).sum((1, 3), dtype=torch.float32)
    count = mask.sum((1, 2)).to(total)[:, None, None].expand(-1, total.shape[1], 1)
    return torch.cat([total, count], -1)
