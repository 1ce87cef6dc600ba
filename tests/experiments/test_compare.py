"""Which results are set beside which: pairs, groups, names and labels, and the paper's cells."""

import itertools
import math
import random
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from alignattn.config import resolve
from alignattn.errors import ConfigError, DataError
from alignattn.experiments.compare import Comparison, Row, compare, metric
from alignattn.experiments.tables import FORMATS
from alignattn.results import Result

pytestmark = pytest.mark.filterwarnings("error")

RECIPE = {
    "task": "digits",
    "description": "tiny",
    "data": {"noise": 0.5, "limit": None},
    "model": {"name": "vit", "width": 8},
    "train": {"steps": 3, "rate": 0.1},
    "align": {"ramp": 0.0},
    "report": ["accuracy"],
}


def run(method="soft", seed=0, accuracy=None, *, weight=0.1, preset="stable", options=None, ramp=0.0, **changes):
    """A result as the runner writes it; `options` are those of `align`."""
    soft = method == "soft"
    config = None if soft else resolve(method, weight, preset, options or {})
    values = {
        "name": "digits",
        "recipe": RECIPE | {"align": {"ramp": ramp}},
        "method": method,
        "preset": None if soft else preset,
        "weight": None if soft else weight,
        "reduction": None if config is None else config.reduction,
        "alignment": None if config is None else asdict(config),
        "seed": seed,
        "metrics": {} if accuracy is None else {"accuracy": accuracy},
        "inputs": {"digits": "ab" * 32},
        "machine": {"cores": 2},
        "command": "alignattn run digits",
        "finished": "2026-11-15T06:00:00+00:00",
    }
    return Result(**(values | changes))


def recipe(**tables):
    """The recipe with keys of its tables, or whole entries, changed."""
    return RECIPE | {k: {**RECIPE.get(k, {}), **v} if isinstance(v, dict) else v for k, v in tables.items()}


def one(results, metrics=None) -> Comparison:
    (found,) = compare(results, metrics)
    return found


def rows(results, metrics=None) -> dict[str, Row]:
    return {row.label: row for row in one(results, metrics).rows}


# Pairs


def test_means_and_deviations_by_hand():
    found = rows([run("soft", s, x) for s, x in enumerate((80, 82, 87))] + [run("mmd", 0, 90)])
    cell = found["soft"].cells["accuracy"]
    # mean 249 / 3 = 83; squares about it 9, 1, 16: deviation √(26 / 2)
    assert (cell.mean, cell.seeds) == (83, 3)
    assert cell.deviation == pytest.approx(math.sqrt(13))
    assert cell.difference is None and math.isnan(cell.p_holm)
    single = found["mmd 0.1"].cells["accuracy"]
    assert single.mean == 90 and single.seeds == 1 and math.isnan(single.deviation)


def test_only_seeds_that_both_have_are_paired_and_all_count_in_the_mean():
    soft = {0: 80.0, 1: 70.0, 2: 90.0, 3: 60.0, 9: 10.0}
    aligned = {1: 71.0, 2: 93.0, 3: 65.0, 7: 50.0}
    found = rows([run("soft", s, x) for s, x in soft.items()] + [run("ot", s, x) for s, x in aligned.items()])
    assert found["soft"].seeds == (0, 1, 2, 3, 9) and found["ot 0.1"].seeds == (1, 2, 3, 7)
    assert found["soft"].cells["accuracy"].mean == (80 + 70 + 90 + 60 + 10) / 5
    cell = found["ot 0.1"].cells["accuracy"]
    assert cell.mean == (71 + 93 + 65 + 50) / 4 and cell.seeds == 4
    assert cell.difference.seeds == 3 and cell.difference.mean == (1 + 3 + 5) / 3
    assert cell.difference.p == pytest.approx(stats.ttest_rel([71, 93, 65], [70, 90, 60]).pvalue)


