"""Runs in several processes of one machine: several small models train on one accelerator at once.

Each worker takes a run, sends how far it is, then the result. A worker that dies (killed, out of memory, a crash in
native code) costs its run alone: that is tried once more in a fresh process, then reported as failed.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from alignattn.experiments.recipe import Run
from alignattn.experiments.runner import Executor
from alignattn.experiments.training import Place, Progress, execute, lost
from alignattn.provenance import cores
from alignattn.results import Result

TRIES = 2


def processes(workers: int) -> Executor:
    """An executor of so many processes."""

    def executor(
        runs: Sequence[Run], place: Place, inputs: Mapping[str, str], progress: Progress
    ) -> Generator[tuple[Run, Result], None, None]:
        waiting = deque((run, 1) for run in runs)
        count = min(workers, len(runs))
        threads = place.threads or max(1, cores() // count)
        crew = [_Worker(replace(place, threads=threads, device=_device(place, i)), inputs) for i in range(count)]
        try:
            for worker in crew:
                worker.begin(*waiting.popleft())
            while busy := [worker for worker in crew if worker.run is not None]:
                ready = wait([worker.connection for worker in busy])
                for worker in busy:
                    if worker.connection not in ready:
                        continue
                    ended = worker.hear(progress)
                    if ended is None:
                        continue
                    run, result, attempt = ended
                    if result is None and attempt < TRIES:
                        waiting.append((run, attempt + 1))
                    else:
                        yield run, lost(run, worker.place, inputs, worker.last_words) if result is None else result
                    if waiting:
                        worker.begin(*waiting.popleft())
        finally:
            for worker in crew:
                worker.dismiss()

    return executor


class _Worker:
    """A process, and the run that it is at."""

    def __init__(self, place: Place, inputs: Mapping[str, str]) -> None:
        self.place, self.inputs = place, inputs
        self.process: Any = None
        self.connection: Connection
        self.run: Run | None = None
        self.attempt = self.steps = 0
        self.last_words = ""

    def begin(self, run: Run, attempt: int) -> None:
        if self.process is None or not self.process.is_alive():
            context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(theirs, self.place, self.inputs), daemon=True)
            self.process.start()
            theirs.close()
        self.run, self.attempt, self.steps = run, attempt, 0
        with suppress(OSError):  # it died on the way: `hear` will find out
            self.connection.send(run)

    def hear(self, progress: Progress) -> tuple[Run, Any, int] | None:
        """What there is to hear: the run with its result once there is one, with None if the process died."""
        run, attempt = self.run, self.attempt
        assert run is not None
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            self.last_words = f"was killed by {_signal(-code)}" if code < 0 else f"ended with {code}"
            progress(-self.steps)
            self.connection.close()
            self.process = self.run = None
            return run, None, attempt
        if isinstance(message, int):
            self.steps += message
            progress(message)
            return None
        self.run = None
        if message.failed:  # some errors of CUDA spoil the process for every run after them
            self.dismiss()
        return run, message, attempt

    def dismiss(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.connection.close()
            self.process = None


def _work(connection: Connection, place: Place, inputs: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends us
    threading.Thread(target=_follow_parent, daemon=True).start()
    while True:
        try:
            run = connection.recv()
        except (EOFError, OSError):  # the parent is gone
            return
        result = execute(run, place, inputs, connection.send)
        with suppress(OSError):
            connection.send(result)


def _follow_parent() -> None:
    """If the parent is killed nobody waits for a result: end at once, and leave the accelerator to others."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _device(place: Place, worker: int) -> str:
    """Workers take turns at the accelerators of the machine."""
    if place.device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{worker % torch.cuda.device_count()}"
    return place.device


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"
