"""Sweeps in one process: what is done is kept, what failed is told, and a run is what a plain loop would do."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_digits import ARGUMENTS, PLACE, files, finish, key, metrics, tiny, tiny_sweep
from torch import nn

from alignattn import cli
from alignattn.config import PRESETS
from alignattn.errors import NonFiniteError
from alignattn.experiments import runner, training
from alignattn.experiments.runner import carry_out, estimate, one_after_another
from alignattn.experiments.tasks.digits import Digits
from alignattn.experiments.training import Place, task_of
from alignattn.models.vision import VisionTransformer
from alignattn.results import read, write


@pytest.fixture
def executed(monkeypatch):
    """The runs that were trained, as they are."""
    ran = []
    execute = runner.execute

    def remember(run, *args):
        ran.append(key(run))
        return execute(run, *args)

    monkeypatch.setattr(runner, "execute", remember)
    return ran


MMD = str(PRESETS["stable"]["mmd"]["weight"])
ALL = [("soft", None, 0), ("mmd", MMD, 0), ("soft", None, 1), ("mmd", MMD, 1)]


def test_each_result_is_written_at_once_and_nothing_is_run_twice(tmp_path, executed):
    plan = tiny_sweep(tmp_path)
    written = []

    def watching(runs, *args):
        for ended in one_after_another(runs, *args):
            written.append(len(list(tmp_path.rglob("*.json"))))
            yield ended

    first = carry_out(plan, watching, quiet=True)
    assert written == [0, 1, 2, 3]
    assert executed == ALL
    assert [key(result) for result in first.finished] == ALL
    assert (first.before, first.failed) == (0, [])
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        plan.file(r).name for r in plan.recipe.runs()
    }
    texts = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    second = finish(plan)
    assert executed == ALL
    assert (second.before, len(second.finished), second.failed) == (4, 4, [])
    assert {path: path.read_text() for path in tmp_path.rglob("*.json")} == texts
    assert metrics(second.finished) == metrics(first.finished)
    # Another seed: the four are kept.
    third = finish(tiny_sweep(tmp_path, {"seeds": [1, 7, 0]}))
    assert executed[4:] == [("soft", None, 7), ("mmd", MMD, 7)]
    assert (third.before, len(third.finished)) == (4, 6)


def test_two_executions_measure_the_same_and_seeds_and_methods_differ(tmp_path):
    once = metrics(finish(tiny_sweep(tmp_path / "once")).finished)
    torch.manual_seed(1234)
    torch.rand(5)
    twice = metrics(finish(tiny_sweep(tmp_path / "twice")).finished)
    assert once == twice
    assert len({values["nll"] for values in once.values()}) == 4


def test_the_bar_counts_every_step_of_every_run(tmp_path, capsys):
    steps = []

    def counting(runs, place, inputs, progress):
        def tell(done):
            steps.append(done)
            progress(done)

        yield from one_after_another(runs, place, inputs, tell)

    carry_out(tiny_sweep(tmp_path, {"train": {"steps": 107}, "seeds": 1}), counting)
    assert sum(steps) == 2 * 107 and len(steps) <= 2 * (training.LOOKS + 4)
    shown = capsys.readouterr().err
    assert "digits: 100%" in shown and "214/214" in shown and "2 of 2 runs" in shown


@pytest.mark.parametrize(
    "text",
    ["", "{", "no JSON", '{"schema": 1}', '{"schema": 99}', "[]"],
    ids=["empty", "cut", "text", "no fields", "from the future", "list"],
)
def test_a_broken_file_is_run_again_and_replaced(text, tmp_path, executed):
    plan = tiny_sweep(tmp_path, {"seeds": 1})
    before = metrics(finish(plan).finished)
    broken = plan.file(plan.recipe.runs()[1])
    broken.write_text(text)
    outcome = finish(plan)
    assert executed[2:] == [("mmd", MMD, 0)]
    assert outcome.before == 1
    assert metrics(outcome.finished) == before
    assert read(broken).metrics == before["mmd", MMD, 0]
    assert len(list(tmp_path.rglob("*"))) == 3  # the folder and two files


def test_a_file_cut_anywhere_is_never_taken_for_a_finished_run(tmp_path):
    plan = tiny_sweep(tmp_path, {"seeds": 1, "align": {"methods": ["soft"]}})
    finish(plan)
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    for length in range(0, len(text.rstrip()), 37):
        path.write_text(text[:length])
        assert plan.parted() == ([], plan.recipe.runs())
    path.write_text(text)
    assert plan.parted()[1] == []


def test_a_failed_run_is_run_again(tmp_path, executed):
    plan = tiny_sweep(tmp_path, {"seeds": 1})
    good = finish(plan).finished
    path = plan.file(plan.recipe.runs()[0])
    write(replace(good[0], metrics={}, details={}, times={}, error="OutOfMemoryError: no memory"), path)
    outcome = finish(plan)
    assert executed[2:] == [("soft", None, 0)]
    assert (outcome.before, outcome.failed) == (1, [])
    assert metrics(outcome.finished) == metrics(good)
    assert not read(path).failed


def test_whatever_decides_the_outcome_is_in_the_files_name(tmp_path):
    plan = tiny_sweep(tmp_path)
    soft, mmd = plan.recipe.runs()[:2]
    assert soft.file(plan.inputs).parent.name == "digits"
    assert soft.file(plan.inputs).name.startswith("soft-seed0-")
    assert mmd.file(plan.inputs).name.startswith(f"mmd-{MMD}-seed0-".replace(":", "-"))

    def names(*overrides, inputs=plan.inputs):
        return {path.name for path in (run.file(inputs) for run in tiny(*overrides).runs()[:2])}

    ours = names()
    for same in (
        {"description": "another"},
        {"report": ["ece"]},
        {"seeds": [0, 9]},
        {"align": {"methods": ["soft", "mmd", "ot"]}},
        {"align": {"weights": [MMD]}},  # the preset's own, named
        {"align": {"ot": {"epsilon": 0.3}}},  # of a method that is not run
        {"paper": {"table": "table3", "column": "SST-2"}},
    ):
        assert names(same) == ours, same
    both = [
        {"train": {"steps": 4}},
        {"train": {"batch": 17}},
        {"train": {"rate": 0.02}},
        {"train": {"warmup": 2}},
        {"train": {"clip": 0.5}},
        {"train": {"weight_decay": 0.1}},
        {"train": {"schedule": "constant"}},
        {"train": {"precision": "bf16"}},
        {"model": {"width": 16}},
        {"model": {"layers": 2}},
        {"data": {"noise": 0.2}},
        {"data": {"split_seed": 1}},
    ]
    aligned = [
        {"align": {"weights": [0.2]}},
        {"align": {"weights": [0.2], "ramp": 0.5}},
        {"align": {"rebase": True}},
        {"align": {"preset": "paper"}},
        {"align": {"options": {"generator": "projections"}}},
        {"align": {"mmd": {"bandwidth": 1.0}}},
    ]
    for other in both:
        assert not names(other) & ours, other
    for other in aligned:
        assert names(other) & ours == {soft.file(plan.inputs).name}, other  # soft attention has none of these
    assert not names(inputs={**plan.inputs, "digits": "0" * 64}) & ours
    different = [soft.digest(plan.inputs), *(tiny(other).runs()[1].digest(plan.inputs) for other in (*both, *aligned))]
    assert len(set(different)) == len(different)


def test_changed_data_are_run_anew(tmp_path, monkeypatch, executed):
    before = finish(tiny_sweep(tmp_path, {"seeds": 1})).finished
    monkeypatch.setattr("alignattn.experiments.tasks.digits._digits", darkened)
    training._task.cache_clear()
    try:
        after = finish(tiny_sweep(tmp_path, {"seeds": 1}))
    finally:
        training._task.cache_clear()
    assert after.before == 0 and len(executed) == 4
    assert metrics(after.finished) != metrics(before)
    assert len(files(tmp_path)) == 4


def darkened():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 32, torch.tensor(labels)


def test_a_failed_run_is_told_and_costs_no_other(tmp_path, capsys):
    """A weight that fp32 cannot hold: the term is infinite, and that run alone fails."""
    weights = [0.1, 1e300, 0.2]
    plan = tiny_sweep(tmp_path, {"align": {"weights": weights}})
    outcome = carry_out(plan)
    expected = {("soft", None), ("mmd", 0.1), ("mmd", 0.2)}
    assert {key(r) for r in outcome.finished} == {(*run, seed) for run in expected for seed in (0, 1)}
    assert [key(r) for r in outcome.failed] == [("mmd", 1e300, 0), ("mmd", 1e300, 1)]
    told, where = outcome.failed[0].error.splitlines()
    assert told == "NonFiniteError: At step 1 the alignment term is inf."
    assert where.startswith("  at training.py:") and " _finite < training.py:" in where
    shown = capsys.readouterr()
    assert f"FAILED digits: mmd 1e+300, seed 1: {told}\n" in shown.err and "8 of 8 runs" in shown.err
    assert shown.out == ""
    kept = [read(plan.file(run)) for run in plan.recipe.runs()]
    assert [r.error for r in kept if r.failed] == [r.error for r in outcome.failed]
    assert all(not r.metrics and r.recipe["train"]["steps"] == 3 and r.finished for r in kept if r.failed)
    # The others are what they are without it.
    alone = finish(tiny_sweep(tmp_path / "alone", {"align": {"weights": [0.1, 0.2]}}))
    assert metrics(alone.finished) == metrics(outcome.finished)
    again = carry_out(plan, quiet=True)
    assert (again.before, len(again.failed)) == (6, 2)
    assert capsys.readouterr() == ("", "")


def test_an_error_is_told_without_the_folders_of_this_machine(tmp_path, monkeypatch, capsys):
    loss = Digits.loss
    calls = iter(range(100))

    def failing(self, model, batch):
        if next(calls) == 4:  # in the second run
            (tmp_path / "my data" / "absent.txt").read_text()
        return loss(self, model, batch)

    monkeypatch.setattr(Digits, "loss", failing)
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr()
    (path,) = (p for p in tmp_path.rglob("mmd-*seed0*.json"))
    error = json.loads(path.read_text())["error"]
    told, where = error.splitlines()
    assert told == "FileNotFoundError: [Errno 2] No such file or directory: '…/absent.txt'"
    assert "test_runner.py:" in where and " failing < training.py:" in where
    assert str(tmp_path) not in path.read_text()
    assert "3 runs finished." in shown.out
    assert f"FAILED mmd {MMD}, seed 0: {error}" in shown.err and "1 runs failed" in shown.err
    monkeypatch.undo()
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path / "out")]) == 0
    assert "1 run finished, 3 were there already." in capsys.readouterr().out
    assert files(tmp_path) == {plan_file.name: dict(read(plan_file).metrics) for plan_file in tmp_path.rglob("*.json")}


def test_ctrl_c_keeps_what_is_finished(tmp_path, monkeypatch, capsys):
    loss = Digits.loss
    calls = iter(range(100))

    def interrupted(self, model, batch):
        if next(calls) == 7:  # in the third run
            raise KeyboardInterrupt
        return loss(self, model, batch)

    whole = metrics(finish(tiny_sweep(tmp_path / "whole")).finished)
    monkeypatch.setattr(Digits, "loss", interrupted)
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path / "out")]) == 130
    assert "Stopped. What is finished is kept" in capsys.readouterr().err
    assert len(files(tmp_path / "out")) == 2
    assert cli.main([*ARGUMENTS, "--out", str(tmp_path / "out")]) == 0
    assert "2 runs finished, 2 were there already." in capsys.readouterr().out
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert metrics([read(path) for path in (tmp_path / "out").rglob("*.json")]) == whole


def test_an_executor_is_closed_when_a_result_cannot_be_written(tmp_path):
    """Its workers end then, and not when the error is forgotten."""
    closed = []

    def executor(*args):
        try:
            yield from one_after_another(*args)
        finally:
            closed.append(True)

    (tmp_path / "digits").write_text("in the way")
    with pytest.raises(OSError, match="digits") as _kept:
        carry_out(tiny_sweep(tmp_path), executor, quiet=True)
    assert closed == [True]


def test_a_soft_run_is_a_plain_training_loop(tmp_path):
    """Written out, without anything of ours but the model: equal to the last bit."""
    from sklearn.datasets import load_digits

    train = {"steps": 9, "batch": 16, "warmup": 2, "rate": 0.02, "clip": 0.7, "weight_decay": 0.3}
    plan = tiny_sweep(tmp_path, {"train": train, "seeds": [5]})
    soft, mmd = finish(plan).finished

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    split = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images, labels = images[split][40:], labels[split][40:]
    torch.manual_seed(5)
    model = VisionTransformer(patch=2, width=8, heads=2, layers=1)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    # Up over two steps, then down to zero behind the last one.
    rates = [1 / 3, 2 / 3, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7, 0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates.__getitem__)
    order = torch.randperm(1757, generator=torch.Generator().manual_seed(5))
    losses, clipped = [], 0
    for index in order[: 9 * 16].split(16):
        loss = F.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        clipped += nn.utils.clip_grad_norm_(model.parameters(), 0.7).item() > 0.7
        optimizer.step()
        schedule.step()
        losses.append(loss.item())

    assert clipped > 0  # else it would not tell whether it is done
    run = plan.recipe.runs()[0]
    ours = training.train(run, PLACE).model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert dict(soft.metrics) == task_of(run, PLACE).evaluate(model.eval()).metrics
    assert soft.details["curve"] == [[step, round(loss, 5), 0.0] for step, loss in enumerate(losses, 1)]
    # The aligned run of this seed starts from the same weights and sees the same batches.
    curve = mmd.details["curve"]
    assert curve[0][1] == round(losses[0], 5) and curve[0][2] > 0
    assert curve[-1][1] != round(losses[-1], 5)
    assert mmd.metrics["mmd"] < soft.metrics["mmd"]


def test_a_trained_model_comes_back_plain_also_from_a_run_that_fails(monkeypatch):
    models = []
    make = Digits.make_model
    monkeypatch.setattr(Digits, "make_model", lambda task: models.append(make(task)) or models[-1])
    _, whole, breaks = tiny({"seeds": 1, "align": {"weights": [0.1, 1e300]}}).runs()
    assert training.train(whole, PLACE).model is models[0] and not models[0].training
    with pytest.raises(NonFiniteError, match="At step 1 the alignment term is inf"):
        training.train(breaks, PLACE)
    assert len(models) == 2
    for model in models:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_aligned_runs_of_a_seed_share_their_first_step_and_weight_zero_is_soft(tmp_path, monkeypatch):
    methods = ["soft", "gan", "ot", "ct", "mmd"]
    aligning = []
    align = training.align
    monkeypatch.setattr(training, "align", lambda *args, **options: aligning.append(args) or align(*args, **options))
    results = finish(tiny_sweep(tmp_path, {"align": {"methods": methods, "weights": [0.0, 0.5]}})).finished
    assert len(results) == 2 * 9 and len(aligning) == 2 * 8  # weight zero is aligned too: its pace is alignment's
    for seed in (0, 1):
        soft, *aligned = (r for r in results if r.seed == seed)
        assert soft.method == "soft" and soft.alignment is None and soft.weight is None
        for result in aligned:
            assert result.details["curve"][0][1] == soft.details["curve"][0][1]
            assert result.alignment["method"] == result.method and result.alignment["weight"] == result.weight
            assert (result.metrics == soft.metrics) == (result.weight == 0)
            assert (result.details["curve"][0][2] == 0) == (result.weight == 0)
    firsts = {r.details["curve"][0][1] for r in results}
    assert len(firsts) == 2  # seeds differ


def test_a_ramp_grows_from_zero_over_its_share_of_the_steps(tmp_path):
    """With weights that stand still, both runs see the same distances."""
    settings = {"seeds": 1, "train": {"steps": 8, "rate": 1e-12}, "align": {"methods": ["mmd"], "weights": [100]}}
    (whole,) = finish(tiny_sweep(tmp_path, settings)).finished
    (grown,) = finish(tiny_sweep(tmp_path, settings, {"align": {"ramp": 0.5}})).finished
    pairs = zip(whole.details["curve"], grown.details["curve"], strict=True)
    assert [high[2] / full[2] for full, high in pairs] == pytest.approx([0, 1 / 4, 1 / 2, 3 / 4, 1, 1, 1, 1], abs=1e-5)


def test_an_estimate_is_positive_and_leaves_nothing_behind(tmp_path):
    plan = tiny_sweep(tmp_path / "out", {"train": {"steps": 1000}})
    told = estimate(plan)
    assert (told.runs, told.finished, told.steps) == (4, 0, 1000)
    assert set(told.step_seconds) == {"soft", "mmd"} and min(told.step_seconds.values()) > 0
    training_alone = 2 * 1000 * sum(told.step_seconds.values())
    assert training_alone < told.seconds < 1.1 * training_alone
    assert not (tmp_path / "out").exists()
    short = tiny_sweep(tmp_path / "out")
    finish(short)
    done = estimate(short)
    assert (done.finished, done.seconds) == (4, 0) and done.step_seconds["soft"] > 0
    assert len(files(tmp_path)) == 4


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("quantum", "Unknown device 'quantum'. Choose one of"),
        pytest.param(
            "cuda:0",
            "no accelerator here, and the device is 'cuda:0'",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator"),
        ),
    ],
)
def test_a_device_that_is_not_there_is_told_in_a_sentence(device, message, tmp_path, capsys):
    assert cli.main([*ARGUMENTS, "--device", device, "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("alignattn: ") and message in shown and shown.count("\n") == 1
    assert not list(tmp_path.iterdir())
    # A machine of a cluster may lack it though the one that sends has it: there the run fails, and tells why.
    plan = tiny_sweep(tmp_path)
    result = training.execute(plan.recipe.runs()[0], Place(device=device), plan.inputs)
    assert result.error.startswith("ConfigError: ") and message in result.error
    assert result.machine["device"] == "cpu"