def test_a_metric_that_some_seeds_lack_is_paired_over_the_rest():
    soft = [run("soft", s, metrics={"accuracy": 80.0, "ece": 5.0 + s}) for s in range(4)]
    aligned = [run("gan", s, metrics={"accuracy": 81.0} | ({"ece": 4.0} if s else {})) for s in range(4)]
    cells = rows([*soft, *aligned], ["accuracy", "ece"])["gan 0.1"].cells
    assert cells["accuracy"].difference.seeds == 4
    assert cells["ece"].difference.seeds == cells["ece"].seeds == 3
    assert cells["ece"].difference.mean == 4 - (6 + 7 + 8) / 3


def test_lower_is_better_where_the_metric_says_so():
    soft = [run("soft", s, metrics={"accuracy": 80.0 + s, "ece": 9.0 + s}) for s in range(3)]
    aligned = [run("ct", s, metrics={"accuracy": 70.0 + s, "ece": 3.0 + s}) for s in range(3)]
    cells = rows([*soft, *aligned], ["accuracy", "ece"])["ct 0.1"].cells
    assert cells["accuracy"].difference.verdict == "worse" and cells["ece"].difference.verdict == "better"


@pytest.mark.parametrize("others", [[], [run("soft", 5, 80.0)], [run("soft", 0, error="ValueError: no")]])
def test_without_a_soft_run_of_the_seed_there_is_no_difference(others):
    cell = rows([run("mmd", s, 80.0 + s) for s in range(3)] + others)["mmd 0.1"].cells["accuracy"]
    assert cell.mean == 81 and cell.difference is None and math.isnan(cell.p_holm)


def test_holm_counts_the_kinds_of_attention_by_metric():
    """Differences 3 4 5 and 2 4 6 over soft: raw p, then by two for the smaller and by one for the larger."""
    soft = [run("soft", s, metrics={"accuracy": 80.0, "ece": 5.0}) for s in range(3)]
    first = [run("gan", s, metrics={"accuracy": 83.0 + s, "ece": 5.5 + s}) for s in range(3)]
    second = [run("ot", s, metrics={"accuracy": 82.0 + 2 * s}) for s in range(3)]
    comparison = one([*soft, *first, *second], ["accuracy", "ece"])
    _, gan, ot = comparison.rows
    small, large = (row.cells["accuracy"] for row in (gan, ot))
    assert small.difference.p < large.difference.p
    assert small.p_holm == pytest.approx(2 * small.difference.p)
    assert large.p_holm == pytest.approx(max(2 * small.difference.p, large.difference.p))
    assert gan.cells["ece"].p_holm == pytest.approx(gan.cells["ece"].difference.p)
    assert comparison.tests == 3


def test_tests_that_were_not_made_are_not_counted():
    results = [run("soft", s, 80.0) for s in range(3)] + [run("gan", s, 81.0 + s) for s in range(2)]
    assert one(results).tests == 0
    assert one([*results, run("gan", 2, 85.0), run("ot", 0, 3.0)]).tests == 1


# Times


def test_step_ratio_is_paired_seed_by_seed():
    soft = [run("soft", s, 80.0, times={"step": t}) for s, t in enumerate((1.0, 2.0, 4.0))]
    aligned = [run("ot", s, 80.0, times={"step": t}) for s, t in enumerate((1.9, 4.0, 8.4))]
    found = rows([*soft, *aligned], ["step_ratio"])
    cell = found["ot 0.1"].cells["step_ratio"]
    assert cell.mean == pytest.approx((1.9 + 2.0 + 2.1) / 3)  # and not 14.3 / 7
    assert cell.difference.mean == pytest.approx(1.0) and cell.difference.verdict == "worse"
    assert found["soft"].cells["step_ratio"].mean == 1


@pytest.mark.parametrize(
    "soft",
    [
        run("soft", 1, 80.0, times={"step": 1.0}),  # another seed
        run("soft", 0, 80.0, times={}),
        run("soft", 0, 80.0, times={"step": 0.0}),
        run("soft", 0, 80.0, times={"step": 1.0}, machine={"cores": 64}),  # another machine
        run("soft", 0, error="ValueError: no"),
    ],
)
def test_no_step_ratio_where_there_is_nothing_to_divide_by(soft):
    found = rows([soft, run("mmd", 0, 80.0, times={"step": 2.0})], ["accuracy", "step_ratio"])
    assert "step_ratio" not in found["mmd 0.1"].cells and found["mmd 0.1"].cells["accuracy"].mean == 80
    assert "step_ratio" not in rows([soft, run("mmd", 0, 80.0)], ["step_ratio"])["mmd 0.1"].cells


