"""Runs on a Ray cluster: one of two machines is lost in the middle, and nothing of it is to be seen in the results."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_digits
from tiny_digits import ARGUMENTS, PLACE, Note, eventful, files, finish, key, tiny, tiny_sweep, until

from alignattn import cli, provenance
from alignattn.experiments import recipe
from alignattn.experiments.cluster import ray_cluster
from alignattn.experiments.runner import one_after_another
from alignattn.experiments.training import Place, execute

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'alignattn[ray]'")
LEAST_MEMORY = 75 * 2**20  # that Ray takes for an object store


@pytest.fixture
def cluster(monkeypatch):
    """A head without work, and two machines with a core each. Every process of it is gone at the end."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets in it: its name must be short
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    here = str(Path(tiny_digits.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    head = {
        "num_cpus": 0,
        "object_store_memory": LEAST_MEMORY,
        "include_dashboard": False,
        "_system_config": {"health_check_period_ms": 500},  # a dead machine is noticed in seconds, not in fifteen
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=LEAST_MEMORY)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        ended = until(lambda: not of_cluster(folder), 20)
        for pid in of_cluster(folder):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    assert ended


def of_cluster(folder):
    """Its processes, known by the environment that they were started with."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RAY_TMPDIR={folder}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_machine_lost_in_the_middle_changes_no_result(cluster, tmp_path, monkeypatch, capsys):
    expected = tmp_path / "one after another"
    finish(tiny_sweep(expected))
    notes = tmp_path / "notes"
    notes.mkdir()
    load = recipe.load
    monkeypatch.setattr(recipe, "load", lambda *args: eventful(load(*args).runs()[0], Note(notes, 0.5)).recipe)
    monkeypatch.setenv("ALIGNATTN_COMMIT", "c0ffee")  # the machines were started without
    provenance.commit.cache_clear()
    lost = []

    def lose_a_machine():
        """The first that works, at a blow: the process at a run, and Ray's own that started it."""
        if until(lambda: list(notes.glob("[0-9]*")), 600):
            note = next(notes.glob("[0-9]*"))
            worker, raylet = int(note.name.partition("-")[0]), int(note.read_text().splitlines()[0])
            (node,) = (n for n in cluster.worker_nodes if n.all_processes["raylet"][0].process.pid == raylet)
            os.kill(worker, signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
            lost.append(worker)

    thread = threading.Thread(target=lose_a_machine)
    thread.start()
    try:
        status = cli.main([*ARGUMENTS, "--ray", cluster.address, "--out", str(tmp_path / "out")])
    finally:
        thread.join()
        provenance.commit.cache_clear()

    assert len(lost) == 1 and len(cluster.worker_nodes) == 1
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert "4 runs finished." in shown.out and "12/12" in shown.err and "4 of 4 runs" in shown.err
    assert files(tmp_path / "out") == files(expected)
    started = [note.read_text().splitlines() for note in notes.glob("[0-9]*")]
    assert len(started) >= 5  # four, and one of them again
    assert all("py_modules" in source for _, source in started)  # they ran what we sent
    results = tiny_digits.results.read_all([tmp_path / "out"])
    assert {result.commit for result in results} == {"c0ffee"}
    assert {result.machine["threads"] for result in results} == {1}
    assert not ray.is_initialized()


class Fake:
    """In place of a cluster: tasks are noted, and end as they are told to, the last first."""

    def __init__(self, monkeypatch, endings, **resources):
        self.options, self.tasks, self.endings = None, [], endings
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
        monkeypatch.setattr(ray, "remote", self.remote)
        monkeypatch.setattr(ray, "wait", lambda tasks, num_returns: ([tasks[-1]], tasks[:-1]))
        monkeypatch.setattr(ray, "get", self.get)

    def remote(self, **options):
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *args: self.tasks.append(args) or len(self.tasks) - 1)

    def get(self, task):
        ending = self.endings[task]
        if isinstance(ending, Exception):
            raise ending
        return ending


def test_a_run_that_the_cluster_loses_is_told_and_costs_no_other(tmp_path, monkeypatch):
    plan = tiny_sweep(tmp_path)
    runs = plan.recipe.runs()
    good = execute(runs[0], PLACE, plan.inputs)
    fake = Fake(
        monkeypatch,
        [
            good,
            ray.exceptions.WorkerCrashedError(),
            ray.exceptions.NodeDiedError("Node 10.0.0.7 is gone.\nMore of it."),
            ray.exceptions.RayTaskError("execute", "Traceback ...\n  File ...\nValueError: /home/me/x", ValueError()),
        ],
        CPU=2,
    )
    told = []
    ended = list(ray_cluster()(runs, PLACE, plan.inputs, told.append))
    assert [run for run, _ in ended] == runs[::-1]
    assert [key(result) for _, result in ended] == [key(run) for run in runs[::-1]]
    errors = [result.error for _, result in ended]
    assert errors[0] == "The process was lost: RayTaskError: ValueError: …/x."
    assert errors[1] == "The process was lost: NodeDiedError: Node … is gone."
    assert errors[2].startswith("The process was lost: WorkerCrashedError: The worker died unexpectedly")
    assert errors[2].endswith(".") and not errors[2].endswith("..")
    assert ended[3][1] is good
    assert told == [3, 3, 3, 3]
    assert fake.options == {"num_cpus": 1, "num_gpus": 0, "max_retries": 3}
    assert fake.tasks == [(run, PLACE, plan.inputs) for run in runs]


@pytest.mark.parametrize(("device", "share", "gpus"), [("auto", 1, 1), ("cuda", 4, 0.25), ("cpu", 4, 0)])
def test_runs_share_an_accelerator_as_they_are_told(device, share, gpus, tmp_path, monkeypatch):
    monkeypatch.setattr("alignattn.experiments.cluster.task_of", lambda *args: SimpleNamespace(samples=1))
    fake = Fake(monkeypatch, [None] * 4, CPU=8, GPU=2)
    runs = tiny().runs()
    assert len(list(ray_cluster(per_accelerator=share)(runs, Place(device=device), {}, int))) == 4
    assert fake.options["num_gpus"] == gpus


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        (["--ray", "10.0.0.1:6379"], ("10.0.0.1:6379", 1)),
        (["--ray"], (None, 1)),
        (["--ray", "--workers", "3"], (None, 3)),
        (["--ray", "ray://head:10001", "--workers", "2"], ("ray://head:10001", 2)),
    ],
)
def test_the_command_line_names_the_cluster_and_the_share(typed, given, tmp_path, monkeypatch):
    asked = []

    def instead(address, *, per_accelerator):
        asked.append((address, per_accelerator))
        return one_after_another

    monkeypatch.setattr("alignattn.experiments.cluster.ray_cluster", instead)
    assert cli.main([*ARGUMENTS, "--seeds", "1", "--methods", "soft", *typed, "--out", str(tmp_path)]) == 0
    assert asked == [given] and len(files(tmp_path)) == 1


@pytest.mark.parametrize("variable", [False, True])
def test_a_cluster_that_is_not_there_is_told_at_once(variable, tmp_path, monkeypatch, capsys):
    """Ray itself would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is nobody's, once it is closed
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it was tried"))
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    asked = ["--ray"] if variable else ["--ray", address]
    assert cli.main([*ARGUMENTS, *asked, "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert f"alignattn: No Ray cluster at {address}: " in shown and "`ray start --head` starts one" in shown
    assert not list(tmp_path.iterdir())


def test_an_address_that_is_none_is_told_in_a_sentence(tmp_path, capsys):
    assert cli.main([*ARGUMENTS, "--ray", "nonsense", "--out", str(tmp_path)]) == 1
    assert "alignattn: No Ray cluster at nonsense: Invalid address format" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main([*ARGUMENTS, "--ray", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "alignattn: --ray needs Ray: pip install 'alignattn[ray]'\n"
