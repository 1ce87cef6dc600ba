"""How attention calls become the term of a loss: matched together when it is taken, or each when it is recorded.

Before either, the networks that a method learns are made and lie where queries and keys do, and it is settled who
looks on while these are matched.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from alignattn.adversary import Adversary
from alignattn.apart import apart
from alignattn.balance import Weight
from alignattn.capture import QueryKey, Site
from alignattn.capture.hook import in_backward
from alignattn.config import AlignmentConfig
from alignattn.delivery import Delivery
from alignattn.finite import FiniteCheck
from alignattn.matching.matcher import Matcher
from alignattn.objective import Objective, Parts, Watcher
from alignattn.passes import Matched
from alignattn.recentre import Recentring
from alignattn.stream import Stream, refuse_compiled_code
from alignattn.strength import Strength
from alignattn.traced import known_as, term_of


class Terms:
    """Makes them, by the one objective of an alignment."""

    def __init__(
        self, config: AlignmentConfig, matcher: Matcher, adversary: Adversary | None, strength: Strength
    ) -> None:
        self.config = config
        self.matcher = matcher
        self.adversary = adversary
        self.strength = strength
        met = strength.distances if config.until_met else None
        weighs_networks = adversary is None
        self.objective = Objective(matcher, config, weighs_networks=weighs_networks, finite=FiniteCheck(), met=met)
        self.stream = None if config.stream is None else Stream(self.objective)
        self.recentring: Recentring | None = None  # of the model that is attached
        self._name = known_as(self)  # to compiled code
        self.failed: Callable[[], None] | None = None  # called where a matching raised, in compiled code
        self.compiled = False  # code that calls the matching has been: it goes by the hooks that it was compiled with

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is another, to compiled code too."""
        self.__dict__.update(state)
        self._name = known_as(self)

    def match(self, record: QueryKey, *, first: bool) -> Matched:
        """With `stream`: a call, matched at once; `first` of all that its loss will be of."""
        assert self.stream is not None
        if torch.compiler.is_compiling():
            refuse_compiled_code()
        looks = self.strength.is_time_to_look()  # as the term will find it
        device = record.query.device
        with apart():
            if first:
                self._follow(device)
                self.objective.thinning.begin(self.strength.closed)
            self._ensure_networks([record.name], record.query.shape[-1], device)
            watchers = self._watchers([record], looks=looks)
        self.matcher.asked = looks
        return self.stream.match(record, watchers, self.strength.balance if looks else None)

    def of(self, forwards: list[list[Any]], weight: Weight) -> tuple[Tensor, Parts]:
        """The weighted term of all calls that were recorded, and each layer's part, detached."""
        return self._together(forwards, weight) if self.stream is None else self.stream.term(forwards, weight)

    def _together(self, forwards: list[list[QueryKey]], weight: Weight) -> tuple[Tensor, Parts]:
        device = forwards[0][0].query.device
        records = [record for some in forwards for record in some]
        self._follow(device)
        if torch.compiler.is_compiling():
            return self._by_operator(forwards, weight)
        for record in records:
            self._ensure_networks([record.name], record.query.shape[-1], device, among=forwards)
        strength = self.strength
        watchers = self._watchers(records, looks=strength.looks)
        self.matcher.asked = strength.looks
        balance = strength.balance if strength.looks else None
        self.objective.thinning.begin(strength.closed)
        every_layer = strength.looks or self.config.every == 1
        handed, values, parts = self.objective(forwards, weight, watchers, balance, every_layer=every_layer)
        return handed.term(weight, values), parts

    # --- in compiled code -------------------------------------------------------------------------------------------

    def _by_operator(self, forwards: list[list[QueryKey]], weight: Weight) -> tuple[Tensor, Parts]:
        known = self.matcher.rows
        if self.config.every != 1 or (self._has_networks and any(one not in known for one in self._layers(forwards))):
            # Which layers are drawn, and how wide an attention of one's own is, cannot be known before.
            return cast(tuple[Tensor, Parts], self._uncompiled(forwards, weight))
        weighs, generator = self.objective.weighs_networks, self.config.generator
        learnt = self.learnt(forwards)
        return term_of(self._name, forwards, weight, learnt, weighs_networks=weighs, generator=generator)

    @property
    def _has_networks(self) -> bool:
        return type(self.matcher).networks is not Matcher.networks

    @staticmethod
    def _layers(forwards: list[list[QueryKey]]) -> set[tuple[str, int]]:
        """As networks are kept for them."""
        return {(record.name, record.query.shape[-1]) for some in forwards for record in some}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _uncompiled(self, forwards: list[list[QueryKey]], weight: Weight) -> tuple[Tensor, Parts]:
        self.compiled = True
        self.strength.looks = self.strength.is_time_to_look()
        return self._together(forwards, weight)

    def learnt(self, forwards: list[list[QueryKey]]) -> list[Tensor]:
        """What networks of these layers learn, in an order that stays."""
        if not self._has_networks:  # nor is anything noted of layers before they are matched
            return list(self.matcher.parameters())
        banks = {f"banks.{self.matcher.rows[layer][0]}." for layer in self._layers(forwards)}
        named = self.matcher.named_parameters()
        return [one for name, one in named if not name.startswith("banks.") or any(map(name.startswith, banks))]

    def run(self, forwards: list[list[QueryKey]]) -> tuple[Tensor, Parts, float, Delivery]:
        """The operator runs: compiled code cannot read the clock, being compiled for one number of it; this can."""
        self.compiled = True
        records = [record for some in forwards for record in some]
        for record in records:  # what tracing noted about them is not written down yet
            self._ensure_networks([record.name], record.query.shape[-1], record.query.device, among=forwards)
        strength, objective = self.strength, self.objective
        strength.looks = strength.is_time_to_look()
        again = in_backward()  # which saves memory by computing things once more
        looks = strength.looks and not again
        self.matcher.asked = looks
        objective.thinning.begin(strength.closed, again=again)
        handed, values, parts = objective(forwards, 1.0, self._watchers(records, looks=looks))
        return values.sum(), parts, objective.scale(records, objective.shares([len(some) for some in forwards])), handed

    def _watchers(self, records: list[QueryKey], *, looks: bool) -> list[Watcher]:
        """What looks at queries and keys while they are matched."""
        watchers: list[Watcher] = []
        if looks:
            watchers.append(self.strength.distances)
            # With a weight of zero nothing at all is touched.
            if self.recentring is not None and self.config.weight != 0:
                for record in records:
                    self.recentring.look(record)
                watchers.append(self.recentring)
        return watchers

    # --- the networks -----------------------------------------------------------------------------------------------

    def make_networks_ahead(self, sites: list[Site], device: torch.device) -> None:
        """Where the widths of all heads are known; otherwise the first forward pass tells."""
        widths = {site.width for site in sites}
        if None not in widths:
            for width in sorted(w for w in widths if w is not None):
                self._ensure_networks([site.name for site in sites if site.width == width], width, device)

    def _ensure_networks(
        self, names: list[str], width: int, device: torch.device, among: list[list[QueryKey]] | None = None
    ) -> None:
        """Networks for these layers and, to lie in one bank with them, for others of the same width that have none."""
        if all((name, width) in self.matcher.rows for name in names):
            return
        if among is not None:
            names = [r.name for records in among for r in records if r.query.shape[-1] == width]
        if self.matcher.ensure(names, width, device) and self.adversary is not None:
            self.adversary.take_on()

    def _follow(self, device: torch.device) -> None:
        """The networks move to where queries and keys are."""
        if self.adversary is not None:
            self.adversary.follow(device)
        elif any(tensor.device != device for tensor in (*self.matcher.parameters(), *self.matcher.buffers())):
            self.matcher.to(device)  # which older compilers cannot trace
