"""The command, as a user types it."""

import subprocess
import sys

import pytest
import torch

from alignattn import cli, results
from alignattn.config import PRESETS
from alignattn.experiments.tasks.digits import Digits

MMD = str(PRESETS["stable"]["mmd"]["weight"])


def test_help_does_not_wait_for_torch():
    code = "import sys; from alignattn import cli; cli._parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_package_is_a_command_too():
    done = subprocess.run([sys.executable, "-m", "alignattn", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("alignattn ")


def test_demo_trains_soft_attention_and_the_four_methods(capsys, tmp_path):
    assert cli.main(["demo", "--seeds", "1", "--steps", "2", "--workers", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines()[4:9]]
    assert rows == ["soft", "gan", "ot", "ct", "mmd"]
    assert len(list((tmp_path / "digits").glob("*.json"))) == 5
    assert (tmp_path / "table.txt").read_text() in out
    for picture in ("clouds.png", "reliability.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path / "report.html") in out
    assert "5 runs." in page and "alignattn demo --seeds 1 --steps 2" in page and page.count("<svg ") > 10


def tiny(out, *more):
    settings = ["train.steps=2", "train.batch=16", "model.width=8", "model.heads=2", "model.layers=1", "data.test=60"]
    options = [part for setting in settings for part in ("--set", setting)]
    return [
        "run",
        "digits",
        "--seeds",
        "1",
        "--methods",
        "soft,mmd",
        "--threads",
        "1",
        "--out",
        str(out),
        *options,
        *more,
    ]


def test_run_leaves_result_files_and_compare_reads_them(tmp_path, capsys):
    assert cli.main(tiny(tmp_path)) == 0
    told = capsys.readouterr()
    assert "2 runs finished." in told.out and f"alignattn compare {tmp_path}/digits" in told.out
    assert "digits: 100%" in told.err  # the progress bar
    files = sorted((tmp_path / "digits").iterdir())
    assert [file.name.partition("-seed0-")[0] for file in files] == [f"mmd-{MMD}".replace(":", "-"), "soft"]
    result = results.read(files[0])
    assert result.recipe["train"]["steps"] == 2 and result.recipe["model"]["width"] == 8
    assert result.command.startswith("alignattn run digits --seeds 1 --methods soft,mmd --set train.steps=2")
    assert str(tmp_path) not in files[0].read_text()
    assert torch.__version__.startswith(result.versions["torch"]) and result.peak_memory["bytes"] > 1e7

    assert cli.main(tiny(tmp_path)) == 0
    assert "0 runs finished, 2 were there already" in capsys.readouterr().out

    for format_ in cli.FORMATS:
        assert cli.main(["compare", str(tmp_path), "--format", format_]) == 0
        assert f"mmd {MMD}" in capsys.readouterr().out
    assert cli.main(["compare", str(tmp_path), "--metrics", "nll,brier@noisy"]) == 0
    assert "Brier, noisy" in capsys.readouterr().out


def test_weights_and_seeds_reach_the_runs(tmp_path, capsys):
    command = tiny(tmp_path, "--weights", "0.5,auto", "--seeds", "3-4", "--methods", "mmd", "--dry-run")
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    for run in ("mmd 0.5, seed 3", "mmd auto:0.2, seed 3", "mmd 0.5, seed 4", "mmd auto:0.2, seed 4"):
        assert run in out
    assert "4 runs" in out and "2 steps a run" in out and "0 of 4 runs are finished" in out
    assert "steps = 2" in out and "[train]" in out
    assert "Milliseconds a step here" in out and "About" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_without_data_still_shows_the_settings(capsys):
    assert cli.main(["run", "mrpc", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert (
        "max_length = 512" in out and "800 steps a run" in out and "No estimate of time" in out and "--data-dir" in out
    )


def test_list_names_every_recipe(capsys):
    assert cli.main(["run", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"digits", "mrpc", "cola", "rte", "sst2", "stsb", "mnli", "snli"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "Which recipe"),
        (["run", "digist"], "Did you mean 'digits'"),
        (["run", "digits", "--set", "train.stepz=1"], "Did you mean 'steps'"),
        (["run", "digits", "--methods", "sotf"], "Did you mean 'soft'"),
        (["run", "mrpc"], "--data-dir"),
        (["run", "mrpc", "--data-dir", "nowhere"], "nowhere"),
        (["compare", "nowhere"], "no file or folder nowhere"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(arguments, message, capsys):
    assert cli.main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("alignattn: ") and message in err and "Traceback" not in err


def test_compare_names_what_it_cannot_read_and_goes_on(tmp_path, capsys):
    cli.main(tiny(tmp_path, "--methods", "soft"))
    (tmp_path / "broken.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["compare", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "alignattn: warning: Skipped: " in told.err and "broken.json" in told.err
    assert "soft" in told.out


def test_a_failed_run_is_reported_and_costs_no_other(tmp_path, capsys, monkeypatch):
    evaluate = Digits.evaluate

    def broken(self, model):
        broken.calls += 1
        if broken.calls == 1:
            raise ZeroDivisionError("just this once")
        return evaluate(self, model)

    broken.calls = 0
    monkeypatch.setattr(Digits, "evaluate", broken)
    assert cli.main(tiny(tmp_path)) == 1
    told = capsys.readouterr()
    assert "1 run finished" in told.out
    assert "FAILED soft, seed 0: ZeroDivisionError: just this once" in told.err and "tries them again" in told.err
    assert cli.main(["compare", str(tmp_path)]) == 0
    assert "0 (1 failed)" in capsys.readouterr().out
    assert cli.main(tiny(tmp_path)) == 0
    assert "1 run finished, 1 were there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dmeo"],
        ["run", "digits", "--seeds", "x"],
        ["run", "digits", "--seeds", "4-2"],
        ["run", "digits", "--weights", "a"],
        ["run", "digits", "--workers", "0"],
        ["compare"],
        ["compare", "a", "--format", "pdf"],
        ["demo", "--seeds", "0"],
        ["demo", "--steps", "many"],
    ],
)
def test_bad_arguments_are_refused_with_a_usage_line(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: alignattn" in capsys.readouterr().err


def test_public_names_are_few_and_resolve():
    import alignattn

    assert len(alignattn.__all__) <= 12
    assert all(hasattr(alignattn, name) for name in alignattn.__all__)
    assert dir(alignattn) == sorted(alignattn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'allign'"):
        _ = alignattn.allign
