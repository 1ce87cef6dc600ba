"""`alignattn bench`, as it is typed."""

import json
import math

import pytest
import torch

from alignattn import cli
from alignattn.bench import peers, plan, steps
from alignattn.bench.row import measured
from alignattn.bench.workload import Shape, make_batch, make_model, training_step

CPU = torch.device("cpu")


def test_the_command_prints_tables_and_writes_them(tmp_path, capsys):
    out = tmp_path / "bench.json"
    arguments = [
        "--quick",
        "--parts",
        "step,straightforward,inference",
        "--methods",
        "mmd",
        "--rounds",
        "2",
        "--device",
        "cpu",
    ]
    assert cli.main(["bench", *arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Whole training steps: small, 4 × 64, fp32" in printed and "as one would first write them" in printed
    told = json.loads(out.read_text())
    assert (
        told["command"]
        == "alignattn bench --quick --parts step,straightforward,inference --methods mmd --device cpu --rounds 2"
    )
    assert {"versions", "commit", "machine", "schema"} <= told.keys()
    names = [(row["part"], row["name"]) for row in told["rows"]]
    assert names == [(part, name) for part in ("step", "straightforward", "inference") for name in ("soft", "mmd")]
    for row in told["rows"]:
        timing = row["timing"]
        assert 0 < timing["low"] <= timing["median"] <= timing["high"] and timing["rounds"] in (2, 3)
        assert timing["ratio_low"] <= timing["ratio"] <= timing["ratio_high"]
        assert row["memory"] > 0 and row["failed"] is None
    first = told["rows"][0]
    assert first["timing"]["ratio"] == 1.0 and first["memory_ratio"] == 1.0
    of_inference = [row["memory"] for row in told["rows"] if row["part"] == "inference"]
    assert of_inference[0] == of_inference[1]  # an attached model in evaluation takes not a byte more


def test_a_part_that_is_named_is_measured_however_quick(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LAYERS", (1, 2))
    layers = plan.Plan(torch.device("cpu"), parts=["layers"], methods=["mmd"], quick=True, rounds=1)
    assert [row.case[-8:] for rows in plan.measure(layers) for row in rows if row.name == "mmd"] == [
        "1 layers",
        "2 layers",
    ]


def test_ratios_are_to_the_first_that_fits():
    def too_much():
        raise torch.OutOfMemoryError

    rows = measured(
        "step", "case", {"soft": too_much, "a": lambda: torch.ones(9), "b": lambda: torch.ones(18)}, CPU, rounds=2
    )
    assert [row.failed for row in rows] == ["out of memory", None, None]
    assert [row.memory_ratio for row in rows] == [None, 1.0, 2.0] and rows[1].timing.ratio == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--parts", "stp"], "step"),
        (["--methods", "sinkhorn"], "gan"),
        (["--device", "cuda:x"], "Unknown device"),
    ],
)
def test_what_is_unknown_is_told(arguments, told, tmp_path, capsys):
    assert cli.main(["bench", *arguments, "--out", str(tmp_path / "b.json")]) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()


def test_all_solve_the_same_problems_to_the_same_error():
    """What the plans cost, each with the fewest iterations that are enough, is what a long run in double finds."""
    (rows,) = peers.sinkhorn(CPU, quick=True, rounds=1)
    assert [row.name for row in rows] == ["alignattn", "geomloss", "POT"]
    for row in rows:
        assert row.failed is None and 0 < row.details["marginal_error"] <= peers.TARGET
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 20, peers.WIDTH, generator=generator) / peers.WIDTH**0.5 for _ in range(2))
    distance = torch.cdist(x.double(), y.double()).square() / 2
    f = g = torch.zeros(3, 20, dtype=torch.float64)
    for _ in range(2000):
        f = -peers.EPSILON * torch.logsumexp((g[:, None, :] - distance) / peers.EPSILON - math.log(20), -1)
        g = -peers.EPSILON * torch.logsumexp((f[:, :, None] - distance) / peers.EPSILON - math.log(20), -2)
    plans = torch.exp((f[:, :, None] + g[:, None, :] - distance) / peers.EPSILON) / 400
    expected = (plans * distance).sum((1, 2))
    ours, geomloss, pot = (
        peers._first_good(make(x, y))[0]() for make in (peers._alignattn, peers._geomloss, peers._pot)
    )
    theirs = torch.stack([peers._plan(x[i], y[i], *(p[i].flatten().double() for p in geomloss)) for i in range(3)])
    for cost in (ours.cost[0], (theirs * distance).sum((1, 2)), (pot * distance).sum((1, 2))):
        torch.testing.assert_close(cost.double(), expected, rtol=5e-3, atol=0.0)


def test_the_error_is_the_largest_of_any_row_or_column_and_the_median_over_problems():
    plan_ = torch.full((3, 4, 5), 1 / 20, dtype=torch.float64)
    plan_[1, 2] *= 1.1  # a row, and a little of each column
    plan_[2, :, 3] *= 1.3
    assert peers._median_error(plan_) == pytest.approx(0.1)


def test_a_step_is_one_of_plain_training():
    """What is timed as soft attention is torch's own training, weight for weight."""
    shape = Shape("tiny", 1, 16, 2, 4, 8, "fp32")
    batch = make_batch(shape, torch.device("cpu"))
    timed, plain = make_model(shape, torch.device("cpu")), make_model(shape, torch.device("cpu"))
    torch.manual_seed(0)
    training_step(timed, batch, "fp32")()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5)
    torch.manual_seed(0)
    plain(**batch).loss.backward()
    optimizer.step()
    for one, other in zip(timed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_work_is_counted_as_by_hand():
    from alignattn.bench.work import counted, work

    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)

    def call():
        (a @ b).T.exp().sum().backward()

    operations, calls = counted(call)
    assert operations == 3 * (2 * 3 * 4 * 5)
    # product, exp, sum, ones for its gradient, back through sum (a view), exp, and two products; gradients are kept
    assert 7 <= calls <= 9
    shape = Shape("tiny", 2, 16, 2, 2, 8, "fp32", vocabulary=50)
    soft, aligned = work(shape, ["mmd"], CPU)
    assert soft.details["megabytes"] == 0 and aligned.details["megabytes"] == 4 * 2 * 2 * 8 * 16 * 4 / 1e6
    assert aligned.details["gigaoperations"] > soft.details["gigaoperations"] > 0
    assert aligned.details["calls"] > soft.details["calls"] > 100


def test_each_compiled_candidate_has_code_of_its_own(monkeypatch):
    """Else torch would look through what it compiled for the others at each call, and take one for another."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    one, other = (steps._compiled(torch.nn.Bilinear(2, 3, 4)) for _ in range(2))
    assert one.__code__ is not other.__code__
    assert one(input1=torch.ones(5, 2), input2=torch.ones(5, 3)).shape == (5, 4)
