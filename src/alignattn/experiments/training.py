"""One run, from its settings to its result: trains a model with one kind of attention and measures it.

Soft and aligned runs of one seed start from the same weights, see the same batches and draw the same dropout, since
alignment leaves torch's global generator alone: their difference is alignment's doing.
"""

import functools
import itertools
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from alignattn import provenance
from alignattn.alignment import Alignment, align
from alignattn.coordinates import rebase
from alignattn.errors import ConfigError, NonFiniteError
from alignattn.experiments import seeds_at_once
from alignattn.experiments.course import Course
from alignattn.experiments.recipe import Run
from alignattn.experiments.tasks import TASKS, SeedsAtOnce, Task
from alignattn.results import Result
from alignattn.weights import Ramp

TELLING = 8  # batches tell how queries and keys are distributed before training
LOOKS = 50  # how often at most, over a run, losses are looked at and the time is taken
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int], object]  # is told how many steps were done since it was last called


def nobody(steps: int) -> None:
    """Progress that is told to nobody."""


@dataclass(frozen=True)
class Place:
    """Where a run happens."""

    data_dir: Path | None = None
    device: str = "auto"  # "auto": an accelerator if there is one; or "cpu", "cuda", "cuda:1"
    threads: int | None = None  # of torch on the CPU; None: as it is
    command: str = ""  # the command that asked for it

    def torch_device(self) -> torch.device:
        """The device."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"Unknown device {self.device!r}. Choose one of: auto, cpu, cuda, cuda:1.") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"Torch sees no accelerator here, and the device is {self.device!r}. Leave it at auto.")
        return device


def execute(run: Run, place: Place, inputs: Mapping[str, str], progress: Progress = nobody) -> Result:
    """Train and measure; an error becomes a result that tells it."""
    return execute_together([run], place, inputs, progress)[0]


def execute_together(
    runs: Sequence[Run], place: Place, inputs: Mapping[str, str], progress: Progress = nobody
) -> list[Result]:
    """The same for runs that differ in their seeds alone; where one of them fails, each is tried by itself."""
    done = 0

    def count(steps: int) -> None:
        nonlocal done
        done += steps
        progress(steps)

    outcomes: list[dict[str, Any]]
    try:
        memory = provenance.PeakMemory(place.torch_device())
        trained = train_together(runs, place, count)
        outcomes = [{**measure(one), "peak_memory": memory.read()} for one in trained]
    except Exception as error:  # noqa: BLE001  # one run's failure, whatever it is, must not cost the others
        if len(runs) > 1:
            progress(-done)
            return [execute(run, place, inputs, progress) for run in runs]
        outcomes = [{"error": _told(error)}]
    return [_result(run, place, inputs, **outcome) for run, outcome in zip(runs, outcomes, strict=True)]


def lost(run: Run, place: Place, inputs: Mapping[str, str], why: str) -> Result:
    """The result of a run whose process died."""
    return _result(run, place, inputs, error=provenance.anonymous(f"The process {why}."))


def _result(run: Run, place: Place, inputs: Mapping[str, str], **outcome: Any) -> Result:
    config = run.recipe.align.config(run.method, run.weight)
    try:
        device = place.torch_device()
    except ConfigError:  # it is not there, which is what the result tells
        device = torch.device("cpu")
    return provenance.documented(
        config,
        device,
        name=run.recipe.name,
        recipe=run.recipe.settings(),
        method=run.method,
        weight=run.weight,
        seed=run.seed,
        inputs=inputs,
        command=place.command,
        **outcome,
    )


@dataclass
class Trained:
    """A trained model, its task, and how the training went."""

    task: Task
    model: nn.Module
    course: Course


def train(run: Run, place: Place, progress: Progress = nobody, *, limit: int | None = None) -> Trained:
    """The training alone; the model comes back plain, in eval mode. `limit` ends it early, for a look at its pace."""
    return train_together([run], place, progress, limit=limit)[0]


def train_together(
    runs: Sequence[Run], place: Place, progress: Progress = nobody, *, limit: int | None = None
) -> list[Trained]:
    """The same for runs that differ in their seeds alone: as one model, where the task can do that."""
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    task = task_of(runs[0], place)
    if isinstance(task, SeedsAtOnce):
        return _seeds_at_once(runs, task, progress, limit)
    return [_alone(run, task, progress, limit) for run in runs]


def _seeds_at_once(runs: Sequence[Run], task: SeedsAtOnce, progress: Progress, limit: int | None) -> list[Trained]:
    run = runs[0]
    alignment, most = None, None
    if run.weight is not None:
        settings = run.recipe.align
        if settings.rebase:
            raise ConfigError("align.rebase is for attention that multiplies queries and keys; GAT's adds them up.")
        options = {**settings.options_for(run.method), "add_to_outputs": False}
        if not isinstance(run.weight, str):
            most = options.pop("max_tokens", None)  # drawn by each seed for itself
        alignment = Alignment(run.method, _weight(run, task), settings.preset, **options)
    fitted = seeds_at_once.fit(task, [one.seed for one in runs], alignment, progress, most=most, limit=limit)
    courses = enumerate(fitted.courses)
    return [Trained(task, task.only(fitted.models, place), course) for place, course in courses]


def _alone(run: Run, task: Task, progress: Progress, limit: int | None) -> Trained:
    torch.manual_seed(run.seed)
    model = task.make_model().train()
    if run.recipe.align.rebase and run.weight is not None:
        rebase(model, itertools.islice(task.batches(run.seed), TELLING), call=task.loss)
    alignment = _aligned(run, task, model)
    try:
        course = _loop(run, task, model, alignment, progress, limit)
    finally:
        if alignment is not None:
            alignment.detach()
    return Trained(task, model.eval(), course)


def measure(trained: Trained) -> dict[str, Any]:
    """The fields of a result that tell the outcome."""
    start = time.perf_counter()
    with torch.no_grad():
        measured = trained.task.evaluate(trained.model)
    return {
        "metrics": measured.metrics,
        "details": {**measured.details, **trained.course.details()},
        "times": {
            "train": round(trained.course.seconds, 4),
            "step": round(trained.course.step_seconds, 7),
            "evaluate": round(time.perf_counter() - start, 4),
        },
    }


def task_of(run: Run, place: Place) -> Task:
    """The task with its data read; the last few are kept, since runs of one recipe follow each other."""
    recipe = run.recipe
    return _task(recipe.task, recipe.data, recipe.model, recipe.train, place.data_dir, place.torch_device())


@functools.lru_cache(maxsize=4)
def _task(name: str, data: Any, model: Any, train: Any, data_dir: Path | None, device: torch.device) -> Task:
    return TASKS[name](data, model, train, data_dir=data_dir, device=device)


def _aligned(run: Run, task: Task, model: nn.Module) -> Alignment | None:
    settings = run.recipe.align
    if run.weight is None:
        return None
    options = {**settings.options_for(run.method), "add_to_outputs": False}
    return align(model, run.method, _weight(run, task), settings.preset, **options)


def _weight(run: Run, task: Task) -> float | str | Ramp | None:
    ramp = round(run.recipe.align.ramp * run.recipe.train.steps_for(task.samples))
    return Ramp(run.weight, ramp) if ramp and isinstance(run.weight, float) else run.weight


def _loop(
    run: Run, task: Task, model: nn.Module, alignment: Alignment | None, progress: Progress, limit: int | None
) -> Course:
    settings, device = run.recipe.train, task.device
    steps = settings.steps_for(task.samples)
    optimizer = torch.optim.AdamW(
        _decayed_apart(model, settings.weight_decay), lr=settings.rate, fused=device.type == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: settings.factor(step, steps))
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    batches = task.batches(run.seed)
    last = steps if limit is None else min(steps, limit)
    every = max(1, last // LOOKS)
    course, laps = Course(), []
    start = lap = time.perf_counter()
    for step in range(1, last + 1):
        with torch.autocast(device.type, DTYPES.get(settings.precision), enabled=settings.precision in DTYPES):
            loss = task.loss(model, next(batches))
            term = torch.zeros((), device=device) if alignment is None else alignment.loss()
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss + term).backward()
        if settings.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step % every == 0 or step == last:
            done = step - (course.curve[-1][0] if course.curve else 0)
            course.curve.append((step, *_finite(step, loss, term)))  # waits for the device: now is a true time
            now = time.perf_counter()
            if alignment is not None:
                course.tell(alignment.meter.read())
            laps.append((now - lap) / done)
            lap = now
            progress(done)
    steady = laps[1:] or laps  # the first lap has the warming up in it
    course.seconds, course.step_seconds = time.perf_counter() - start, median(steady)
    return course


def _decayed_apart(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups: weight decay is for matrices, not for biases and norms."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in learned if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in learned if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _finite(step: int, loss: Tensor, term: Tensor) -> tuple[float, float]:
    values = torch.stack([loss.detach().double(), term.detach().double()]).tolist()
    for name, value in zip(("the task's loss", "the alignment term"), values, strict=True):
        if not math.isfinite(value):
            raise NonFiniteError(f"At step {step} {name} is {value}.")
    return values[0], values[1]


def _told(error: Exception) -> str:
    """What happened and where, without the folders of this machine."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-4:]]
    return provenance.anonymous(f"{type(error).__name__}: {error}") + "\n  at " + " < ".join(reversed(where))
