"""kill -9 and torchrun: the same weights as a run that nothing disturbed."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from alignattn import cli, results

START = "import sys; from alignattn.cli import main; sys.exit(main(sys.argv[1:]))"


def arguments(encoder, train, evaluation, out, *more):
    places = ["--model", str(encoder), "--train", str(train), "--eval", str(evaluation), "--out", str(out)]
    return [
        *("finetune", *places, "--steps", "9", "--batch-size", "4", "--learning-rate", "0.002"),
        *("--device", "cpu", "--save-steps", "2", *more),
    ]


def die_at(moment, command):
    """In a process of its own: kill it, as the kernel would, when the third checkpoint is written or has been."""
    import torch

    from alignattn.finetune import folder, training

    torch.set_num_threads(1)
    seen = []

    def mark_whole(checkpoint):
        seen.append(checkpoint)
        if len(seen) == 3 and moment == "before":
            (checkpoint / "optimizer.pt").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        folder.mark_whole(checkpoint)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    training.mark_whole = mark_whole
    cli.main(command)


@pytest.mark.parametrize(("moment", "step"), [("before", 4), ("after", 6)])
def test_a_run_killed_while_or_after_it_saves_ends_as_an_unbroken_one(moment, step, encoder, files, tmp_path, capsys):
    train, evaluation = files("classification")
    command = arguments(encoder, train, evaluation, tmp_path / "killed", "--method", "gan")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["alignattn.finetune.run", "alignattn.finetune.training"])
    process = context.Process(target=die_at, args=(moment, command))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists() and not (tmp_path / "killed" / "model").exists()

    assert cli.main(command) == 0
    assert f"checkpoint-{step}." in capsys.readouterr().out
    assert cli.main(arguments(encoder, train, evaluation, tmp_path / "whole", "--method", "gan")) == 0
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert weights[0] == weights[1]
    told = [results.read(tmp_path / name / "result.json") for name in ("killed", "whole")]
    assert told[0].metrics == told[1].metrics
    assert [entry[0] for entry in told[0].details["curve"]] == [entry[0] for entry in told[1].details["curve"]]


def test_a_run_killed_between_training_and_its_result_only_measures_again(encoder, files, tmp_path, monkeypatch):
    from alignattn.finetune import run

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    train, evaluation = files("regression")
    command = arguments(encoder, train, evaluation, tmp_path / "out", "--method", "ct")
    with monkeypatch.context() as patch:
        patch.setattr(run, "_evaluate", die)
        with pytest.raises(Killed):
            cli.main(command)
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-9" / "whole").exists()
    before = load_file(tmp_path / "out" / "checkpoints" / "checkpoint-9" / "model.safetensors")
    assert cli.main(command) == 0
    after = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert all((after[name] == value).all() for name, value in before.items())


@pytest.mark.slow
def test_two_processes_of_torchrun_train_and_the_first_one_speaks(encoder, files, tmp_path):
    train, evaluation = files("tokens")
    command = arguments(encoder, train, evaluation, tmp_path / "two", "--method", "gan")
    (tmp_path / "start.py").write_text(START)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # there may be one for both

    done = subprocess.run(
        [*torchrun, str(tmp_path / "start.py"), *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Task: tokens") == 1 and done.stdout.count("ECE %") == 1
    assert sorted(p.name for p in Path(tmp_path / "two").iterdir()) == ["model", "result.json", "settings.json"]
    result = results.read(tmp_path / "two" / "result.json")
    assert result.recipe["train"]["processes"] == 2 and result.recipe["train"]["batch_size"] == 4


def test_of_two_processes_only_the_first_tells_an_error(encoder, files, tmp_path, monkeypatch, capsys):
    train, _ = files("tokens")
    for rank, times in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(arguments(encoder, train, tmp_path / "nowhere.csv", tmp_path / "out")) == 1
        assert capsys.readouterr().err.count("nowhere.csv cannot be read") == times
