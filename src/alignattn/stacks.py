"""Calls of one shape, to be matched together.

On an accelerator one call a layer was measured at two to three times a whole training step of soft attention: there
they are stacked. On a CPU, where calls cost little and memory much, they are not, if layers know nothing of each other.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignattn.capture import QueryKey
from alignattn.counted import Counted
from alignattn.matching.matcher import Edges, Matcher

PARTS, FEWEST = 3, 2  # into which the layers of a model are divided, and layers in one
# Numbers in the queries and keys of a call. Fewer are matched at once: a device is done with them before Python has
# come to the backward that waits for them, and to part them costs Python more than it hides.
LARGE = 2**23


@dataclass(frozen=True)
class Stack:
    """Records that are matched in one call."""

    places: list[int]
    queries: list[Tensor]  # l of [b, h, n, d]
    keys: list[Tensor]
    query_mask: Tensor | None  # [l, b, n]
    key_mask: Tensor | None
    names: list[str]
    counted: Counted
    edges: Edges | None = None  # of one record that is matched along them

    @property
    def query(self) -> Tensor:
        """Of all [l, b, h, n, d], copied together."""
        return _together(self.queries)

    @property
    def key(self) -> Tensor:
        return _together(self.keys)

    def wants(self) -> tuple[bool, bool]:
        """Whether queries, and whether keys, are to get a gradient."""
        return any(q.requires_grad for q in self.queries), any(k.requires_grad for k in self.keys)


def together(records: list[QueryKey], matcher: Matcher) -> list[list[int]]:
    """Which records are stacked."""
    groups: dict[Any, list[int]] = {}
    for place, record in enumerate(records):
        query, key = record.query, record.key
        alone = query.device.type == "cpu" or not record.kept  # each is let go before the next is matched
        if (alone and matcher.is_separable()) or matcher.follows_edges():  # edges may be others in each layer
            groups[place] = [place]
            continue
        bank = matcher.bank(record.name, query.shape[-1])
        given = record.query_mask is None, record.key_mask is None, record.sample_weight is None
        kind = (bank, query.shape, key.shape, query.dtype, key.dtype, query.device, given)
        groups.setdefault(kind, []).append(place)
    return [part for members in groups.values() for part in _parted(members, records[members[0]], matcher)]


def _parted(members: list[int], one: QueryKey, matcher: Matcher) -> list[list[int]]:
    """In parts that can be matched before the last of them is recorded (ahead.py).

    The last is the smallest: nothing is left to hide it behind.
    """
    if one.query.numel() + one.key.numel() < LARGE:
        return [members]
    if not (matcher.is_separable() and matcher.is_replayable()):
        return [members]
    last = len(members) - FEWEST
    size = max(FEWEST, -(-last // (PARTS - 1)))
    starts = [*range(0, last, size), last] if last >= FEWEST else [0]
    return [members[start:end] for start, end in zip(starts, [*starts[1:], len(members)], strict=True)]


def stacked(places: list[int], records: list[QueryKey], shares: list[float], *, over_heads: bool) -> Stack:
    """The records at these places. `shares`: what each counts in the total; `over_heads`: by the mean of its heads."""
    some = [records[place] for place in places]
    first = some[0].query
    samples, heads = first.shape[:2]
    counts = tuple(shares[place] / (heads if over_heads else 1) for place in places)
    weights = [r.sample_weight for r in some if r.sample_weight is not None]
    counted = Counted(counts, (len(some), samples, heads), first.device, weights or None)
    query_mask = _masks_together([r.query_mask for r in some])
    alike = all(r.key_mask is r.query_mask for r in some)
    key_mask = query_mask if alike else _masks_together([r.key_mask for r in some])
    sides = [r.query for r in some], [r.key for r in some]
    names = [r.name for r in some]
    return Stack(places, *sides, query_mask, key_mask, names, counted, some[0].edges)


def _together(tensors: list[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _masks_together(masks: list[Tensor | None]) -> Tensor | None:
    if masks[0] is None:
        return None
    if all(mask is masks[0] for mask in masks):
        return masks[0].expand(len(masks), *masks[0].shape)
    return torch.stack([mask for mask in masks if mask is not None])