# Groups


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"recipe": recipe(data={"noise": 0.7})}, ["digits (data.noise=0.5)", "digits (data.noise=0.7)"]),
        ({"recipe": recipe(data={"limit": 9})}, ["digits (data.limit=9)", "digits (data.limit=None)"]),
        ({"recipe": recipe(model={"width": 16})}, ["digits (model.width=16)", "digits (model.width=8)"]),
        (
            {"recipe": recipe(train={"rate": 0.2, "steps": 4})},
            ["digits (train.steps=3, train.rate=0.1)", "digits (train.steps=4, train.rate=0.2)"],
        ),
        ({"recipe": recipe(task="text")}, ["digits (task=digits)", "digits (task=text)"]),
        ({"inputs": {"digits": "cd" * 32}}, ["digits [digits=abababab]", "digits [digits=cdcdcdcd]"]),
        (
            {"inputs": {"digits": "ab" * 32, "weights": "ef" * 32}},
            ["digits [other inputs]", "digits [weights=efefefef]"],
        ),
        # A setting that a newer version has, which stands for nothing that was asked for.
        ({"recipe": recipe(train={"clip": None})}, ["digits", "digits (train.clip=None)"]),
        ({"name": "mine"}, ["digits", "mine"]),
    ],
)
def test_what_differs_in_more_than_attention_is_never_compared(change, names):
    here = [run("soft", s, 80.0 + s) for s in range(3)]
    there = [run("mmd", s, 90.0 + s, **change) for s in range(3)]
    for results in ([*here, *there], [*there, *here]):
        found = compare(results)
        assert [c.name for c in found] == names
        assert sorted(c.rows[0].label for c in found) == ["mmd 0.1", "soft"]
        assert all(len(c.rows) == 1 and c.rows[0].cells["accuracy"].difference is None for c in found)


def test_names_tell_several_groups_apart():
    settings_ = [recipe(), recipe(data={"noise": 0.7}), recipe(train={"steps": 9})]
    other = {"digits": "cd" * 32}
    results = [run("soft", 0, 80.0, recipe=r, inputs=i) for r in settings_ for i in ({"digits": "ab" * 32}, other)]
    names = [c.name for c in compare([*results, run("soft", 0, 80.0, name="mine")])]
    assert len(set(names)) == len(names) == 7
    assert "mine" in names  # alone of its name, it needs no more
    assert "digits (data.noise=0.7, train.steps=3) [digits=cdcdcdcd]" in names


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": recipe(description="other words", seeds=[4], report=["accuracy"])},
        {"versions": {"torch": "9"}},
        {"commit": "d" * 40},
        {"command": "alignattn run digits --seeds 9"},
        {"machine": {"cores": 64}},
    ],
)
def test_what_does_not_decide_the_outcome_parts_nothing(change):
    found = rows([run("soft", 0, 80.0), run("mmd", 0, 81.0, **change)])
    assert found["mmd 0.1"].cells["accuracy"].difference.mean == 1


def test_soft_attention_is_one_whatever_the_recipe_says_about_alignment():
    """A ramp is alignment's: a soft run of a recipe that has one is as good a baseline as any."""
    results = [run("soft", 0, 80.0), run("soft", 1, 80.0, ramp=0.5), run("soft", 2, 80.0, ramp=0.5)]
    found = rows([*results, *[run("mmd", s, 81.0 + s, ramp=0.5) for s in range(3)]])
    assert list(found) == ["soft", "mmd 0.1"]
    assert found["mmd 0.1"].cells["accuracy"].difference.seeds == 3


def test_tables_come_in_the_order_of_their_names_and_rows_in_that_of_the_methods():
    methods = ["mmd", "zeta", "soft", "ct", "alpha", "gan", "ot"]  # zeta and alpha: matchers of one's own
    known = {m: run(m if m not in ("zeta", "alpha") else "mmd", 0, 80.0) for m in methods}
    found = compare([replace(r, name=name, method=m) for name in ("b", "a") for m, r in known.items()])
    assert [c.name for c in found] == ["a", "b"]
    assert [row.method for row in found[0].rows] == ["soft", "gan", "ot", "ct", "mmd", "alpha", "zeta"]
    weights = (2.0, 0.01, 10.0, 0.1)
    assert [row.weight for row in one([run("ot", 0, 1.0, weight=w) for w in weights]).rows] == sorted(weights)


