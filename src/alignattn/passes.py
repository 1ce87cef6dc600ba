"""Forward passes whose attention was recorded and whose loss is still to be taken."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from alignattn.capture import QueryKey
from alignattn.capture.standin import is_kept_for_backward
from alignattn.errors import CaptureError

MOST_PASSES = 64  # that may wait for one loss(): more are surely forgotten, and hold the memory of their graphs
MOST_CALLS = 4096  # that record() takes for one pass


HOSTS = (
    "A Trainer whose loss is not the model's (label smoothing, compute_loss_func, sentence-transformers, TRL): use "
    "alignattn.integrations.trainer.AlignmentTrainer or its mixin, or compute_loss_func=alignment.loss_function(...)."
)


class Mark:
    """Set when gradients have gone through a pass. It knows nothing of the pass: its hook would keep that alive."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self, _: Any) -> None:
        self.set = True


@dataclass(frozen=True)
class Matched:
    """An attention call that was matched when it was recorded: its queries and keys are gone (stream.py)."""

    name: str
    call: int
    samples: int
    losses: Tensor  # [b], or one for each packed document
    layer: Any  # what its backward needs to know
    behind: torch.autograd.graph.Node | None  # the queries in the graph, which holds nothing of their numbers
    sample_weight: Tensor | None = None  # [b], as QueryKey's

    def watch_backward(self, mark: Callable[[Any], None]) -> bool:
        """Call `mark` when a gradient comes to where the queries were; False where none will."""
        if self.behind is not None:
            self.behind.register_prehook(mark)
        return self.behind is not None


Record = QueryKey | Matched


@dataclass
class Pass:
    """The attention calls of one forward pass."""

    records: list[Record] = field(default_factory=list)
    mark: Mark | None = None

    def watch_backward(self) -> None:
        """Know when gradients go through these queries and keys; in compiled code autograd does not tell."""
        mark = Mark()
        if not torch.compiler.is_compiling() and any(record.watch_backward(mark) for record in reversed(self.records)):
            self.mark = mark

    @property
    def passed_backward(self) -> bool:
        return self.mark is not None and self.mark.set


class Passes:
    """Those that wait, and the one that is being recorded."""

    def __init__(self) -> None:
        self.waiting: list[Pass] = []
        self.recording: Pass | None = None
        self._share: Callable[[int], Tensor] | None = None  # weighs the samples of the pass that is being recorded
        self._weights: dict[int, Tensor] = {}
        self.handed_out: list[tuple[Mark, Mark]] = []  # of terms since the last update: of queries, and of the term

    def __bool__(self) -> bool:
        return any(one.records for one in self.waiting)

    def begin(self) -> None:
        """Another pass begins: none before it may have been forgotten."""
        self.recording = None  # one that failed half way may have left something
        self._share, self._weights = None, {}
        self._check_waiting()
        if len(self.waiting) >= MOST_PASSES:
            self.waiting.clear()
            raise CaptureError(
                f"{MOST_PASSES} training forwards have run and nobody took their alignment term. Add "
                "alignment.loss() to the loss, or run forwards that are not trained on under torch.no_grad()."
            )

    def _check_waiting(self) -> None:
        """Gradients that went through a pass must have gone through its term."""
        if any(one.passed_backward for one in self.waiting):
            self.waiting.clear()
            raise CaptureError(
                "The alignment term of the last training forward was never used, though its gradients were computed. "
                "Only a transformers model that is given labels adds it to its loss by itself. Add alignment.loss() "
                f"to the loss you call backward() on. {HOSTS}"
            )

    def settle(self) -> None:
        """The model has been updated: no term may have been forgotten."""
        self._check_waiting()
        handed_out, self.handed_out = self.handed_out, []
        if any(passed.set and not term.set for passed, term in handed_out):
            raise CaptureError(
                "The loss that the model returned, with the alignment term in it, was not used: gradients went through "
                "the model and none through the term. Who computes a loss of his own from the model's outputs, as TRL "
                f"does, must add the term himself: align(..., add_to_outputs=False). {HOSTS}"
            )

    def hand_out(self, done: Pass, term: Tensor) -> None:
        """The term of a pass has become part of a loss; see that it is used."""
        done.watch_backward()
        if done.mark is not None and term.requires_grad:
            mark = Mark()
            term.register_hook(mark)
            self.handed_out.append((done.mark, mark))
            del self.handed_out[:-MOST_PASSES]  # without updates nobody asks

    @property
    def are_none(self) -> bool:
        """Whether the next call is the first that the next loss is of."""
        return not self and self.recording is None

    def add(self, record: Record) -> None:
        """A call of the pass that is being recorded."""
        if self.recording is None:
            self.recording = Pass()
        self.recording.records.append(record if self._share is None else self._weighed(record, self._share))

    def end(self) -> Pass | None:
        """The pass is over and waits; None if nothing of it was recorded."""
        done, self.recording = self.recording, None
        if done is not None:
            self.waiting.append(done)
        return done

    def abandon(self) -> None:
        """The pass raised: what it recorded is no part of any loss."""
        self.recording = None

    # An attention of one's own tells of its calls, and not where passes begin and end.

    def numbered(
        self,
        query: Tensor,
        key: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        name: str | None,
        edges: tuple[Tensor, Tensor] | None = None,
    ) -> QueryKey:
        """The record of such a call: how often its layer was called before, in the pass that is being recorded."""
        records = [] if self.recording is None else self.recording.records
        name = f"record.{len(records)}" if name is None else name
        call = sum(record.name == name for record in records)
        return QueryKey(query, key, *masks, name=name, call=call, kept=is_kept_for_backward(), edges=edges)

    def begins(self, record: Record) -> bool:
        """Whether the call must be of another pass: its layer was called before, and others since."""
        if self.recording is None or self.recording.passed_backward:
            return True
        records = self.recording.records
        return len(records) >= MOST_CALLS or (record.call > 0 and records[-1].name != record.name)

    def add_first(self, record: Record) -> None:
        """The first call of a pass that waits from now on, and is added to."""
        self.recording = Pass([replace(record, call=0)])
        self.recording.watch_backward()
        self.waiting.append(self.recording)

    def weigh_next(self, share: Callable[[int], Tensor]) -> None:
        """Give the samples of the pass that begins their weights; `share` makes those of so many samples."""
        self._share = share

    def weigh(self, share: Callable[[int], Tensor]) -> None:
        """The same, of passes that wait and have none yet."""
        self._weights = {}
        for one in self.waiting:
            one.records = [self._weighed(record, share) for record in one.records]

    def _weighed(self, record: Record, share: Callable[[int], Tensor]) -> Record:
        if record.sample_weight is not None:
            return record
        if record.samples not in self._weights:
            self._weights[record.samples] = share(record.samples)
        return replace(record, sample_weight=self._weights[record.samples])

    def are_weighed(self) -> bool:
        """Whether the samples of those that wait have their weights."""
        return any(record.sample_weight is not None for one in self.waiting for record in one.records)

    def take(self) -> list[list[Any]]:
        """The records of all that waited; none do any more."""
        taken = [one.records for one in self.waiting if one.records]
        self.waiting.clear()
        self.recording = None
        return taken

    def clear(self) -> None:
        """Forget all."""
        self.take()
        self.handed_out.clear()
