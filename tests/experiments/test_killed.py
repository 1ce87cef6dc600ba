"""kill -9, whenever it comes: the same command goes on from there, and ends with the same results."""

import multiprocessing
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_digits import ARGUMENTS, die_in_writing, files, finish, gone, run_quietly, tiny_sweep, until

from alignattn import cli

START = "import sys; from alignattn.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def forked():
    """Starts a function in a process of its own, in no time: forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["alignattn.cli", "alignattn.experiments.runner", "sklearn.datasets", "torch._dynamo"]
    )
    started = []

    def start(target, *args):
        started.append(context.Process(target=target, args=args))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


def test_kills_at_random_moments_change_nothing(tmp_path, forked):
    """At any moment of what an unbroken sweep takes to half its runs, or soon after a result is there."""
    arguments = [*ARGUMENTS, "--set", "train.steps=25", "--seeds", "3", "--out"]
    forked(run_quietly, ["run", "--list"]).join()  # the first one takes long
    start = time.monotonic()
    forked(run_quietly, [*arguments, str(tmp_path / "unbroken")]).join()
    whole = time.monotonic() - start
    expected = files(tmp_path / "unbroken")
    assert len(expected) == 6

    generator = random.Random(9)
    out = tmp_path / "killed"
    seen, kills = {}, 0
    while True:
        process = forked(run_quietly, [*arguments, str(out)])
        if kills % 2:
            until(lambda: len(list(out.rglob("*.json"))) > len(seen) or not process.is_alive(), 60)  # noqa: B023
            process.join(generator.uniform(0, whole / 10))
        else:
            process.join(None if kills > 20 else generator.uniform(0, whole / 2))
        ended = not process.is_alive()
        process.kill()
        process.join()
        now = files(out)  # never one that looks finished and is not
        assert now.items() >= seen.items() and expected.items() >= now.items()
        seen = now
        if ended:
            break
        kills += 1
    assert process.exitcode == 0
    assert seen == expected
    assert kills >= 2


def test_a_kill_at_any_line_of_writing_leaves_the_file_whole_or_absent(tmp_path, forked):
    plan = tiny_sweep(tmp_path / "unbroken", {"seeds": 1, "align": {"methods": ["soft"]}})
    (result,) = finish(plan).finished
    expected = files(tmp_path / "unbroken")
    left = []
    for line in range(1000):
        broken = replace(plan, out=tmp_path / f"line {line}")
        process = forked(die_in_writing, result, broken.file(plan.recipe.runs()[0]), line)
        process.join()
        there = files(broken.out)
        assert there in ({}, expected)
        left.append(len(there))
        assert [len(part) for part in broken.parted()] == [len(there), 1 - len(there)]
        if process.exitcode == 0:  # there are no more lines
            break
        assert process.exitcode == -9
        if line % 8 == 0:
            assert finish(broken).before == len(there) and files(broken.out) == expected
    assert len(left) > 15
    assert left == sorted(left) and set(left) == {0, 1}  # none, and from some line on the whole


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_command_with_workers_can_be_killed_and_leaves_no_orphans(tmp_path, capsys):
    arguments = [*ARGUMENTS, "--set", "train.steps=60", "--seeds", "3", "--out"]
    assert cli.main([*arguments, str(tmp_path / "unbroken")]) == 0
    expected = files(tmp_path / "unbroken")
    out = tmp_path / "killed"
    command = [sys.executable, "-c", START, *arguments, str(out), "--workers", "2"]
    generator = random.Random(3)
    # While it starts; while workers train and the first result is there.
    for results, delay in ((0, generator.uniform(1, 4)), (1, generator.uniform(0, 0.2))):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                until(lambda: len(list(out.rglob("*.json"))) >= results or process.poll() is not None, 60)  # noqa: B023
                time.sleep(delay)
                children = offspring(process.pid)
            finally:
                process.kill()
        assert process.returncode == -9
        assert results == 0 or len(children) >= 2
        assert all(gone(pid, 10) for pid in children)
        there = files(out)
        assert results <= len(there) < len(expected) and expected.items() >= there.items()
    capsys.readouterr()
    assert cli.main([*arguments, str(out)]) == 0  # what workers began, one process may end
    assert f" finished, {len(there)} were there already." in capsys.readouterr().out
    assert files(out) == expected


def offspring(pid):
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
