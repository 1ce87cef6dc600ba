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

RATE = 0.1  # of the gap, from the second update on: batches differ


class Recentring:
    """Gathers the gap between means while losses are taken, and closes it when the model has been updated."""

    def __init__(self, biases: Mapping[str, KeyBias]) -> None:
        self.biases = dict(biases)
        # Whether a module is blind to a shift of its keys; what is missing here is not known yet.
        self.blind: dict[str, bool] = {name: True for name, bias in biases.items() if bias.projection is None}
        self._same: dict[str, Tensor] = {}  # whether keys are what their projection put out
        self._gaps: dict[str, Tensor] = {}  # [heads, d + 1]: sums over calls, and behind them how many

    @torch.no_grad()
    def look(self, record: QueryKey) -> None:
        """See whether its keys are just what their projection put out."""
        if record.name in self.biases and record.name not in self.blind:
            same = are_projected(record.key, record.key_output)
            self._same[record.name] = self._same[record.name] & same if record.name in self._same else same

    @torch.no_grad()
    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Gather the mean of the queries minus that of the keys, from [l, b, h, tokens, d]."""
        gaps = F.pad(_mean_token(query, query_mask) - _mean_token(key, key_mask), (0, 1), value=1.0)  # (l, h, d + 1)
        for name, gap in zip(names, gaps.unbind(), strict=True):
            if name in self.biases:
                self._gaps[name] = self._gaps[name] + gap if name in self._gaps else gap

    @torch.no_grad()
    def close(self, *, first: bool) -> None:
        """Shift the keys by what was gathered. Every process must call this together."""
        gaps, self._gaps = self._gaps, {}
        same, self._same = self._same, {}
        if not self.biases or not (gaps or _several()):
            return
        rows = {name: self._row(name, gaps.get(name), same.get(name)) for name in self.biases}
        if _several():
            device = next(iter(rows.values())).device
            flat = torch.cat([row.to(device) for row in rows.values()])
            dist.all_reduce(flat)
            rows = dict(zip(rows, flat.split([len(row) for row in rows.values()]), strict=True))
        for name, bias in self.biases.items():
            *shift, calls, objections = rows[name].split([len(rows[name]) - 2, 1, 1])
            if name not in self.blind and (name in same or _several()) and bool(calls > 0):
                self.blind[name] = not bool(objections > 0)
            if self.blind.get(name):
                by = torch.where(rows[name].isfinite().all() & (calls > 0), shift[0] / calls.clamp_min(1), 0.0)
                bias.shift(by if first else RATE * by)

    def _row(self, name: str, gap: Tensor | None, same: Tensor | None) -> Float[Tensor, " e"]:
        """What a process knows of a module: its gap a key head, how many calls, and 1 if it is not blind to shifts."""
        bias = self.biases[name]
        size = bias.size
        if gap is None:
            return torch.zeros(size + 2, device=bias.parameter.device)
        sums, calls = gap[:, :-1], gap[0, -1:]
        of_groups = sums.reshape(size // sums.shape[1], -1, sums.shape[1]).mean(1)  # queries that share a key head
        objection = torch.zeros_like(calls) if same is None else (~same).to(calls)[None]
        return torch.cat([of_groups.flatten(), calls, objection])


def _mean_token(tokens: Float[Tensor, "l b h n d"], mask: Bool[Tensor, "l b n"] | None) -> Float[Tensor, "l h d"]:
    """The mean of all valid tokens of all samples."""
    if mask is None:
        return tokens.mean((1, 3), dtype=torch.float32)
    total = tokens.masked_fill(~mask[:, :, None, :, None], 0.0).sum((1, 3), dtype=torch.float32)
    return total / mask.sum((1, 2)).clamp_min(1)[:, None, None]


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
