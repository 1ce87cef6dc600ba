"""Processes of one machine: they change nothing but the time, and one that dies costs at most its own run."""

import multiprocessing
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_digits
import torch
from tiny_digits import PLACE, Die, eventful, finish, gone, key, metrics, tiny, tiny_sweep, until

from alignattn.experiments import pool
from alignattn.experiments.pool import processes
from alignattn.experiments.runner import carry_out
from alignattn.experiments.training import Place, execute
from alignattn.results import read


@pytest.mark.slow
def test_processes_change_no_result_and_a_death_costs_at_most_its_own(tmp_path, capsys):
    """Two workers at six runs: the process of one run is killed once, that of another always."""
    expected = finish(tiny_sweep(tmp_path / "one after another", {"seeds": 3})).finished
    plan = tiny_sweep(tmp_path / "out", {"seeds": 3})
    once, always = plan.recipe.runs()[0], plan.recipe.runs()[2]
    told, workers = [], set()

    def executor(runs, place, inputs, progress):
        def tell(steps):
            told.append(steps)
            workers.update(child.pid for child in multiprocessing.active_children())
            assert len(multiprocessing.active_children()) <= 2
            progress(steps)

        runs[0] = eventful(once, Die(signal.SIGKILL, tmp_path / "mark"))
        runs[2] = eventful(always, Die(signal.SIGTERM))
        yield from processes(2)(runs, place, inputs, tell)

    outcome = carry_out(plan, executor)

    assert (tmp_path / "mark").exists()
    assert [(key(result), result.error) for result in outcome.failed] == [
        (key(always), "The process was killed by SIGTERM.")
    ]
    assert metrics(outcome.finished) == {run: values for run, values in metrics(expected).items() if run != key(always)}
    assert all(result.machine["threads"] == 1 for result in outcome.finished)
    kept = [read(plan.file(run)) for run in plan.recipe.runs()]
    assert [result.failed for result in kept] == [key(run) == key(always) for run in plan.recipe.runs()]
    assert len(list((tmp_path / "out").rglob("*.json"))) == 6
    # Five runs of three steps came to their end. What a dead process had told, one step each time, was taken back.
    assert sum(told) == 15 and [steps for steps in told if steps < 0] == [-1, -1, -1]
    shown = capsys.readouterr().err
    assert "15/18" in shown and "6 of 6 runs" in shown and "FAILED digits: soft, seed 1: The process was" in shown
    # Two; one in place of each that died while there was more to do.
    assert 4 <= len(workers) <= 5
    assert not multiprocessing.active_children()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    """At once, before a step that would take an hour."""
    with subprocess.Popen([sys.executable, tiny_digits.__file__, str(tmp_path)]) as parent:
        try:
            started = until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2, 120)
        finally:
            parent.kill()
    workers = [int(path.name.partition("-")[0]) for path in tmp_path.glob("[0-9]*")]
    assert started and len(set(workers)) == 2 and parent.pid not in workers
    assert all(gone(pid, 5) for pid in workers)


def test_workers_take_turns_at_the_accelerators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        place = Place(device=device)
        assert [pool._device(place, worker) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert pool._device(Place(device="cuda:1"), 0) == "cuda:1"
    assert pool._device(Place(device="cpu"), 0) == "cpu"


def test_workers_share_the_cores_unless_threads_are_named(tmp_path, monkeypatch):
    """Seen in what the workers are given; none is started."""
    monkeypatch.setattr(pool, "cores", lambda: 5)
    monkeypatch.setattr(pool._Worker, "begin", lambda self, run, attempt: crew.append((self.place.threads, run)))
    plan = tiny_sweep(tmp_path)
    runs = plan.recipe.runs()
    for workers, threads, given in ((2, None, 2), (2, 3, 3), (9, None, 1)):
        crew = []
        place = replace(PLACE, threads=threads)
        assert list(processes(workers)(runs, place, plan.inputs, lambda steps: None)) == []
        assert crew == [(given, run) for run in runs[:workers]]


class Silent:
    """In place of a process and of the connection to it: says what it is told to, and notes what is done to it."""

    exitcode = -35  # killed by a real-time signal

    def __init__(self, *messages):
        self.messages, self.calls = list(messages), []

    def recv(self):
        if not self.messages:
            raise ConnectionResetError
        return self.messages.pop(0)

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


def test_a_worker_whose_run_failed_is_replaced_and_one_that_succeeded_is_kept(tmp_path):
    """An error of CUDA stays in its process: the next run there would fail for it."""
    plan = tiny_sweep(tmp_path)
    run = plan.recipe.runs()[0]
    good = execute(run, PLACE, plan.inputs)
    for result in (good, replace(good, metrics={}, error="AcceleratorError: device-side assert triggered")):
        worker = pool._Worker(PLACE, plan.inputs)
        worker.run, worker.attempt = run, 1
        worker.process = process = worker.connection = Silent(2, 1, result)
        steps = []
        assert [worker.hear(steps.append) for _ in range(3)] == [None, None, (run, result, 1)]
        assert steps == [2, 1] and worker.run is None
        assert worker.process is (None if result.failed else process)
        assert process.calls == (["terminate", "join", "close"] if result.failed else [])


def test_a_death_without_a_name_is_told_by_its_number(tmp_path):
    worker = pool._Worker(PLACE, {})
    worker.run = run = tiny().runs()[0]
    worker.process = worker.connection = Silent(7)
    steps = []
    assert [worker.hear(steps.append) for _ in range(2)] == [None, (run, None, 0)]
    assert worker.last_words == "was killed by signal 35" and steps == [7, -7]
