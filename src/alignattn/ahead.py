"""Matching beside the forward that it is of.

An accelerator that computes a forward pass waits for Python more than half of the time. So what is recorded of the
first layers is matched while later ones are still to come, on a stream of its own, and the loss finds it done.

What the next loss will be of is known from the last one: the same calls, in the same order, of the same shapes, each
part by a record (replay.py). Where it comes otherwise, what was matched ahead is left, and all is matched as ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from alignattn.apart import apart
from alignattn.capture import QueryKey

Found = TypeVar("Found")


@dataclass(frozen=True)
class Plan:
    """How a loss is put together."""

    kinds: list[Any]  # of its calls
    parts: list[list[int]]  # which of them are matched together
    shares: list[float]  # what each counts
    scale: float  # of gradients

    @classmethod
    def of(cls, records: list[QueryKey], parts: list[list[int]], shares: list[float], scale: float) -> "Plan":
        """As these were put together."""
        return cls([_kind(record) for record in records], parts, shares, scale)


class Ahead(Generic[Found]):
    """Has `match` match a part of the next loss as soon as all its calls are recorded."""

    def __init__(self, match: Callable[[int, list[QueryKey], Plan], Found | None]) -> None:
        self._match = match
        self._plan: Plan | None = None
        self._fits = True  # what was recorded, so far
        self._found: dict[int, tuple[list[QueryKey], Found]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def expects(self) -> bool:
        """Whether anything of a loss to come is known."""
        return self._plan is not None and self._fits

    def begin(self) -> None:
        """Another forward begins."""
        self._fits = True
        self._found.clear()

    def learn(self, plan: Plan | None) -> None:
        """How the last loss was put together; None: in a way that is not to be done ahead."""
        self._plan = plan

    def notice(self, records: list[QueryKey]) -> None:
        """The last of these has just been recorded."""
        plan, count = self._plan, len(records)
        if plan is None or not self._fits:
            return
        self._fits = count <= len(plan.kinds) and _kind(records[-1]) == plan.kinds[count - 1]
        for number, places in enumerate(plan.parts if self._fits else ()):
            if places[-1] == count - 1:
                some = [records[place] for place in places]
                with self._beside(some[0].query):
                    found = self._match(number, some, plan)
                if found is not None:
                    self._found[number] = some, found

    def take(
        self, records: list[QueryKey], parts: list[list[int]], shares: list[float], scale: float
    ) -> dict[int, Found]:
        """What was matched ahead of this loss, by the number of the part."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        found, self._found = self._found, {}
        plan = self._plan
        if plan is None or (plan.parts, plan.shares, plan.scale) != (parts, shares, scale):
            return {}
        return {
            number: result
            for number, (some, result) in found.items()
            if all(records[place] is record for place, record in zip(plan.parts[number], some, strict=True))
        }

    @contextmanager
    def _beside(self, tokens: Tensor) -> Iterator[None]:
        """On a stream of its own, which waits for what was asked of the current one so far."""
        with apart(), torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            if not tokens.is_cuda:
                yield
                return
            if tokens.device not in self._streams:
                self._streams[tokens.device] = torch.cuda.Stream(tokens.device)
            stream = self._streams[tokens.device]
            stream.wait_stream(torch.cuda.current_stream(tokens.device))
            with torch.cuda.stream(stream):
                yield


def _kind(record: QueryKey) -> tuple[Any, ...]:
    """All that decides how a call is matched, but its numbers."""
    query, key = record.query, record.key
    return (
        record.name, record.call, query.shape, key.shape, query.dtype, key.dtype, query.device,
        query.requires_grad, key.requires_grad, record.query_mask is None, record.key_mask is None,
        record.sample_weight is None, record.segments is None, record.kept,
    )  # fmt: skip
