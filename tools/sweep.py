"""Runs many recipes within a time limit, all in one pool: for a machine that is lent by the minute.

python tools/sweep.py PLAN --jobs 14 --limit 540 --keep $OUT/results.tgz

A line of PLAN is what `alignattn run` takes (`minilm-mrpc --methods mmd --weights auto:0.1 --seeds 3`); runs begin in
the order of the lines, and # begins a comment; seeds of a graph train as one model. Arguments after `--` go to every
line. When time is up what is not finished is given up; finished results are packed every few seconds, so that a machine
that is taken back loses little.
"""

import argparse
import multiprocessing
import shlex
import sys
import tarfile
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from alignattn import cli
from alignattn.experiments.recipe import Run
from alignattn.experiments.runner import Sweep, at_once
from alignattn.experiments.training import Place, execute_together
from alignattn.results import Result, write

PACK_EVERY = 20  # seconds


def planned(text: str, common: list[str]) -> list[tuple[Sweep, list[Run]]]:
    """Every run of the plan that is not finished yet, those together that are trained as one model."""
    found = []
    for line in text.splitlines():
        if words := shlex.split(line, comments=True):
            plan = cli.plan_of(["run", *words, *common])
            found += [(plan, some) for some in at_once(plan.parted()[1], plan.place)]
    return found


def carried_out(runs: list[Run], place: Place, inputs: Mapping[str, str], files: list[Path]) -> Result:
    """In a worker: train, measure, and keep the results; one that failed, or else the first, is told."""
    results = execute_together(runs, place, inputs)
    for result, file in zip(results, files, strict=True):
        write(result, file)
    return next((result for result in results if result.failed), results[0])


def label_of(runs: list[Run]) -> str:
    return runs[0].label if len(runs) == 1 else f"{runs[0].label} and {len(runs) - 1} seeds with it"


def packed(folder: Path, archive: Path) -> None:
    """The results so far, in one file that is always whole."""
    half = archive.with_suffix(".part")
    with tarfile.open(half, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    half.replace(archive)


def told(label: str, future: Future[Result], begun: float) -> str:
    try:
        result = future.result()
    except Exception as error:  # noqa: BLE001  # a worker that died: the others go on
        return f"LOST {label}: {error}"
    outcome = (
        str(result.error).splitlines()[0]
        if result.failed
        else f"{result.times['train']:.0f} s, {1000 * result.times['step']:.0f} ms a step"
    )
    return f"{time.monotonic() - begun:5.0f} s  {'FAILED ' if result.failed else ''}{label}: {outcome}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--keep", type=Path, help="an archive of the results, always whole")
    here = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, common = parser.parse_args(sys.argv[1:here]), sys.argv[here + 1 :]

    begun = time.monotonic()
    todo = planned(options.plan.read_text(), ["--out", str(options.out), *common])
    print(f"{sum(len(runs) for _, runs in todo)} runs, {options.jobs} at once", flush=True)
    workers = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    running = {
        workers.submit(carried_out, runs, plan.place, plan.inputs, [plan.file(run) for run in runs]): label_of(runs)
        for plan, runs in todo
    }
    left = set(running)
    while left and (spare := options.limit - (time.monotonic() - begun)) > 0:
        done, left = wait(left, min(PACK_EVERY, spare), FIRST_COMPLETED)
        for future in done:
            print(told(running[future], future, begun), flush=True)
        if options.keep and options.out.exists():
            packed(options.out, options.keep)
    if left:
        print(f"Time is up: {len(left)} runs are not finished.", flush=True)
        for process in list(workers._processes.values()):  # the pool itself would wait for them
            process.kill()
    workers.shutdown(wait=False, cancel_futures=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
