"""Node classification: early stopping, seeds trained together as alone, recipes from start to end."""

import math
import sys

import pytest
import torch

from alignattn import cli
from alignattn.alignment import Alignment
from alignattn.datasets.graphs import Blocks
from alignattn.errors import AlignmentError, ConfigError, NonFiniteError
from alignattn.experiments import recipe as recipes
from alignattn.experiments import seeds_at_once, training
from alignattn.experiments.early import EarlyStopping
from alignattn.experiments.paper import paper_value
from alignattn.experiments.runner import at_once, carry_out, sweep
from alignattn.experiments.seeds_at_once import SeededAlignment, fit
from alignattn.experiments.tasks.graph import BlockClassification, GraphModel, GraphTraining
from alignattn.experiments.training import Place, execute_together, train, train_together
from alignattn.results import read_all

CPU = Place(device="cpu")
SMALL = {"data": {"nodes": 60, "train": 3, "validation": 12}, "model": {"heads": 2, "width": 4}, "train": {"steps": 12}}
NUMBERS = {"align": {"weights": [0.3]}}


def small_task(**train):
    data = Blocks(nodes=60, train=3, validation=12)
    return BlockClassification(
        data, GraphModel(heads=2, width=4), GraphTraining(**train), data_dir=None, device=torch.device("cpu")
    )


def by_hand(losses, accuracies, patience):
    """The rule as GAT's authors wrote it, one seed: the epoch that is kept, and the one that training ends with."""
    least, most, waited, kept = math.inf, 0.0, 0, 0
    for epoch, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=1):
        if accuracy >= most or loss <= least:
            if accuracy >= most and loss <= least:
                kept = epoch
            most, least, waited = max(accuracy, most), min(loss, least), 0
        else:
            waited += 1
            if waited == patience:
                return kept, epoch
    return kept, epoch


def test_early_stopping_on_a_curve_that_can_be_read():
    stopping = EarlyStopping(1, 2, torch.device("cpu"))
    #        both   loss    neither accuracy both    neither neither (over: nothing counts any more)
    losses = [1.0, 0.9, 0.95, 0.95, 0.9, 1.0, 1.0, 0.1]
    accuracies = [0.5, 0.4, 0.4, 0.6, 0.6, 0.5, 0.5, 1.0]
    kept = [
        bool(stopping.look(epoch, *torch.tensor([[loss], [accuracy]], dtype=torch.float64)))
        for epoch, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), start=1)
    ]
    assert kept == [True, False, False, False, True, False, False, False]
    assert (stopping.kept.item(), stopping.epochs.item(), stopping.over.item()) == (5, 7, True)
    assert stopping.least_loss.item() == 0.9 and stopping.most_accurate.item() == 0.6


def test_early_stopping_of_many_seeds_is_each_one_s_own():
    generator = torch.Generator().manual_seed(0)
    epochs, seeds, patience = 80, 40, 4
    falling = torch.linspace(1, 0.4, epochs)[:, None]
    losses = (falling + 0.2 * torch.rand(epochs, seeds, generator=generator)).double()
    accuracies = ((1 - falling + 0.2 * torch.rand(epochs, seeds, generator=generator)) * 20).round().double() / 20
    stopping = EarlyStopping(seeds, patience, torch.device("cpu"))
    for epoch in range(epochs):
        stopping.look(epoch + 1, losses[epoch], accuracies[epoch])
    expected = [by_hand(losses[:, s].tolist(), accuracies[:, s].tolist(), patience) for s in range(seeds)]
    assert list(zip(stopping.kept.tolist(), stopping.epochs.tolist(), strict=True)) == expected
    assert len({end for _, end in expected}) > 5 and min(end for _, end in expected) < epochs


def test_nan_is_never_good():
    stopping = EarlyStopping(1, 2, torch.device("cpu"))
    for epoch, loss in enumerate([1.0, math.nan, math.nan], start=1):
        stopping.look(epoch, torch.tensor([loss]), torch.tensor([0.5 if epoch == 1 else 0.4]))
    assert stopping.over.item() and stopping.kept.item() == 1 and stopping.least_loss.item() == 1.0


