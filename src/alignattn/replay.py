"""A matching that is recorded once and replayed: one call of the device instead of hundreds.

A training step on an accelerator waits for Python more than for arithmetic, and a matching has as many small steps as
a model. CUDA records them, with the addresses they work on (a CUDA graph): queries and keys are copied to where the
record reads them, and one call computes losses and gradients.

A shape is recorded when it comes for the third time, at most MOST of them. Others are matched plainly, and so are
methods that ask the device how to go on. All records work in one stretch of memory, as large as the queries and keys of
the largest: gradients are written over them, and lent until the backward has handed them on. Whoever comes before that
is matched plainly too.
"""

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignattn.counted import Counted
from alignattn.devices import on_device
from alignattn.finite import largest_of, whole_layers
from alignattn.matching.at_once import differentiate
from alignattn.matching.matcher import Matcher
from alignattn.precision import times

BEFORE = 2  # plain matchings of a shape: what is set up or compiled for it on first use, is by then
MOST = 16  # records: of a shape there is one with figures for the logs, and one without
LONGEST_MEMORY = 1000  # shapes that were seen and not recorded
ALIGNED = 256  # bytes: where tensors may begin


Told = list[tuple[str, Tensor, int]]


class Lease:
    """Somebody still needs what a record has put out. Given back when it is dropped."""


@dataclass(frozen=True)
class InPlace:
    """Multiplies the gradients that a record puts out where they lie, in one call."""

    factor: Tensor  # where it is read
    play: Callable[[], Any]
    parts: tuple[Tensor, ...]  # the gradients, each by itself

    def multiply(self, by: Tensor) -> None:
        """With this number."""
        self.factor.copy_(by)
        self.play()


@dataclass(frozen=True)
class Replayed:
    """What came out, to be read before the next replay; gradients as long as the lease is held."""

    weighed: Tensor  # [l]: each call's part of the total
    finite: Tensor  # [l]
    told: Told  # figures for the logs
    of_query: Tensor | None
    of_key: Tensor | None
    of_networks: list[Tensor | None]
    of_both: Tensor | None  # [2 l, b, h, n, d]: of queries, then of keys, where both are of one shape
    lease: Lease
    in_place: InPlace | None = None  # of those of both


@dataclass
class _Record:
    inputs: "_Inputs"
    both: Tensor | None
    in_place: InPlace | None
    play: Callable[[], Any]
    put_out: tuple[Tensor, Tensor, Told, Tensor | None, Tensor | None, list[Tensor | None]]


class _Kind(NamedTuple):
    """Of queries or keys [b, h, n, d]: gradients go back as these lie in memory, which nobody has to change then."""

    shape: torch.Size
    dtype: torch.dtype
    by_tokens: bool  # the heads of a token lie beside each other

    def of(self, memory: Tensor, count: int) -> Tensor:
        """So many of the kind, in memory of that size."""
        samples, heads, tokens, width = self.shape
        if self.by_tokens:
            return memory.view(self.dtype).view(count, samples, tokens, heads, width).transpose(2, 3)
        return memory.view(self.dtype).view(count, *self.shape)


def _kind(tokens: Tensor) -> _Kind:
    by_tokens = not tokens.is_contiguous() and tokens.transpose(1, 2).is_contiguous()
    return _Kind(tokens.shape, tokens.dtype, by_tokens)


@dataclass
class _Inputs:
    """Where a record reads. Masks that all calls share are read as one."""

    query: Tensor  # [l, b, h, n, d]
    key: Tensor
    query_mask: Tensor | None  # [l, b, n]
    key_mask: Tensor | None
    outer: Tensor  # [l, b, h]: what problems count in the value
    acting: Tensor  # [l, b, h]: and in the gradient
    counted: Counted | None = None  # which of them stand there

    @functools.cached_property
    def calls(self) -> list[Tensor]:
        """The queries of each call, then the keys."""
        return [*self.query.unbind(), *self.key.unbind()]


Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], Any], Any]]
Show = Callable[[Tensor, Tensor], None]  # is given all queries and keys, before they are written over


