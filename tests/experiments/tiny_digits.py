"""A tiny sweep for the tests of runners, and training that something happens to.

A module of its own because other processes import it: workers of the pool and of Ray, and a sweep that is killed.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from alignattn import cli, results
from alignattn.experiments import recipe as recipes
from alignattn.experiments.recipe import Recipe, Run
from alignattn.experiments.runner import Outcome, Sweep, carry_out, sweep
from alignattn.experiments.settings import TrainSettings
from alignattn.experiments.training import Place
from alignattn.files import write_whole
from alignattn.results import Result, read

PLACE = Place(device="cpu", threads=1, command="alignattn run digits")
SETTINGS: dict[str, Any] = {
    "seeds": 2,
    "data": {"test": 40},
    "model": {"width": 8, "heads": 2, "layers": 1},
    "train": {"steps": 3, "batch": 16, "warmup": 1, "rate": 0.01},
    "align": {"methods": ["soft", "mmd"]},
}
# The same, as they are typed.
ARGUMENTS = [
    *("run", "digits", "--seeds", "2", "--methods", "soft,mmd", "--device", "cpu", "--threads", "1"),
    *("--set", "data.test=40", "--set", "model.width=8", "--set", "model.heads=2", "--set", "model.layers=1"),
    *("--set", "train.steps=3", "--set", "train.batch=16", "--set", "train.warmup=1", "--set", "train.rate=0.01"),
]


def tiny(*overrides: dict[str, Any]) -> Recipe:
    return recipes.load("digits", [SETTINGS, *overrides])


def tiny_sweep(out: Path, *overrides: dict[str, Any]) -> Sweep:
    return sweep(tiny(*overrides), PLACE, out)


def finish(plan: Sweep, *args: Any) -> Outcome:
    return carry_out(plan, *args, quiet=True)


def key(result: Result | Run) -> tuple[str, float | None, int]:
    return result.method, result.weight, result.seed


def metrics(found: list[Result]) -> dict[Any, dict[str, float]]:
    """By run; results come in the order in which they end."""
    return {key(result): dict(result.metrics) for result in found}


def files(out: Path) -> dict[str, dict[str, float]]:
    """Every file under a folder, by name, with its metrics; one that is no finished result raises."""
    found = {}
    for path in out.rglob("*"):
        # A process that dies while it writes leaves a hidden file, which nobody takes for a result.
        if path.is_file() and not (path.name.startswith(".") and path.suffix == ".part"):
            result = read(path)
            assert not result.failed and result.metrics and len(result.details["curve"]) > 0
            found[path.name] = dict(result.metrics)
    return found


@dataclass(frozen=True, kw_only=True)
class Eventful(TrainSettings):
    """Training settings to which something happens: before each step but the first, 1, 2, ..., `event` is called."""

    def factor(self, step: int, steps: int) -> float:
        if 0 < step < steps and self.__dict__.get("at") != step:  # torch asks for each group of parameters
            self.__dict__["at"] = step
            self.__dict__["event"](step)
        return super().factor(step, steps)


def eventful(run: Run, event: Callable[[int], None]) -> Run:
    """The same run, with the same file for its result: `event`, which is pickled with it, is no setting."""
    settings = Eventful(**asdict(run.recipe.train))
    settings.__dict__["event"] = event
    return replace(run, recipe=replace(run.recipe, train=settings))


@dataclass(frozen=True)
class Die:
    """The process dies by a signal before the third step: always, or the first time only if there is a `mark`."""

    signal: int
    mark: Path | None = None

    def __call__(self, step: int) -> None:
        if step == 2 and (self.mark is None or not self.mark.exists()):
            if self.mark is not None:
                self.mark.touch()
            os.kill(os.getpid(), self.signal)


@dataclass(frozen=True)
class Note:
    """Each step takes its time; before the second a file is left, named by the process: its parent, and our source."""

    folder: Path
    seconds: float

    def __call__(self, step: int) -> None:
        if step == 1:
            name = f"{os.getpid()}-{time.monotonic_ns()}"
            (self.folder / f".{name}").write_text(f"{os.getppid()}\n{results.__file__}")
            (self.folder / f".{name}").rename(self.folder / name)
        time.sleep(self.seconds)


def run_quietly(arguments: list[str]) -> None:
    """The command, as a process of its own."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = sys.stderr = nowhere
        sys.exit(cli.main(arguments))


def die_in_writing(result: Result, path: Path, lines: int) -> None:
    """Killed after so many lines of the function that writes files, and of those that it calls on paths."""
    left = lines

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        code, caller = frame.f_code, frame.f_back and frame.f_back.f_code
        ours = write_whole.__code__
        if code is not ours and not (caller is ours and code.co_name in ("mkdir", "chmod", "replace")):
            return None
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return trace

    sys.settrace(trace)
    results.write(result, path)


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    return until(lambda: not Path(f"/proc/{pid}").exists(), seconds)


def until(true: Callable[[], object], seconds: float) -> bool:
    """Whether something comes true within so many seconds."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def endless_sweep(out: Path) -> None:
    """Two workers at runs that would take an hour, for somebody to kill."""
    from alignattn.experiments.pool import processes

    runs = [eventful(run, Note(out, 3600)) for run in tiny().runs()]
    for _, result in processes(2)(runs, PLACE, {}, lambda steps: None):
        raise AssertionError(f"It ended: {result}")


if __name__ == "__main__":
    endless_sweep(Path(sys.argv[1]))