# Runs that are there twice, and runs that failed


def at(hour: int) -> str:
    return f"2026-11-15T{hour:02}:00:00+00:00"


def test_of_two_that_are_alike_the_newer_counts():
    results = [run("soft", 0, 10.0 * hour, finished=at(hour)) for hour in (3, 9, 1)]
    for order in itertools.permutations(results):
        cell = rows(order)["soft"].cells["accuracy"]
        assert cell.mean == 90 and cell.seeds == 1


@pytest.mark.parametrize(("success", "failure"), [(9, 3), (3, 9)])
def test_the_later_of_success_and_failure_counts(success, failure):
    results = [
        run("soft", 0, 80.0, finished=at(success)),
        run("soft", 0, error="ValueError: no\n  at train.py", finished=at(failure)),
        run("soft", 1, 70.0, finished=at(5)),
    ]
    for order in itertools.permutations(results):
        row = rows(order)["soft"]
        if success > failure:
            assert (row.seeds, row.failed, row.cells["accuracy"].mean) == ((0, 1), (), 75)
        else:
            assert (row.seeds, row.failed, row.cells["accuracy"].mean) == ((1,), ("seed 0: ValueError: no",), 70)


def test_failed_runs_are_shown_and_in_no_mean():
    results = [run("soft", s, 80.0 + s) for s in range(3)]
    results += [run("gan", s, 90.0, error="OutOfMemoryError: 3 GiB\nat x", finished=at(9 - s)) for s in (4, 2)] + [
        run("gan", 0, 81.0)
    ]
    row = rows(results)["gan 0.1"]
    assert row.seeds == (0,)
    assert row.failed == ("seed 2: OutOfMemoryError: 3 GiB", "seed 4: OutOfMemoryError: 3 GiB")
    assert row.cells["accuracy"].mean == 81 and row.cells["accuracy"].difference.seeds == 1


@pytest.mark.parametrize(
    ("error", "told"), [("", "seed 0: "), ("\n\nbroken\n", "seed 0: broken"), ("a\rb", "seed 0: a")]
)
def test_any_text_can_be_an_error(error, told):
    assert one([run("mmd", 0, error=error)]).rows[0].failed == (told,)


def test_all_runs_may_have_failed():
    comparison = one([run(m, s, error="ValueError: no") for m in ("soft", "mmd") for s in range(2)])
    assert comparison.metrics == ("accuracy",) and comparison.tests == 0
    assert [(row.label, row.seeds, len(row.failed), dict(row.cells)) for row in comparison.rows] == [
        ("soft", (), 2, {}),
        ("mmd 0.1", (), 2, {}),
    ]
    assert one([run("soft", 0, error="ValueError: no")], ["f1"]).metrics == ("f1",)  # it might have had it
    for form in FORMATS.values():
        assert "mmd 0.1" in form([comparison])


def test_nothing_to_compare_is_said():
    with pytest.raises(DataError, match="no results"):
        compare([])


# Labels


