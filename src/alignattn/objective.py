"""From the records of some forward passes to one weighted term, and where its gradient goes.

Sum over samples / samples, then mean or sum over heads and over the calls of a forward pass, then the mean over passes.
The matching is differentiated at once (matching/at_once.py), on detached copies of queries and keys, and the backward
of the term hands on what is known by then (delivery.py): what the matching needed in memory is free again before the
model's own backward begins. In compiled code all this is one operator (traced.py).

Records are matched in stacks (stacks.py), each by one call, which is recorded and replayed where it can be (replay.py),
and while the forward still runs (ahead.py).
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from alignattn.ahead import Ahead, Plan
from alignattn.balance import Balance, Weight
from alignattn.capture import QueryKey
from alignattn.config import AlignmentConfig
from alignattn.counted import Counted
from alignattn.delivery import Delivery, Slice
from alignattn.distances import Distances
from alignattn.finite import FiniteCheck, largest_of, whole_layers
from alignattn.matching.at_once import added, differentiate
from alignattn.matching.matcher import Matcher
from alignattn.replay import InPlace, Lease, Pool, Recorder, Replays
from alignattn.stacks import Stack, stacked, together
from alignattn.thinning import Thinning

Forwards = list[list[QueryKey]]
Parts = dict[str, Tensor]
Watchers = Sequence["Watcher"]


class Watcher(Protocol):
    """Looks at queries and keys while they are stacked."""

    def watch(
        self, names: list[str], query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
    ) -> None:
        """Queries and keys [l, b, h, tokens, d] of the layers `names`, masks [l, b, tokens]."""


class Labelled(Protocol):
    """What the logs say of a call, and by how much its samples count."""

    @property
    def name(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def sample_weight(self) -> Tensor | None: ...


@dataclass(frozen=True)
class _Together:
    """What matching made of a stack."""

    values: Tensor  # [l]: each record's part of the total, to be read before the next replay
    of_query: Tensor | None  # [l, b, h, n, d]
    of_key: Tensor | None
    of_networks: list[Tensor | None]
    lease: Lease | None = None  # of the gradients, where they are lent
    finite: Tensor | None = None  # [l], if it was not told yet
    of_both: Tensor | None = None  # [2 l, b, h, n, d], where queries and keys lie in one stretch of memory
    ours: bool = True  # gradients lie in memory that was made for them
    in_place: InPlace | None = None  # what multiplies those of both

    def together(self) -> Slice:
        """The gradients of all queries, and then of all keys."""
        assert self.of_both is not None
        return Slice(self.of_both, 0, self.ours, self.lease is not None, self.in_place)

    def slices(self, at: int) -> tuple[Slice | None, Slice | None]:
        """The gradients of one record's queries and keys."""
        if self.of_both is not None:
            all_of_them = self.together()
            return all_of_them._replace(at=at), all_of_them._replace(at=len(self.of_both) // 2 + at)
        lent = self.lease is not None
        of_query, of_key = (None if w is None else Slice(w, at, self.ours, lent) for w in (self.of_query, self.of_key))
        return of_query, of_key


class Objective:
    """The alignment loss of all records, weighted.

    The weight acts on queries and keys. The networks get the gradient of the plain loss, unless they share the user's
    optimizer (`weighs_networks`): an adversary that learns slower while the weight is small falls behind. Heads that
    are left alone (`met`) leave the networks alone as well.
    """

    def __init__(
        self,
        matcher: Matcher,
        config: AlignmentConfig,
        *,
        weighs_networks: bool,
        finite: FiniteCheck,
        met: Distances | None = None,
    ) -> None:
        self.matcher = matcher
        self.config = config
        self.weighs_networks = weighs_networks
        self.finite = finite
        self.met = met  # tells which heads to leave alone; None: none
        self.recorder: Recorder | None = None  # CUDA's, if none is named
        self._replays: list[Replays] = []  # one for each stack of a loss: all of them are under way at once
        self._pool = Pool()
        self.ahead: Ahead[_Together] = Ahead(self._matched_ahead)
        self.thinning = Thinning(config.max_tokens, config.every, config.seed)
        self.counted = 1  # times, each layer that was matched: others were left out for it
        self.alone = True  # the term is not yet part of the task's loss

    def __call__(
        self,
        forwards: Forwards,
        weight: Weight,
        watchers: Watchers,
        balance: Balance | None = None,
        *,
        every_layer: bool = True,
    ) -> tuple[Delivery, Tensor, Parts]:
        """What is to be delivered to whom, values whose sum is the total without its weight, and each layer's part."""
        shares = self.shares([len(some) for some in forwards])
        records = [record for some in forwards for record in some]
        self.counted = 1
        if not every_layer:
            chosen, self.counted = self.thinning.layers([len(some) for some in forwards])
            records = [record for record, wanted in zip(records, chosen, strict=True) if wanted]
            shares = [share * self.counted for share, wanted in zip(shares, chosen, strict=True) if wanted]
        acts = not is_nothing(weight)  # else the model's own gradients are untouched to the last bit
        leaves = rows = records
        if not (acts and self._are_matched_whole(records)):
            leaves = [leaf(record, wanted=acts) for record in records]
            rows = [self.thinning.tokens(leaf.unpacked()) for leaf in leaves]
        scale = self.scale(leaves, shares)
        parts = together(rows, self.matcher)
        early = self.ahead.take(records, parts, shares, scale)
        went_as_planned = bool(early)
        factor = weight / scale
        handed = Delivery(alone=self.alone)
        found: list[_Together] = []
        for number, places in enumerate(parts):
            one = early.pop(number, None) or self._matched(number, self._stack(places, rows, shares), watchers, scale)
            found.append(one)
            self._hand(handed, one, places, (records, leaves, rows), weight, scale, factor, balance)
        told = [(places, one.finite) for places, one in zip(parts, found, strict=True) if one.finite is not None]
        if told:
            names = [rows[place].name for places, _ in told for place in places]
            self.finite.submit(names, _joined([finite for _, finite in told]))
        handed.leases += [one.lease for one in found if one.lease is not None]
        by_records = len(handed.leases) == len(found)
        if not went_as_planned and (by_records or balance is None):  # looks are recorded later than others
            alike = by_records and rows is records and len(forwards) == 1
            self.ahead.learn(self._plan(records, parts, shares, scale) if alike else None)
        values = _joined([one.values for one in found])
        of_networks_factor = factor if self.weighs_networks else 1.0 / scale
        for parameter, gradient in zip(self.matcher.learnt(), _of_all([one.of_networks for one in found]), strict=True):
            if gradient is not None:
                handed.to(parameter, gradient, of_networks_factor)
        order = [place for places in parts for place in places]
        alone = dict(zip(order, _without_shares(values, [shares[place] for place in order]), strict=True))
        return handed, values, parts_of(rows, [alone[place] for place in range(len(rows))])

    def _hand(
        self,
        handed: Delivery,
        one: _Together,
        places: list[int],
        forms: tuple[list[QueryKey], list[QueryKey], list[QueryKey]],
        weight: Weight,
        scale: float,
        factor: Weight,
        balance: Balance | None,
    ) -> None:
        """The calls at these places are to get their gradients: as recorded, apart from their graph, and unpacked."""
        records, leaves, rows = forms
        some = [records[place] for place in places]
        as_ever = leaves is records and self.config.generator == "model"
        if as_ever and one.of_both is not None and all(record.kept for record in some):
            handed.to_layers(some, one.together(), factor)
            if balance is not None:
                for at, record in enumerate(some):
                    handed.watch(record, *one.slices(at), weight, scale=scale, through=True, balance=balance)
            return
        for at, place in enumerate(places):
            own = one.slices(at)
            if leaves[place] is not records[place]:
                own = through_unpacking(leaves[place], rows[place], own)
            handed.to_tokens(
                records[place], *own, weight, scale=scale, factor=factor, generator=self.config.generator,
                balance=balance,
            )  # fmt: skip
            if not records[place].kept:
                for record in {id(r): r for r in (records[place], leaves[place], rows[place])}.values():
                    record.let_go()

    def forget_replays(self) -> None:
        """Give back what they hold in memory, and what matching works in."""
        self.matcher.scratch.give_back()
        self._replays.clear()
        self._pool = Pool()
        self.ahead = Ahead(self._matched_ahead)

    def _plan(self, records: list[QueryKey], parts: list[list[int]], shares: list[float], scale: float) -> Plan | None:
        """What the next loss will be of, if it is to be matched ahead."""
        several = len(parts) > 1 and self.config.every == 1
        return Plan.of(records, parts, shares, scale) if several and all(r.kept for r in records) else None

    def _matched_ahead(self, number: int, records: list[QueryKey], plan: Plan) -> _Together | None:
        shares = [plan.shares[place] for place in plan.parts[number]]
        stack = self._stack(list(range(len(records))), records, shares)
        self.matcher.asked = False  # what is looked at is not matched ahead
        # Nothing is recorded within a user's forward.
        return self._replayed(number, stack, (), plan.scale, records=False)

    def _matched(self, number: int, stack: Stack, watchers: Watchers, scale: float) -> _Together:
        found = self._replayed(number, stack, watchers, scale)
        return self._plainly(stack, watchers, scale) if found is None else found

    def _replayed(
        self, number: int, stack: Stack, watchers: Watchers, scale: float, *, records: bool = True
    ) -> _Together | None:
        """By a record of this matching, where there is one."""
        if len(self._replays) <= number:
            self._replays.append(Replays(self.matcher, self.recorder, self._pool))
        replays = self._replays[number]
        if not replays.serve(stack.queries[0]):
            return None
        of_query, of_key = stack.wants()
        found = replays.match(
            stack.queries,
            stack.keys,
            stack.query_mask,
            stack.key_mask,
            stack.names,
            self._counted(stack, scale),
            lambda query, key: self._show(stack, query, key, watchers),
            of_query=of_query,
            of_key=of_key,
            records=records,
        )
        if found is None:
            return None
        for name, value, count in found.told:
            self.matcher.tell(name, value.clone(), count)
        gradients = found.of_query, found.of_key, found.of_networks
        return _Together(found.weighed, *gradients, found.lease, found.finite, found.of_both, in_place=found.in_place)

    def _are_matched_whole(self, records: list[QueryKey]) -> bool:
        """Whether what is matched are their queries and keys as they are."""
        return self.config.max_tokens is None and all(record.segments is None for record in records)

    def _plainly(self, stack: Stack, watchers: Watchers, scale: float) -> _Together:
        with torch.no_grad():
            query, key = stack.query, stack.key
        self._show(stack, query, key, watchers)
        of_query, of_key = stack.wants()
        masks = stack.query_mask, stack.key_mask
        counted = self._counted(stack, scale)
        in_place = len(stack.places) > 1  # they were copied together, for us alone
        given = query, key, *masks, stack.names, counted.in_gradient()
        with self.matcher.along(stack.edges):
            found = differentiate(
                self.matcher, *given, of_query=of_query, of_key=of_key, in_place=in_place, look=largest_of
            )
        values = (found.losses * counted.in_total().to(found.losses)).sum((1, 2))
        finite = whole_layers(found.witness)
        return _Together(values, found.query, found.key, found.networks, finite=finite, ours=found.ours)

    def _counted(self, stack: Stack, scale: float) -> Counted:
        """What each problem counts, and by how much it acts."""
        counted = stack.counted
        return replace(counted, acting=self.acting(stack.names, counted.shape[2], counted.device), scale=scale)

    def acting(self, names: list[str], heads: int, device: torch.device) -> Tensor | None:
        """One for every head that is to be moved, zero for the others, [l, 1, h]; None: all are."""
        return None if self.met is None else self.met.acting(names, heads, device)

    def scale(self, records: list[QueryKey], shares: list[float]) -> float:
        """Brings a token's gradient to about one: on its way it may be in fp16, where 1e-7 is nothing."""
        tokens = sum(record.query.numel() // record.query.shape[-1] for record in records)
        heads = 1 if self.config.reduction == "mean" else records[0].query.shape[1]
        return 2.0 ** round(math.log2(tokens / (heads * sum(shares))))

    def shares(self, counts: list[int]) -> list[float]:
        """What each record counts in the total, `counts` of them in each forward pass."""
        mean = self.config.reduction == "mean"
        return [1 / len(counts) / (count if mean else 1) for count in counts for _ in range(count)]

    def _stack(self, places: list[int], records: list[QueryKey], shares: list[float]) -> Stack:
        return stacked(places, records, shares, over_heads=self.config.reduction == "mean")

    def _show(self, stack: Stack, query: Tensor, key: Tensor, watchers: Watchers) -> None:
        self.show(stack.names, query, key, stack.query_mask, stack.key_mask, watchers)

    def show(
        self,
        names: list[str],
        query: Tensor,
        key: Tensor,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        watchers: Watchers,
    ) -> None:
        """Let watchers look at what is matched."""
        masks = self.matcher.counted(query_mask), self.matcher.counted(key_mask)
        for watcher in watchers:
            watcher.watch(names, query.detach(), key.detach(), *masks)


def on_one_device(values: Sequence[Tensor], join: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Layers may be on several."""
    device = values[0].device
    return join([value if value.device == device else value.to(device) for value in values])


def _joined(values: list[Tensor]) -> Tensor:
    """Behind each other; one, as on a device that waits for Python all layers are, as it is."""
    return values[0] if len(values) == 1 else on_one_device(values, torch.cat)


def _of_all(parts: list[list[Tensor | None]]) -> Sequence[Tensor | None]:
    """The sum over all parts of each gradient; at once, where none is missing."""
    known = [[one for one in part if one is not None] for part in parts]
    if len(parts) == 1 or not known[0] or any(len(some) < len(parts[0]) for some in known):
        return [functools.reduce(added, some) for some in zip(*parts, strict=True)]
    return functools.reduce(lambda one, other: list(torch._foreach_add(one, other)), known)


def _without_shares(values: Tensor, shares: list[float]) -> list[Tensor]:
    """Each value over its share; in one division where all have the same."""
    if len(set(shares)) == 1:
        return list((values / shares[0]).unbind())
    return [value / share for value, share in zip(values.unbind(), shares, strict=True)]


def parts_of(records: Sequence[Labelled], values: list[Tensor]) -> Parts:
    """Each call's part by name; the mean where several passes have it."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for record, value in zip(records, values, strict=True):
        if record.sample_weight is not None:  # a part tells of this batch, whatever its share in the update is
            value = value / record.sample_weight.sum().clamp_min(torch.finfo(torch.float32).tiny)
        parts[label_of(record)].append(value)
    return {label: torch.stack(some).mean() if len(some) > 1 else some[0] for label, some in parts.items()}


def label_of(record: Labelled) -> str:
    """What logs call it."""
    return f"{record.name}#{record.call}" if record.call else record.name


def is_nothing(weight: Weight) -> bool:
    """Whether alignment is to leave no trace at all."""
    return isinstance(weight, float) and weight == 0


def leaf(record: QueryKey, *, wanted: bool) -> QueryKey:
    """Queries and keys apart from the graph that made them; packed ones are unpacked behind this."""
    sides = [side.detach().requires_grad_(wanted and side.requires_grad) for side in (record.query, record.key)]
    return replace(record, query=sides[0], key=sides[1])


def through_unpacking(
    leaf: QueryKey, row: QueryKey, gradients: tuple[Slice | None, ...]
) -> tuple[Slice | None, Slice | None]:
    """Gradients of documents as gradients of the rows they were packed in."""
    taken: list[Slice | None] = []
    for before, behind, gradient in zip((leaf.query, leaf.key), (row.query, row.key), gradients, strict=True):
        if gradient is not None and behind is not before and behind.requires_grad:
            (through,) = torch.autograd.grad(behind, before, gradient.alone())
            gradient = Slice(through[None], 0)
        taken.append(gradient if before.requires_grad else None)
    return taken[0], taken[1]