class Pool:
    """Memory that records work in. Those that share it are played one after the other."""

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:
        """CUDA's name for it."""
        self._handle = torch.cuda.graph_pool_handle() if self._handle is None else self._handle
        return self._handle


class Replays:
    """The records of one matcher. `recorder` is given some work and gives what does it again, and what it puts out."""

    def __init__(self, matcher: Matcher, recorder: Recorder | None = None, pool: Pool | None = None) -> None:
        self._matcher = matcher
        self._recorder = recorder
        self._pool = pool or Pool()
        self._seen: Counter[Any] = Counter()
        self._weights: Any = None  # where the matcher's lie
        self._known: tuple[Any, str] = None, ""  # its settings
        self._records: dict[Any, _Record] = {}
        self._memory: Tensor | None = None
        self._lent: weakref.ref[Lease] | None = None
        self.refused, self.reason = False, ""  # recording failed: there is no second try

    def serve(self, tensor: Tensor) -> bool:
        """Whether anything of this kind is recorded at all."""
        if self.refused or not self._matcher.is_replayable():
            return False
        if self._recorder is not None:
            return True
        return tensor.is_cuda and torch.version.cuda is not None and not torch.cuda.is_current_stream_capturing()

    def match(
        self,
        queries: list[Tensor],
        keys: list[Tensor],
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        names: list[str],
        counted: Counted,
        show: Show,
        *,
        of_query: bool,
        of_key: bool,
        records: bool = True,
    ) -> Replayed | None:
        """The matching of these calls, all of one shape; None where it is to be done plainly.

        `records`: what comes often may be recorded now; else only what is recorded already is played.
        """
        alike, matcher = key_mask is query_mask, self._matcher
        weights = tuple((p.data_ptr(), p.requires_grad) for p in matcher.learnt())
        # Records of weights that lie elsewhere now are of no use, and shapes that come once are not counted for ever.
        if weights != self._weights or len(self._seen) > LONGEST_MEMORY:
            self.forget()
            self._seen.clear()
            self._weights = weights
        what = (
            tuple(names), *map(_kind, (queries[0], keys[0])), queries[0].device,
            _layout(query_mask), _layout(key_mask), alike, of_query, of_key,
            matcher.asked, matcher.training, self._settings(),
            torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        if self._lent is not None and self._lent() is not None:
            return None
        if what not in self._records:
            if not records:
                return None
            self._seen[what] += 1
            if self._seen[what] <= BEFORE or len(self._records) >= MOST:
                return None
        with torch.no_grad(), on_device(queries[0].device):
            record = self._records.get(what)
            if record is None:
                given = (queries, keys, query_mask, key_mask, counted.in_total(), counted.in_gradient())
                record = self._recorded(given, names, alike=alike, of_query=of_query, of_key=of_key)
                if record is None:
                    return None
                self._records[what] = record
            inputs = record.inputs
            torch._foreach_copy_(inputs.calls, [*queries, *keys])
            _copy_mask(inputs.query_mask, query_mask)
            if not alike:
                _copy_mask(inputs.key_mask, key_mask)
            if inputs.counted is None or not counted.is_known_as(inputs.counted):
                inputs.outer.copy_(counted.in_total())
                inputs.acting.copy_(counted.in_gradient())
                inputs.counted = counted
            show(inputs.query, inputs.key)
            record.play()
        lease = Lease()
        self._lent = weakref.ref(lease)
        wanted = of_query and of_key and record.put_out[3] is not None and record.put_out[4] is not None
        both = (record.both, lease, record.in_place) if wanted else (None, lease)
        return Replayed(*record.put_out, *both)

    def _settings(self) -> str:
        """In words, which are made once."""
        config = self._matcher.config
        if config is not self._known[0]:
            self._known = config, repr(config)
        return self._known[1]

    def _recorded(self, given: Any, names: list[str], *, alike: bool, of_query: bool, of_key: bool) -> _Record | None:
        queries, keys, query_mask, key_mask, outer, acting = given
        kinds, count = [_kind(side[0]) for side in (queries, keys)], len(queries)
        both = None
        if kinds[0] == kinds[1]:
            (both,) = self._carved([(2 * count, kinds[0])], keys[0].device)
            places = [both[:count], both[count:]]
        else:
            places = self._carved([(count, kind) for kind in kinds], keys[0].device)
        masks = [_like_mask(query_mask), _like_mask(key_mask)]
        masks[1] = masks[0] if alike else masks[1]
        inputs = _Inputs(places[0], places[1], masks[0], masks[1], outer.clone(), acting.clone())
        matcher = self._matcher

        def work() -> Any:
            before = matcher.taken_back()
            found = differentiate(
                matcher, inputs.query, inputs.key, inputs.query_mask, inputs.key_mask, names, inputs.acting,
                of_query=of_query, of_key=of_key, in_place=True, look=largest_of,
            )  # fmt: skip
            weighed = (found.losses * inputs.outer.to(found.losses)).sum((1, 2))
            told = matcher.taken_back(instead=before)
            finite = whole_layers(found.witness)
            return weighed, finite, told, found.query, found.key, found.networks

        try:
            torch._foreach_copy_(inputs.calls, [*queries, *keys])  # something to work on
            work()  # kernels that are compiled on first use cannot be while they are recorded
            play, put_out = self._record(work)
            in_place = None if both is None else self._multiplied(both)
        except RuntimeError as error:  # something asked the device, or there is no memory for it
            self.refused, self.reason = True, str(error)
            self.forget()
            return None
        return _Record(inputs, both, in_place, play, put_out)

    def _multiplied(self, both: Tensor) -> InPlace:
        factor = torch.ones((), device=both.device, dtype=torch.promote_types(both.dtype, torch.float32))

        def work() -> tuple[()]:
            times(both, factor, both)
            return ()

        work()  # which is compiled on first use
        play, _ = self._record(work)
        return InPlace(factor, play, both.unbind())

    def _carved(self, wanted: list[tuple[int, "_Kind"]], device: torch.device) -> list[Tensor]:
        """So many of a kind in the one stretch of memory. If they need a larger one, those of the old are given up."""
        sizes = [count * kind.shape.numel() * kind.dtype.itemsize for count, kind in wanted]
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // ALIGNED) * ALIGNED)
        if self._memory is None or self._memory.numel() < starts[-1] or self._memory.device != device:
            self.forget()
            self._memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        memory = self._memory
        return [
            kind.of(memory[start : start + size], count)
            for start, size, (count, kind) in zip(starts[:-1], sizes, wanted, strict=True)
        ]

    def _record(self, work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        if self._recorder is not None:
            return self._recorder(work)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, a data loader's for one, may go on as they like.
            with torch.cuda.graph(graph, pool=self._pool.handle(), capture_error_mode="thread_local"):
                put_out = work()
        except RuntimeError:
            # Torch leaves its random numbers in the state of one who records, and takes them back at the next end.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device=torch.cuda.current_device())
            raise
        return graph.replay, put_out

    def forget(self) -> None:
        """Leave no record and no memory behind."""
        self._records.clear()
        self._memory = None


def _layout(mask: Tensor | None) -> int | None:
    """Whether there is a mask, and whether all calls share it."""
    return None if mask is None else mask.stride(0)


def _like_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    return mask[:1].clone().expand(mask.shape) if mask.stride(0) == 0 else mask.clone()


def _copy_mask(to: Tensor | None, mask: Tensor | None) -> None:
    if to is None or mask is None:
        return
    if to.stride(0) == 0:
        to[0].copy_(mask[0])
    else:
        to.copy_(mask)