@pytest.mark.parametrize(
    ("kinds", "labels"),
    [
        ([{}], ["mmd 0.1"]),
        ([{"weight": 0.1}, {"weight": 1.0}, {"weight": 1e-5}], ["mmd 1e-05", "mmd 0.1", "mmd 1"]),
        ([{"weight": 0.1}, {"weight": 0.1000001}], ["mmd 0.1", "mmd 0.1000001"]),
        ([{"preset": "stable"}, {"preset": "paper"}], ["mmd 0.1 paper", "mmd 0.1 stable"]),
        ([{"preset": "stable"}, {"preset": "paper", "weight": 0.01}], ["mmd 0.01 paper", "mmd 0.1 stable"]),
        ([{}, {"ramp": 0.5}], ["mmd 0.1 ramp=0.0", "mmd 0.1 ramp=0.5"]),
        (
            [{}, {"options": {"generator": "projections"}}],
            ["mmd 0.1 generator=model", "mmd 0.1 generator=projections"],
        ),
        (
            [{}, {"options": {"generator": "projections"}, "ramp": 0.2}],
            ["mmd 0.1 generator=model ramp=0.0", "mmd 0.1 generator=projections ramp=0.2"],
        ),
        (
            [{}, {"method": "ot"}, {"method": "ot", "options": {"epsilon": 0.2}}],  # one method's options
            ["ot 0.1 epsilon=0.2", "ot 0.1 epsilon=1.0", "mmd 0.1"],
        ),
        (
            # What most have is not said.
            [{}, {"weight": 0.2}, {"ramp": 0.5}, {"options": {"generator": "projections"}}],
            ["mmd 0.1", "mmd 0.2", "mmd 0.1 ramp=0.5", "mmd 0.1 generator=projections"],
        ),
        (
            # What a preset sets is said by its name.
            [{"method": "ot"}, {"method": "ot", "preset": "paper"}, {"preset": "paper"}],
            ["ot 0.1 paper", "ot 0.1 stable", "mmd 0.1 paper"],
        ),
    ],
)
def test_labels_are_short_and_tell_kinds_apart(kinds, labels):
    results = [run("soft", 0, 80.0)] + [run(**({"method": "mmd"} | kind), accuracy=81.0) for kind in kinds]
    for order in (results, results[::-1]):
        found = [row.label for row in one(order).rows]
        assert found[0] == "soft" and sorted(found[1:]) == sorted(labels) and len(found) == len(kinds) + 1


def test_a_run_from_a_file_and_one_of_just_now_are_one_kind():
    """A file has lists where the configuration has tuples."""
    now = [run("gan", 0, 80.0), run("gan", 0, 80.0, weight=1.0)]
    assert isinstance(now[0].alignment["adversary_betas"], tuple)
    read = [Result.from_json(result.to_json()) for result in now]
    assert list(rows([now[0], read[1]])) == list(rows(now)) == ["gan 0.1", "gan 1"]
    assert rows([now[0], replace(read[0], seed=1)])["gan 0.1"].seeds == (0, 1)


def test_an_option_that_older_files_lack_parts_kinds():
    old = run("gan", 0, 80.0, options={"adversary_optimizer": None})
    less = {k: v for k, v in old.alignment.items() if k != "adversary_optimizer"}
    assert sorted(rows([old, replace(old, alignment=less)])) == ["gan 0.1", "gan 0.1 adversary_optimizer=None"]


kinds_ = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["soft", "gan", "ot", "ct", "mmd"]),
        "weight": st.sampled_from([0.1, 0.10000001, 1.0]),
        "preset": st.sampled_from(["stable", "paper"]),
        "ramp": st.sampled_from([0.0, 0.5]),
        "options": st.sampled_from([{}, {"generator": "projections"}, {"mask_padding": False}]),
    }
)


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(kinds_, min_size=1, max_size=12))
def test_no_two_labels_are_alike(kinds):
    found = one([run(**kind, accuracy=80.0) for kind in kinds]).rows
    labels = [row.label for row in found]
    assert len(set(labels)) == len(labels)
    aligned = {repr(sorted(kind.items(), key=str)) for kind in kinds if kind["method"] != "soft"}
    assert len(labels) == len(aligned) + any(kind["method"] == "soft" for kind in kinds)


# Metrics


def test_what_the_recipe_reports_is_shown_unless_others_are_asked_for():
    metrics = {"accuracy": 80.0, "ece": 3.0, "nll": 0.5}
    result = run("soft", 0, metrics=metrics, recipe=recipe(report=["ece", "accuracy"]))
    assert one([result]).metrics == ("ece", "accuracy")
    assert one([result], ["nll", "ece", "nll"]).metrics == ("nll", "ece")
    assert one([replace(result, recipe=recipe(report=[]))]).metrics == ("accuracy",)


