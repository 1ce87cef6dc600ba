"""Trains the models of many seeds as one: a graph network is too small to fill an accelerator alone.

Seeds know nothing of each other. Their losses are added, so the weights of each get their own gradient; Adam works
number by number; first weights, dropout and drawn nodes come from generators of each seed; and what is recorded of a
layer carries the seed in its name, so that every seed has networks of its own to be matched by. So seeds that early
stopping has ended can leave while others go on. A weight that is chosen while training ("auto") looks at all gradients
together: such runs are trained one by one.
"""

import time
import zlib
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from alignattn.alignment import Alignment
from alignattn.errors import NonFiniteError
from alignattn.experiments.course import Course
from alignattn.experiments.early import EarlyStopping
from alignattn.experiments.tasks.task import SeedsAtOnce, Watch

ASKED = 10  # after so many epochs it is asked which seeds are over: on an accelerator, to ask is to wait
STAY = 2 / 3  # as long as more of the seeds than this go on, all stay: what was recorded is recorded again without them
LOOKS = 50  # at losses, over a run


class Fitted:
    """Models of all seeds at the epochs that were kept, in eval mode, and how each training went."""

    def __init__(self, models: nn.Module, courses: list[Course]) -> None:
        self.models, self.courses = models, courses


class SeededAlignment:
    """An Alignment that takes the layers of each seed for layers of their own.

    `most`: so many nodes are matched, drawn anew in each epoch, the same for queries and keys, each seed's by itself.
    """

    def __init__(
        self,
        alignment: Alignment,
        seeds: Sequence[int],
        device: torch.device,
        most: int | None,
        edges: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.alignment, self.seeds, self.most = alignment, tuple(seeds), most
        self.edges = edges if most is None else None  # they are of all nodes
        self.chances = [torch.Generator(device).manual_seed(zlib.crc32(f"nodes of {seed}".encode())) for seed in seeds]

    def watch(self, layer: str, query: Tensor, key: Tensor) -> None:
        """Queries and keys of one layer of all seeds."""
        if self.most is not None and query.shape[2] > self.most:
            chances = torch.empty(len(self.seeds), query.shape[2], device=query.device)
            for own, generator in zip(chances, self.chances, strict=True):
                own.uniform_(generator=generator)
            index = chances.topk(self.most, dim=1).indices.sort(1).values[:, None, :, None]
            query, key = query.take_along_dim(index, 2), key.take_along_dim(index, 2)
        if len(self.seeds) == 1:  # not a view of them: "auto" looks at the task's gradient of what is recorded
            self.alignment.record(query, key, name=_name(layer, self.seeds[0]), edges=self.edges)
            return
        for seed, own_query, own_key in zip(self.seeds, query.unbind(), key.unbind(), strict=True):
            self.alignment.record(own_query[None], own_key[None], name=_name(layer, seed), edges=self.edges)

    def loss(self) -> Tensor:
        """The sum of all seeds' terms."""
        # The term is a mean over all layers that were recorded, or a sum: each seed is to get that of its own layers.
        factor = len(self.seeds) if self.alignment.config.reduction == "mean" else 1
        return factor * self.alignment.loss()

    def keep_only(self, places: Sequence[int]) -> None:
        """Only seeds at these places go on."""
        self.seeds = tuple(self.seeds[place] for place in places)
        self.chances = [self.chances[place] for place in places]

    def terms(self) -> list[Tensor]:
        """The last term of each seed, weighted."""
        config, parts = self.alignment.config, self.alignment.parts
        weight = self.alignment.meter.read().get("alignment_weight", 0.0)
        terms = []
        for seed in self.seeds:
            own = torch.stack([part for name, part in parts.items() if name.endswith(_name("", seed))])
            terms.append(weight * (own.mean() if config.reduction == "mean" else own.sum()))
        return terms


class Running:
    """The seeds that are still trained: their models, what trains them, and where among all seeds they stand."""

    def __init__(self, task: SeedsAtOnce, seeds: Sequence[int], alignment: Alignment | None, most: int | None) -> None:
        self.task, self.places = task, list(range(len(seeds)))
        self.models = task.make_models(seeds).train()
        self.aligned = None if alignment is None else SeededAlignment(alignment, seeds, task.device, most, task.edges)
        # Adam's weight decay is the gradient of an L2 penalty, as GAT has it; AdamW's is not.
        self.optimizer = torch.optim.Adam(
            self.models.parameters(), lr=task.train.rate, weight_decay=task.train.l2, fused=task.device.type == "cuda"
        )
        self.best = [parameter.detach().clone() for parameter in self.models.parameters()]  # of all seeds

    def step(self) -> Tensor:
        """One epoch: the task's losses."""
        watch: Watch | None = None if self.aligned is None else self.aligned.watch
        losses = self.task.losses(self.models, watch)
        total = losses.sum() if self.aligned is None else losses.sum() + self.aligned.loss()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        self.optimizer.step()
        return losses.detach()

    @torch.no_grad()
    def look(self, epoch: int, stopping: EarlyStopping) -> None:
        """Validate, and keep the weights of seeds that were never better."""
        told = self.task.validate(self.models.eval())
        self.models.train()
        places = torch.tensor(self.places, device=self.task.device)
        loss, accuracy = (one.new_zeros(len(stopping.over)).index_copy_(0, places, one) for one in told)
        keep = stopping.look(epoch, loss, accuracy)[places]
        for kept, parameter in zip(self.best, self.models.parameters(), strict=True):
            better = keep.view(-1, *(1,) * (parameter.ndim - 1))
            kept.index_copy_(0, places, torch.where(better, parameter, kept[places]))

    def dismiss(self, over: list[bool]) -> None:
        """Seeds that are over are trained no longer, if they are enough to be worth it."""
        here = [at for at, place in enumerate(self.places) if not over[place]]
        if not 0 < len(here) <= STAY * len(self.places):
            return
        self.optimizer.zero_grad(set_to_none=True)
        self.task.keep_only(self.models, here)
        for state in self.optimizer.state.values():
            state.update({name: value[here] for name, value in state.items() if value.ndim})  # all but Adam's count
        if self.aligned is not None:
            self.aligned.keep_only(here)
        self.places = [self.places[at] for at in here]


def fit(
    task: SeedsAtOnce,
    seeds: Sequence[int],
    alignment: Alignment | None,
    progress: Any,
    *,
    most: int | None = None,
    limit: int | None = None,
) -> Fitted:
    """Train until early stopping has ended every seed, or the epochs have. Progress is told steps of all seeds."""
    settings = task.train
    running = Running(task, seeds, alignment, most)
    stopping = EarlyStopping(len(seeds), settings.patience, task.device)
    last = settings.steps if limit is None else min(settings.steps, limit)
    every = max(1, last // LOOKS)
    courses, laps = [Course() for _ in seeds], []
    start = lap = time.perf_counter()
    looked = 0
    for epoch in range(1, last + 1):
        losses = running.step()
        running.look(epoch, stopping)
        over = stopping.over.tolist() if epoch % ASKED == 0 else [False]
        ends = epoch == last or all(over)
        if epoch % every == 0 or ends:
            _note(courses, seeds, epoch, losses, running, stopping)
            now = time.perf_counter()
            laps.append((now - lap) / (epoch - looked) / len(seeds))
            progress((epoch - looked) * len(seeds))
            lap, looked = now, epoch
        if ends:
            break
        if epoch % ASKED == 0:
            running.dismiss(over)
    progress((last - looked) * len(seeds))  # those that early stopping has spared
    _close(courses, stopping, laps[1:] or laps, time.perf_counter() - start)
    models = task.make_models(seeds)
    with torch.no_grad():
        for kept, parameter in zip(running.best, models.parameters(), strict=True):
            parameter.copy_(kept)
    return Fitted(models.eval(), courses)


def _note(
    courses: list[Course],
    seeds: Sequence[int],
    epoch: int,
    losses: Tensor,
    running: Running,
    stopping: EarlyStopping,
) -> None:
    """Losses into the curves of seeds that are not over; NaN in one of them is an error that names it."""
    own, aligned = losses.double(), running.aligned
    terms = torch.zeros_like(own) if aligned is None else torch.stack(aligned.terms()).to(own)
    trained_now = (stopping.epochs == epoch).tolist()
    for place, loss, term in zip(running.places, own.tolist(), terms.tolist(), strict=True):
        if not trained_now[place]:
            continue
        for name, value in (("the task's loss", loss), ("the alignment term", term)):
            if value - value != 0:
                raise NonFiniteError(f"At step {epoch} {name} of seed {seeds[place]} is {value}.")
        courses[place].curve.append((epoch, loss, term))


def _close(courses: list[Course], stopping: EarlyStopping, laps: list[float], seconds: float) -> None:
    """What early stopping did; times are each seed's share of what all took together."""
    kept, epochs = stopping.kept.tolist(), stopping.epochs.tolist()
    accuracy, over = stopping.most_accurate.tolist(), stopping.over.tolist()
    for place, course in enumerate(courses):
        course.seconds, course.step_seconds = seconds / len(courses), median(laps)
        course.told = {
            "stopping": {
                "epochs": epochs[place],
                "kept": kept[place],
                "stopped": over[place],  # else the epochs were at their end
                "best_validation_accuracy": round(100 * accuracy[place], 4),
                "seeds_together": len(courses),
            }
        }


def _name(layer: str, seed: int) -> str:
    return f"{layer}/seed {seed}"
