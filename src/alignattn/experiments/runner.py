"""Runs a recipe: what is done already is skipped, what fails is told, and what is done is kept at once.

An executor takes runs and yields each with its result, in whatever order they end: one after another here, in
processes of one machine in pool.py, on a cluster in cluster.py. Result files are written here alone.
"""

import itertools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from alignattn.errors import DataError
from alignattn.experiments.recipe import Recipe, Run
from alignattn.experiments.tasks import TASKS, SeedsAtOnce
from alignattn.experiments.training import Place, Progress, execute, execute_together, task_of, train
from alignattn.results import Result, read, write

PROBE_STEPS = 8
SEEDS = 32  # in one model, at most

Executor = Callable[[Sequence[Run], Place, Mapping[str, str], Progress], Generator[tuple[Run, Result], None, None]]


def one_after_another(
    runs: Sequence[Run], place: Place, inputs: Mapping[str, str], progress: Progress
) -> Generator[tuple[Run, Result], None, None]:
    """The executor that needs nothing: this process. Seeds that one model can hold are trained at once."""
    for some in at_once(runs, place):
        if len(some) == 1:
            yield some[0], execute(some[0], place, inputs, progress)
        else:
            yield from zip(some, execute_together(some, place, inputs, progress), strict=True)


def at_once(runs: Sequence[Run], place: Place, most: int = SEEDS) -> list[list[Run]]:
    """The runs of a recipe, those together that are trained as one model: they differ in their seeds alone.

    On a CPU, which the model of one seed fills, each run stands alone. So does one whose weight is chosen by looking at
    gradients: it would look at those of all seeds.
    """
    if place.torch_device().type == "cpu" or not all(issubclass(TASKS[r.recipe.task], SeedsAtOnce) for r in runs):
        return [[run] for run in runs]
    alike: dict[object, list[Run]] = {}
    for run in runs:
        alone = run.seed if isinstance(run.weight, str) else None
        alike.setdefault((run.method, run.weight, alone), []).append(run)
    parts = [[some[i : i + most] for i in range(0, len(some), most)] for some in alike.values()]
    in_turn = itertools.zip_longest(*parts)  # every method has its first seeds before any has its next ones
    return [part for turn in in_turn for part in turn if part is not None]


@dataclass(frozen=True)
class Sweep:
    """All runs of a recipe, and where their results go."""

    recipe: Recipe
    place: Place
    out: Path
    inputs: Mapping[str, str]

    def file(self, run: Run) -> Path:
        """Of a run's result."""
        return self.out / run.file(self.inputs)

    def parted(self) -> tuple[list[Result], list[Run]]:
        """What is done and what is to do. Failed runs are run again, and broken files are written anew."""
        done, to_do = [], []
        for run in self.recipe.runs():
            try:
                result = read(self.file(run))
            except DataError:
                to_do.append(run)
                continue
            if result.failed:
                to_do.append(run)
            else:
                done.append(result)
        return done, to_do


@dataclass
class Outcome:
    """What a sweep came to."""

    finished: list[Result] = field(default_factory=list)
    before: int = 0  # how many of those were there already
    failed: list[Result] = field(default_factory=list)


def sweep(recipe: Recipe, place: Place, out: Path) -> Sweep:
    """A sweep over a recipe; names what is missing of data and model before anything is run."""
    return Sweep(recipe, place, out, TASKS[recipe.task].inputs(recipe.data, recipe.model, place.data_dir))


def carry_out(plan: Sweep, executor: Executor = one_after_another, *, quiet: bool = False) -> Outcome:
    """Run what is not finished, each result written as soon as it is there."""
    there, runs = plan.parted()
    outcome = Outcome(list(there), len(there))
    if not runs:
        return outcome
    steps = plan.recipe.train.steps_for(task_of(runs[0], plan.place).samples)
    with (
        tqdm(total=len(runs) * steps, unit="step", desc=plan.recipe.name, disable=quiet, smoothing=0.05) as bar,
        closing(executor(runs, plan.place, plan.inputs, bar.update)) as results,  # its workers end with it, at once
    ):
        bar.set_postfix_str(f"0 of {len(runs)} runs")
        for run, result in results:
            write(result, plan.file(run))
            (outcome.failed if result.failed else outcome.finished).append(result)
            if result.failed and not quiet:
                bar.write(f"FAILED {run.label}: {str(result.error).splitlines()[0]}", file=sys.stderr)
            bar.set_postfix_str(f"{len(outcome.finished) + len(outcome.failed) - len(there)} of {len(runs)} runs")
    return outcome


@dataclass(frozen=True)
class Estimate:
    """How much there is to do, and about how long it takes here."""

    runs: int
    finished: int
    steps: int  # a run
    seconds: float  # one run after another
    step_seconds: Mapping[str, float]  # by method


def estimate(plan: Sweep) -> Estimate:
    """Time a few steps of each method, and reckon with them."""
    there, runs = plan.parted()
    every = plan.recipe.runs()
    task = task_of(every[0], plan.place)
    step_seconds: dict[str, float] = {}
    for run in every:
        if run.method not in step_seconds:
            step_seconds[run.method] = train(run, plan.place, limit=PROBE_STEPS).course.step_seconds
    steps = plan.recipe.train.steps_for(task.samples)
    # A forward pass is about a third of a step.
    batches = task.evaluation_samples / plan.recipe.train.batch
    evaluation = batches * min(step_seconds.values()) / 3
    seconds = sum(steps * step_seconds[run.method] + evaluation for run in runs)
    return Estimate(len(every), len(there), steps, seconds, step_seconds)