def test_the_newest_run_says_what_is_reported():
    old = run("soft", 0, metrics={"accuracy": 80.0, "ece": 3.0}, finished=at(1))
    new = run("mmd", 0, metrics={"accuracy": 80.0, "ece": 3.0}, finished=at(2), recipe=recipe(report=["ece"]))
    assert one([old, new]).metrics == one([new, old]).metrics == ("ece",)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("acuracy", "accuracy"), ("acuracy@a_very_long_name_of_data", "accuracy"), ("ecee", "ece")],
)
def test_an_unknown_metric_is_refused_with_the_nearest(name, nearest):
    for results in ([run("soft", 0, 80.0)], [run("soft", 0, error="ValueError: no")], []):
        with pytest.raises(ConfigError, match="Unknown metric") as error:
            compare(results, [name])
        assert f"Did you mean {nearest!r}?" in str(error.value) and ", f1," in str(error.value)


def test_a_metric_that_no_result_has_is_refused_with_those_there_are():
    results = [run("soft", 0, metrics={"ece": 1.0, "accuracy@noisy": 2.0})]
    for name in ("f1", "accuracy", "ece@noisy"):
        with pytest.raises(ConfigError, match=f"metric '{name}'. There are: accuracy@noisy, ece, step_ratio"):
            compare(results, [name])


def test_what_one_group_lacks_another_may_have():
    found = compare([run("soft", 0, 80.0), run("soft", 0, metrics={"f1": 70.0}, name="mine")], ["f1"])
    assert [(c.name, dict(c.rows[0].cells).keys()) for c in found] == [("digits", set()), ("mine", {"f1"})]


def test_a_reported_metric_that_was_not_measured_costs_the_others_nothing():
    """Evaluation sets can be set otherwise, and the report still names their metrics."""
    result = run("soft", 0, 80.0, recipe=recipe(report=["accuracy", "accuracy@mnli"]))
    comparison = one([result])
    assert comparison.metrics == ("accuracy", "accuracy@mnli")
    assert list(comparison.rows[0].cells) == ["accuracy"]


def test_a_metric_on_other_data_is_read_as_the_metric():
    assert metric("ece@mnli").higher_is_better is False and metric("accuracy@noisy").higher_is_better is True
    assert metric("ece@mnli").label == "ECE %, mnli" and metric("ece").label == "ECE %"
    assert metric("brier@noisy").digits == metric("brier").digits == 4


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ((1.0, math.nan, 2.0), math.nan),
        ((1.0, math.inf, 2.0), math.inf),
        ((1.0, -math.inf, 2.0), -math.inf),
        ((math.inf, -math.inf, 2.0), math.nan),
        ((1.5e308, 1.5e308, 1.5e308), 1.5e308),
        ((5e-324, 5e-324, 5e-324), 5e-324),
        ((1, 2, 4), 7 / 3),  # whole numbers in a file
    ],
)
def test_numbers_of_any_kind_are_compared(values, mean):
    results = [run("soft", s, 3.0) for s in range(3)] + [run("mmd", s, x) for s, x in enumerate(values)]
    cell = rows(results)["mmd 0.1"].cells["accuracy"]
    assert cell.mean == pytest.approx(mean, nan_ok=True) and cell.seeds == 3
    if not math.isfinite(mean):
        assert math.isnan(cell.deviation) and cell.difference.verdict == "cannot tell"
    for form in FORMATS.values():
        assert "mmd 0.1" in form(compare(results))


def test_numbers_of_a_file_may_be_no_numbers():
    result = run("mmd", 0, math.nan)
    assert math.isnan(rows([Result.from_json(result.to_json())])["mmd 0.1"].cells["accuracy"].mean)


# The paper


GLUE = {"table": "glue", "column": "mrpc", "model": ""}
DOMAIN = {"table": "domain", "column": "snli", "model": "bert-base"}


def test_the_papers_value_stands_beside_the_right_cell():
    metrics = {"accuracy": 80.0, "f1": 70.0, "ece": 3.0, "accuracy@test": 79.0, "accuracy@qqp": 60.0}
    results = [run(m, 0, metrics=metrics, recipe=RECIPE | {"paper": GLUE}) for m in ("soft", "gan", "ot", "ct", "mmd")]
    comparison = one(results, list(metrics))
    papers = {row.method: row.cells["accuracy"].paper for row in comparison.rows}
    assert (papers["gan"].mean, papers["gan"].deviation) == (87.5, 0.3)
    assert (papers["ct"].mean, papers["ct"].deviation) == (88.6, 0.4)
    assert (papers["soft"].mean, papers["soft"].deviation) == (86.5, None)
    assert papers["mmd"] is None
    # The paper has no F1 of MRPC, no other split, and its QQP is of a model that was trained on QQP.
    others = [row.cells[name].paper for row in comparison.rows for name in metrics if name != "accuracy"]
    assert others == [None] * len(others) and len(others) == 4 * 5
    assert comparison.paper["table"] == "glue"


