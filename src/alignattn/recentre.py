"""Keys brought to where the queries are by a shift that the model cannot feel.

Most of what separates keys from queries in a pretrained model is a constant: the mean of the queries minus that of the
keys. Softmax is blind to a constant added to all keys, so their projection's bias can take it in with no output of the
model changed, but for rounding. What the losses then have to do is the rest. (Departure: the paper leaves the means to
the losses, whose gradient on that bias is as slow as any.)
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from alignattn.capture import QueryKey
from alignattn.capture.keybias import KeyBias, are_projected
from alignattn.processes import several

RATE = 0.5  # of the gap, after the first time: batches differ


class Recentring:
    """Gathers the gap between means in updates that are looked at, and closes it when such an update is over."""

    def __init__(self, biases: Mapping[str, KeyBias]) -> None:
        self.biases = dict(biases)
        # Whether a module is blind to a shift of its keys; what is missing here is not known yet.
        self.blind: dict[str, bool] = {name: True for name, bias in biases.items() if bias.projection is None}
        self._same: dict[str, Tensor] = {}  # whether keys are what their projection put out
        self._sums: dict[str, Tensor] = {}  # [2, heads, d + 1]: of all queries, of all keys; behind them how many

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
        sums = torch.stack([_sum_of_tokens(query, query_mask), _sum_of_tokens(key, key_mask)], 1)  # (l, 2, h, d + 1)
        for name, some in zip(names, sums.unbind(), strict=True):
            if name in self.biases:
                # A model may have been moved since.
                self._sums[name] = self._sums[name].to(some.device) + some if name in self._sums else some

    def forget(self) -> None:
        """What was gathered is not needed."""
        self._sums, self._same = {}, {}

    @torch.no_grad()
    def close(self, *, first: bool) -> None:
        """Shift the keys by what was gathered. Every process must call this together."""
        sums, same = self._sums, self._same
        self.forget()
        if not self.biases or not (sums or several()):
            return
        rows = {name: self._row(name, sums.get(name), same.get(name)) for name in self.biases}
        if several():
            device = next(iter(rows.values())).device
            flat = torch.cat([row.to(device) for row in rows.values()])
            dist.all_reduce(flat)
            rows = dict(zip(rows, flat.split([len(row) for row in rows.values()]), strict=True))
        for name, bias in self.biases.items():
            queries, keys, counts, objections = rows[name].split([bias.size, bias.size, 2, 1])
            if name not in self.blind and bool((counts > 0).all()):
                self.blind[name] = not bool(objections > 0)
            if self.blind.get(name):
                gap = queries / counts[0] - keys / counts[1]
                gap = torch.where(gap.isfinite().all(), gap, 0.0)  # nothing may have come
                bias.shift(gap if first else RATE * gap)

    def _row(self, name: str, sums: Tensor | None, same: Tensor | None) -> Float[Tensor, " e"]:
        """What a process knows of a module: sums of queries and keys a key head, their counts, 1 if it is not blind."""
        bias = self.biases[name]
        if sums is None:
            return torch.zeros(2 * bias.size + 3, device=bias.parameter.device)
        width = sums.shape[2] - 1
        of_groups = sums[..., :-1].reshape(2, bias.size // width, -1, width).mean(2)  # queries may share a key head
        objection = sums.new_zeros(1) if same is None else (~same).to(sums)[None]
        return torch.cat([of_groups.flatten(), sums[:, 0, -1], objection])


def _sum_of_tokens(tokens: Float[Tensor, "l b h n d"], mask: Bool[Tensor, "l b n"] | None) -> Float[Tensor, "l h e"]:
    """The sum of all valid tokens of all samples, and behind it how many they are."""
    if mask is None:
        total = tokens.sum((1, 3), dtype=torch.float32)  # (l, h, d)
        return F.pad(total, (0, 1), value=float(tokens.shape[1] * tokens.shape[3]))
    total = tokens.masked_fill(~mask[:, :, None, :, None], 0.0).sum((1, 3), dtype=torch.float32)
    count = mask.sum((1, 2)).to(total)[:, None, None].expand(-1, total.shape[1], 1)
    return torch.cat([total, count], -1)