@pytest.mark.parametrize(
    ("method", "preset"),
    [(None, ""), ("gan", "paper"), ("ot", "paper"), ("ct", "paper"), ("mmd", "paper"), ("ct", "stable")],
)
def test_seeds_that_are_trained_together_come_to_what_they_come_to_alone(method, preset):
    task = small_task(steps=6)

    def fitted(seeds):
        alignment = None if method is None else Alignment(method, 0.3, preset)
        return fit(task, seeds, alignment, training.nobody, most=30)

    together, alone = fitted((3, 1, 4)), fitted((1,))
    for (name, ours), theirs in zip(
        task.only(together.models, 1).named_parameters(), alone.models.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    one, other = together.courses[1].curve, alone.courses[0].curve
    assert [step for step, _, _ in one] == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=1e-3)
    assert method is None or all(term != 0 for _, _, term in one)


@pytest.mark.parametrize("method", [None, "gan", "ct", "mmd"])
def test_seeds_that_are_over_leave_and_the_others_come_to_the_same(method, monkeypatch):
    task = small_task(steps=40, patience=3)
    validate, sizes = task.validate, []

    def seen(models):
        sizes.append(len(models.seeds))
        assert all(len(parameter) == len(models.seeds) for parameter in models.parameters())
        return validate(models)

    monkeypatch.setattr(task, "validate", seen)
    monkeypatch.setattr(seeds_at_once, "ASKED", 1)

    def fitted(seeds):
        alignment = None if method is None else Alignment(method, 0.3, "paper")
        return fit(task, seeds, alignment, training.nobody, most=30)

    seeds = (3, 1, 4, 0, 5, 2)
    together = fitted(seeds)
    assert sizes[0] == 6 and min(sizes) < 5 and sizes == sorted(sizes, reverse=True)
    for place, seed in enumerate(seeds):
        alone = fitted((seed,))
        told, own = together.courses[place].told["stopping"], alone.courses[0].told["stopping"]
        assert {**told, "seeds_together": 1} == own
        for ours, theirs in zip(task.only(together.models, place).parameters(), alone.models.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
        one, other = torch.tensor(together.courses[place].curve), torch.tensor(alone.courses[0].curve)
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_every_seed_has_networks_of_its_own_and_they_learn():
    task, alignment = small_task(steps=3), Alignment("ct", 0.3, "paper")
    aligned = SeededAlignment(alignment, (0, 1, 2), task.device, None)
    models = task.make_models((0, 1, 2))
    (task.losses(models, aligned.watch).sum() + aligned.loss()).backward()
    names = {name for name, _ in alignment.matcher.rows}
    assert names == {f"{layer}/seed {seed}" for layer in ("first", "second") for seed in range(3)}
    before = [p.detach().clone() for p in alignment.parameters()]
    torch.optim.Adam(models.parameters()).step()  # the adversary steps with it
    assert all(
        (one != other).flatten(1).any(1).all() for one, other in zip(before, alignment.parameters(), strict=True)
    )


def test_every_seed_draws_its_own_nodes_the_same_of_queries_and_keys(monkeypatch):
    def drawn(seeds, epochs=2):
        alignment, seen = Alignment("mmd", 0.5, "paper"), {}
        aligned = SeededAlignment(alignment, seeds, torch.device("cpu"), 10)
        monkeypatch.setattr(
            alignment,
            "record",
            lambda query, key, name, edges: seen.setdefault(name, []).append((query[0, 0], key[0, 0])),
        )
        number = torch.arange(40.0).view(1, 1, 40, 1).expand(len(seeds), 2, 40, 3)
        for _ in range(epochs):
            aligned.watch("first", number, number + 100)
        for calls in seen.values():
            assert all(torch.equal(key, query + 100) for query, key in calls)
        return {name: [query[:, 0].tolist() for query, _ in calls] for name, calls in seen.items()}

    together = drawn((3, 1, 4))
    first = [epochs[0] for epochs in together.values()]
    assert all(len(set(nodes)) == 10 for nodes in first) and len({tuple(nodes) for nodes in first}) == 3
    assert all(epochs[0] != epochs[1] for epochs in together.values())
    assert drawn((1,))["first/seed 1"] == together["first/seed 1"]


def test_the_term_of_a_seed_is_that_of_its_own_layers():
    task = small_task()
    for reduction, count in (("mean", 2), ("sum", 1)):
        alignment = Alignment("mmd", 0.5, "paper", reduction=reduction)
        aligned = SeededAlignment(alignment, (0, 1), task.device, None)
        task.losses(task.make_models((0, 1)), aligned.watch)
        total = aligned.loss()
        parts = alignment.parts
        expected = [0.5 / count * (parts[f"first/seed {s}"] + parts[f"second/seed {s}"]) for s in (0, 1)]
        torch.testing.assert_close(torch.stack(aligned.terms()), torch.stack(expected))
        torch.testing.assert_close(total.detach(), sum(expected))


def test_the_epoch_that_is_kept_is_the_one_that_is_tested(monkeypatch):
    task = small_task(steps=5, patience=2)
    seen, curve = [], iter([(1.0, 0.5), (0.9, 0.6), (1.0, 0.1), (1.0, 0.1), (0.1, 1.0)])

    def told(models):
        seen.append(models.first.weight.detach().clone())
        return tuple(torch.tensor([value, value]) for value in next(curve))

    monkeypatch.setattr(task, "validate", told)
    monkeypatch.setattr(seeds_at_once, "ASKED", 1)
    result = fit(task, (0, 1), None, training.nobody)
    assert len(seen) == 4  # two epochs of patience after the second
    torch.testing.assert_close(result.models.first.weight.detach(), seen[1])
    assert result.courses[0].told["stopping"] == {
        "epochs": 4,
        "kept": 2,
        "stopped": True,
        "best_validation_accuracy": 60.0,
        "seeds_together": 2,
    }


def test_l2_is_a_gradient_of_the_penalty():
    """Adam's first step goes against the sign of gradient + l2 · weight; with a large l2, of the weight."""
    plain, decayed = (fit(small_task(steps=1, l2=l2, rate=1e-3), (0,), None, training.nobody) for l2 in (0.0, 1e6))
    first = small_task().make_models((0,)).first.weight
    moved = decayed.models.first.weight - first
    torch.testing.assert_close(moved, -1e-3 * first.sign(), atol=1e-6, rtol=1e-3)
    assert not torch.allclose(plain.models.first.weight - first, moved, atol=1e-4)


def test_nan_names_step_and_seed(monkeypatch):
    task = small_task(steps=3)
    losses = task.losses
    monkeypatch.setattr(task, "losses", lambda *args: losses(*args) * torch.tensor([1.0, math.nan]))
    with pytest.raises(NonFiniteError, match=r"At step 1 the task's loss of seed 7 is nan"):
        fit(task, (0, 7), None, training.nobody)


def tiny(tmp_path, name="blocks", **more):
    recipe = recipes.load(name, [SMALL if name == "blocks" else {"train": {"steps": 3}}, NUMBERS, more])
    return sweep(recipe, CPU, tmp_path)


def test_a_recipe_from_start_to_end(tmp_path):
    plan = tiny(tmp_path, seeds=2)
    outcome = carry_out(plan, quiet=True)
    assert not outcome.failed and len(outcome.finished) == 2 * 5
    for result in read_all([tmp_path]):
        assert {"accuracy", "ece", "nll", "brier", "mmd", "mmd_apart", "mmd_unit"} <= set(result.metrics)
        assert {name: len(heads) for name, heads in result.details["mmd"].items()} == {"first": 2, "second": 1}
        assert result.metrics["mmd"] == pytest.approx(sum(map(sum, result.details["mmd"].values())), abs=1e-4)
        assert result.details["curve"] and result.details["stopping"]["kept"] >= 1
    assert carry_out(plan, quiet=True).before == 10


def test_neighbourhoods_are_followed_in_recipes_from_all_nodes():
    """A recipe's number of nodes is for the other form; seeds come together to what they come to alone."""
    for name in ("cora", "blocks"):
        align = recipes.load(name, [{"align": {"ct": {"matched_over": "neighbourhoods"}}}]).align
        assert "max_tokens" not in align.options_for("ct") and align.config("ct", 0.3).matcher.matched_over != "all"
    task = small_task(steps=4)

    def fitted(seeds, **options):
        return fit(task, seeds, Alignment("ct", 0.3, "paper", **options), training.nobody)

    together, alone = (fitted(seeds, matched_over="neighbourhoods") for seeds in ((3, 1, 4), (1,)))
    terms = [term for _, _, term in together.courses[1].curve]
    assert terms == pytest.approx([term for _, _, term in alone.courses[0].curve], rel=1e-3)
    assert terms != pytest.approx([term for _, _, term in fitted((1,)).courses[0].curve], rel=1e-2)
    assert len(task.edges[0]) == task.graph.edges.shape[1] + 60  # each node attends to itself as well


def test_runs_that_are_executed_together_leave_each_its_result(tmp_path):
    plan = tiny(tmp_path, seeds=3)
    runs = [run for run in plan.recipe.runs() if run.method == "ct"]
    steps = []
    together = execute_together(runs, CPU, plan.inputs, steps.append)
    assert [result.seed for result in together] == [0, 1, 2] and sum(steps) == 3 * 12
    for result, run in zip(together, runs, strict=True):
        alone = training.execute(run, CPU, plan.inputs)
        assert alone.metrics == pytest.approx(result.metrics, abs=2e-3)
        assert result.details["stopping"]["seeds_together"] == 3


def test_a_seed_that_fails_costs_no_other(tmp_path, monkeypatch):
    plan = tiny(tmp_path, seeds=3)
    runs = [run for run in plan.recipe.runs() if run.method == "soft"]
    losses, calls = BlockClassification.losses, {}

    def failing(task, models, watch=None):
        calls[models] = calls.get(models, 0) + 1
        bad = [seed == 1 and calls[models] == 6 for seed in models.seeds]
        return losses(task, models, watch) * torch.tensor([math.nan if b else 1.0 for b in bad])

    monkeypatch.setattr(BlockClassification, "losses", failing)
    steps = []
    results = execute_together(runs, CPU, plan.inputs, steps.append)
    assert [result.failed for result in results] == [False, True, False]
    assert "At step 6 the task's loss of seed 1 is nan" in results[1].error
    assert sum(steps) == 2 * 12 + 5  # what was done together is taken back


def test_which_runs_are_trained_at_once(monkeypatch):
    graph = recipes.load("blocks", [{"seeds": 5, "align": {"methods": ["soft", "mmd"], "weights": [0.1, "auto"]}}])

    def grouped(recipe):
        parts = at_once(recipe.runs(), Place(device="meta"), most=3)
        return [(part[0].method, part[0].weight, [run.seed for run in part]) for part in parts]

    groups = grouped(graph)
    whole = [group for group in groups if group[1] in (None, 0.1)]
    assert whole == [  # whole pairs, should the sweep be interrupted
        ("soft", None, [0, 1, 2]),
        ("mmd", 0.1, [0, 1, 2]),
        ("soft", None, [3, 4]),
        ("mmd", 0.1, [3, 4]),
    ]
    assert sorted(seeds for _, weight, seeds in groups if isinstance(weight, str)) == [[0], [1], [2], [3], [4]]
    assert all(len(part) == 1 for part in at_once(graph.runs(), CPU))
    assert all(len(part) == 1 for part in at_once(recipes.load("digits").runs(), Place(device="meta")))


def test_the_auto_weight_sees_the_task_s_gradient(tmp_path):
    plan = tiny(tmp_path, seeds=1, align={"weights": ["auto"], "methods": ["mmd"]}, train={"steps": 60})
    (trained,) = train_together(plan.recipe.runs(), CPU)  # where it is blind it says so, and that is an error here
    assert trained.course.curve[-1][0] == 60


def test_rebasing_is_refused_with_a_sentence(tmp_path):
    plan = tiny(tmp_path, align={"rebase": True, "methods": ["mmd"]})
    with pytest.raises(ConfigError, match="GAT's adds them up"):
        train(plan.recipe.runs()[0], CPU)


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_the_paper_s_settings(name):
    recipe = recipes.load(name)
    pubmed = name == "pubmed"
    assert (recipe.model.heads, recipe.model.width, recipe.model.dropout) == (8, 8, 0.6)
    assert recipe.model.value_dropout == 0.6
    assert recipe.model.output_heads == (8 if pubmed else 1)
    assert (recipe.train.rate, recipe.train.l2) == ((0.01, 1e-3) if pubmed else (0.005, 5e-4))
    assert recipe.train.patience == 100 and len(recipe.seeds) == 30
    assert recipe.align.methods == ("soft", "gan", "ot", "ct", "mmd")
    config = recipe.align.config("ct", None)
    assert config.weight == 0.01 and config.reduction == "sum"
    reference = {"table": recipe.paper.table, "column": recipe.paper.column}
    soft = {"cora": 83.00, "citeseer": 72.50, "pubmed": 77.26}[name]
    assert paper_value(reference, "accuracy", "soft").mean == soft
    assert paper_value(reference, "accuracy", "ct").mean > paper_value(reference, "accuracy", "gan").mean > soft
    assert paper_value(reference, "accuracy", "ot") is None


def test_planetoid_needs_a_folder_and_names_what_is_missing(tmp_path, capsys):
    assert cli.main(["run", "cora"]) == 1
    assert "Where is Cora? Name the folder that holds it: --data-dir FOLDER." in capsys.readouterr().err
    assert cli.main(["run", "cora", "--data-dir", str(tmp_path)]) == 1
    assert "lacks ind.cora.x" in capsys.readouterr().err


def test_without_torch_geometric_an_error_says_what_to_install(tmp_path, monkeypatch):
    from alignattn.datasets.graphs import PARTS, load_graph
    from alignattn.models.gat import GAT

    for part in PARTS:
        (tmp_path / f"ind.cora.{part}").touch()
    for name in ("torch_geometric", "torch_geometric.io", "torch_geometric.nn"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AlignmentError, match=r"Cora needs torch-geometric: pip install 'alignattn\[graph\]'"):
        load_graph("cora", tmp_path)
    with pytest.raises(AlignmentError, match=r"PyG's layers needs torch-geometric: pip install 'alignattn\[graph\]'"):
        GAT(3, 2)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ({"model": {"dropout": 1.0}}, "model.dropout"),
        ({"model": {"heads": 0}}, "model.heads"),
        ({"train": {"patience": 0}}, "train.patience"),
        ({"train": {"l2": -1.0}}, "train.l2"),
        ({"train": {"batch": 3}}, "batch"),
    ],
)
def test_settings_that_cannot_be_are_refused(override, told):
    with pytest.raises(ConfigError, match=told):
        recipes.load("blocks", [override])


def test_demo_has_a_graph_face(capsys, tmp_path):
    arguments = ["demo", "--graph", "--seeds", "1", "--steps", "3", "--workers", "1", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert all(method in out for method in ("soft", "gan", "ot", "ct", "mmd"))
    for name in ("clouds.png", "reliability.png", "embeddings.png", "neighbourhood.png", "report.html", "table.txt"):
        assert (tmp_path / name).stat().st_size > 500
    results = read_all([tmp_path / "blocks"])
    assert len(results) == 5 and {r.command for r in results} == {"alignattn demo --graph --seeds 1 --steps 3"}