def test_out_of_domain_the_column_is_that_of_the_data():
    metrics = {"accuracy": 80.0, "accuracy@mnli": 70.0, "ece@mnli": 3.0, "mmd@mnli": 1.0}
    results = [run(m, 0, metrics=metrics, recipe=RECIPE | {"paper": DOMAIN}) for m in ("soft", "ct", "ot")]
    comparison = one(results, list(metrics))
    soft, ot, ct = comparison.rows
    found = {name: cell.paper and cell.paper.mean for name, cell in ct.cells.items()}
    assert found == {"accuracy": 90.65, "accuracy@mnli": 74.23, "ece@mnli": 5.65, "mmd@mnli": None}
    assert soft.cells["ece@mnli"].paper.mean == 7.03 and soft.cells["ece@mnli"].paper.deviation is None
    assert all(cell.paper is None for cell in ot.cells.values())
    assert comparison.paper["model"] == "bert-base"
    roberta = [replace(r, recipe=RECIPE | {"paper": DOMAIN | {"model": "roberta-base"}}) for r in results]
    assert one(roberta, ["accuracy@mnli"]).rows[2].cells["accuracy@mnli"].paper.mean == 79.60


def test_without_a_reference_there_is_nothing_of_the_paper():
    comparison = one([run("gan", 0, 80.0)])
    assert comparison.paper is None and comparison.rows[0].cells["accuracy"].paper is None


def test_the_papers_value_stands_also_where_every_run_failed():
    failed = run("gan", 0, error="ValueError: no", recipe=RECIPE | {"paper": GLUE})
    cell = one([failed]).rows[0].cells["accuracy"]
    assert cell.paper.mean == 87.5 and cell.seeds == 0 and math.isnan(cell.mean) and cell.difference is None


# The order of files


def test_the_order_of_files_changes_nothing():
    rng = random.Random(0)
    names = ["soft", "gan", "ot", "mmd"]
    results = [
        run(
            name,
            seed,
            metrics={"accuracy": rng.uniform(70, 90), "ece": rng.uniform(1, 9)},
            times={"step": rng.uniform(1, 2)},
            recipe=recipe(report=["accuracy", "ece", "step_ratio"], train={"steps": steps}),
            command=f"alignattn run digits --seeds {seed}",
            error="ValueError: no" if seed == 3 and name == "gan" else None,
            finished=at(rng.choice([3, 4])),  # many at one moment
        )
        for name in names
        for seed in range(5)
        for steps in (3, 4)
    ]
    results += [replace(r, metrics={"accuracy": 50.0, "ece": 5.0}) for r in results[:6]]  # again, in the same second
    results += [run("ot", s, 80.0, options={"epsilon": e}) for s in range(3) for e in (0.1, 0.2)]
    expected = [form(compare(results)) for form in FORMATS.values()]
    for _ in range(3):
        rng.shuffle(results)
        found = compare(results)
        assert [form(found) for form in FORMATS.values()] == expected


def test_a_comparison_says_what_it_is_of():
    results = [
        run("soft", 0, 80.0, command="alignattn run a"),
        run("mmd", 0, 80.0, command="alignattn run b"),
        run("mmd", 1, 80.0, command="alignattn run a"),
    ]
    comparison = one(results)
    assert (comparison.name, comparison.model, comparison.description) == ("digits", "vit", "tiny")
    assert comparison.commands == ("alignattn run a", "alignattn run b")
    row = comparison.rows[1]
    assert (row.method, row.preset, row.weight) == ("mmd", "stable", 0.1)
    bare = one([run("soft", 0, 80.0, recipe={"model": None, "align": None})])
    assert (bare.model, bare.description, bare.metrics) == ("", "", ("accuracy",))
