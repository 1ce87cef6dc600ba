"""Recipes: what they may say, and what becomes of it."""

import tomllib
from pathlib import Path

import pytest

from alignattn.errors import ConfigError, DataError
from alignattn.experiments import recipe as recipes
from alignattn.experiments.paper import paper_value
from alignattn.experiments.reading import merge, parse_override
from alignattn.experiments.recipe import load, seed_list, shipped
from alignattn.experiments.settings import AlignSettings, TrainSettings


@pytest.fixture
def write(tmp_path):
    def write_(text, name="mine.toml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_resolves(name):
    recipe = load(name)
    assert recipe.name == name and recipe.description
    assert [run.method for run in recipe.runs()][:5] == ["soft", "gan", "ot", "ct", "mmd"]
    assert len(recipe.runs()) == 5 * len(recipe.seeds)
    if recipe.paper is not None:
        reference = recipe.settings()["paper"]
        assert paper_value(reference, recipe.report[0], "soft") is not None, "its main metric stands in the paper"


def test_the_papers_settings_are_its_table_of_settings():
    """Table of settings, appendix: rate, batch, dropout, classifier dropout, steps, warm-up, length."""
    table = {
        "cola": (1e-5, 16, 0.0, 0.1, 5336, 320, 512),
        "stsb": (2e-5, 16, 0.0, 0.1, 3598, 214, 512),
        "sst2": (1e-5, 32, 0.0, 0.1, 20935, 1256, 512),
        "mnli": (3e-5, 128, 0.0, 0.1, 10000, 1000, 512),
        "rte": (3e-5, 32, 0.1, 0.1, 800, 200, 512),
        "mrpc": (2e-5, 32, 0.0, 0.1, 800, 200, 512),
    }
    for name, row in table.items():
        r = load(name)
        assert (
            r.train.rate,
            r.train.batch,
            r.model.dropout,
            r.model.classifier_dropout,
            r.train.steps,
            r.train.warmup,
            r.data.max_length,
        ) == row
        assert r.align.preset == "paper" and "albert-base" in r.model.name and len(r.seeds) == 5
        assert r.runs()[1].weight == 0.01


def test_a_recipe_holds_only_what_differs(write):
    r = load(write('task = "digits"\n[train]\nsteps = 7\n'))
    assert r.train == TrainSettings(steps=7)
    assert r.align == AlignSettings()
    assert r.seeds == (0, 1, 2, 3, 4)


def test_runs_are_methods_by_weights_by_seeds_and_soft_has_no_weight(write):
    text = (
        'task = "digits"\nseeds = [3, 9]\n[train]\nsteps = 1\n[align]\nmethods = ["soft", "ct"]\nweights = [0.5, 2]\n'
    )
    runs = [(run.seed, run.method, run.weight) for run in load(write(text)).runs()]
    one = [("soft", None), ("ct", 0.5), ("ct", 2.0)]
    assert runs == [(seed, *kind) for seed in (3, 9) for kind in one]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tsk = "digits"', "Unknown key in recipe 'mine': 'tsk'.*Did you mean 'task'"),
        ('task = "digit"', "Unknown task 'digit'.*Did you mean 'digits'"),
        ("", "Unknown task ''"),
        ('task = "digits"', "train needs steps or epochs"),
        ('task = "digits"\n[train]\nsteps = 1\nepochs = 1', "steps or epochs, one of the two"),
        ('task = "digits"\n[train]\nstps = 1', "Unknown key in train: 'stps'.*Did you mean 'steps'"),
        ('task = "digits"\n[train]\nsteps = "many"', "train.steps must be a whole number, got 'many'"),
        ('task = "digits"\n[train]\nsteps = 1.5', "train.steps must be a whole number"),
        ('task = "digits"\n[train]\nsteps = true', "train.steps must be a whole number"),
        ('task = "digits"\n[train]\nsteps = 0', "train.steps must be > 0"),
        ('task = "digits"\n[train]\nsteps = 1\nrate = nan', "train.rate must be > 0"),
        ('task = "digits"\n[train]\nsteps = 1\nschedule = "cosine"', "Unknown train.schedule 'cosine'"),
        ('task = "digits"\n[train]\nsteps = 1\nclip = -1', "train.clip must be >= 0"),
        (
            'task = "digits"\n[model]\nwidht = 8\n[train]\nsteps=1',
            "Unknown key in model: 'widht'.*Did you mean 'width'",
        ),
        ('task = "digits"\n[model]\nwidth = 9\n[train]\nsteps=1', "multiple of model.heads"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nmethods = ["sot"]', "Unknown method 'sot'.*Did you mean 'soft'"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nmethods = []', "names no method"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nmethods = ["ct", "ct"]', "names one twice"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nweights = [-1]', "weight must be"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nweights = ["atuo"]', "A weight is a number, auto, or auto:0.2"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nweights = ["auto", "auto:0.2"]', "names one twice: auto:0.2"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\nramp = 0.1\nweights = ["auto"]', "ramp is for weights that are"),
        ('task = "digits"\n[train]\nsteps=1\n[align]\npreset = "stabel"', "Did you mean 'stable'"),
        ('task = "digits"\n[train]\nsteps=1\n[align.options]\ngenrator = "x"', "Did you mean 'generator'"),
        ('task = "digits"\n[train]\nsteps=1\n[align.ot]\nepsilno = 1', "Did you mean 'epsilon'"),
        ('task = "digits"\n[train]\nsteps=1\n[align.gan]\nepsilon = 1', "Unknown option for method 'gan': 'epsilon'"),
        ('task = "digits"\nseeds = 0\n[train]\nsteps=1', "seeds must be"),
        ('task = "digits"\nseeds = [1, 1]\n[train]\nsteps=1', "seeds must be"),
        ('task = "digits"\nseeds = [-1]\n[train]\nsteps=1', "seeds must be"),
        ('task = "digits"\nreport = ["acuracy"]\n[train]\nsteps=1', "Did you mean 'accuracy'"),
        ('task = "digits"\ntrain = 3', "train must be a table"),
        ('task = "text"\n[data]\nname = "mprc"\n[train]\nsteps=1', "Unknown data set 'mprc'.*Did you mean 'mrpc'"),
        ('task = "text"\n[train]\nsteps=1', "data lacks name"),
        ('task = "text"\n[data]\nname = "rte"\nevaluate = ["tset"]\n[train]\nsteps=1', "Unknown split of rte 'tset'"),
        ('task = "text"\n[data]\nname = "rte"\n[train]\nsteps=1', "model lacks name"),
        ('task = "digits"\n[paper]\ntable = "glue"\n[train]\nsteps=1', "paper lacks column"),
    ],
)
def test_bad_recipes_are_refused_and_the_nearest_key_is_named(text, message, write):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(write(text))


def test_following_the_advice_helps(write):
    with pytest.raises(ConfigError, match="Did you mean 'steps'"):
        load(write('task = "digits"\n[train]\nstps = 1'))
    assert load(write('task = "digits"\n[train]\nsteps = 1')).train.steps == 1


def test_files_that_are_no_recipe_are_named(write, tmp_path):
    with pytest.raises(DataError, match=r"mine\.toml cannot be read as TOML.*table declaration"):
        load(write("[train"))
    with pytest.raises(DataError, match=r"no file .*absent\.toml"):
        load(str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match=r"Unknown recipe 'digist'.*Did you mean 'digits'"):
        load("digist")


def test_extends_lays_a_recipe_over_another(write, tmp_path):
    write('extends = "digits"\n[train]\nsteps = 9\n[align.ot]\nepsilon = 0.5\n', "base.toml")
    r = load(write('extends = "base.toml"\nseeds = 1\n[train]\nrate = 1.0\n'))
    assert (r.train.steps, r.train.rate, r.train.batch) == (9, 1.0, load("digits").train.batch)
    assert r.align.ot == {"epsilon": 0.5} and r.seeds == (0,) and r.name == "mine"
    write('extends = "a.toml"', "b.toml")
    with pytest.raises(ConfigError, match="extends itself"):
        load(write('extends = "b.toml"', "a.toml"))


def test_overrides_win_and_go_deep(write):
    r = load("digits", [parse_override("train.steps=3"), parse_override("align.ot.epsilon=0.5"), {"seeds": 2}])
    assert r.train.steps == 3 and r.train.batch == 64 and r.seeds == (0, 1)
    assert r.align.config("ot", None).matcher.epsilon == 0.5


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a=true", {"a": True}),
        ("a = [1, 2]", {"a": [1, 2]}),
        ("a=some words", {"a": "some words"}),
        ('a="quoted"', {"a": "quoted"}),
        ("a=x=y", {"a": "x=y"}),
    ],
)
def test_an_override_is_toml_or_text(text, table):
    assert parse_override(text) == table


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".=1"])
def test_an_override_needs_a_key_and_a_value(text):
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_override(text)


def test_merging_leaves_both_sides_alone():
    below, above = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}
    assert merge(below, above) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}
    assert below == {"a": {"b": 1, "c": 2}, "d": 3}


def test_seeds_are_a_number_or_a_list():
    assert seed_list(3) == (0, 1, 2)
    assert seed_list([5, 2]) == (5, 2)


def test_the_rate_warms_up_and_falls():
    train = TrainSettings(steps=10, warmup=4)
    assert [train.factor(step, 10) for step in range(4)] == [1 / 5, 2 / 5, 3 / 5, 4 / 5]
    assert [train.factor(step, 10) for step in range(4, 10)] == [6 / 6, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    share = TrainSettings(steps=10, warmup=0.4)
    assert all(share.factor(step, 10) == train.factor(step, 10) for step in range(10))
    constant = TrainSettings(steps=10, warmup=0, schedule="constant")
    assert {constant.factor(step, 10) for step in range(10)} == {1.0}


def test_epochs_count_whole_batches():
    assert TrainSettings(epochs=3, batch=32).steps_for(3668) == 3 * 114
    assert TrainSettings(epochs=0.5, batch=10).steps_for(100) == 5
    assert TrainSettings(epochs=2, batch=64).steps_for(10) == 2  # fewer samples than a batch
    assert TrainSettings(steps=7).steps_for(10) == 7


def test_settings_name_no_folder_of_this_machine(tmp_path):
    (tmp_path / "my-model").mkdir()
    settings = load("mrpc", [{"model": {"name": str(tmp_path / "my-model")}}]).settings()
    assert settings["model"]["name"] == "my-model"
    assert str(tmp_path) not in str(settings)
    assert load("mrpc").settings()["model"]["name"] == "albert/albert-base-v2"


def test_shipped_recipes_hold_only_what_differs_from_the_defaults():
    """A key that repeats a default would hide a change of that default."""
    from dataclasses import MISSING, fields

    from alignattn.experiments.tasks import TASKS

    for path in sorted(recipes.FOLDER.glob("*.toml")):
        tables = tomllib.loads(path.read_text())
        kinds = {"train": TrainSettings, "align": AlignSettings}
        kinds |= {"data": TASKS[tables["task"]].data_settings, "model": TASKS[tables["task"]].model_settings}
        for name, kind in kinds.items():
            defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
            for key, value in tables.get(name, {}).items():
                same = key in defaults and defaults[key] == (tuple(value) if isinstance(value, list) else value)
                assert not same, f"{path.name}: {name}.{key} = {value!r} is the default"


def test_recipes_and_paper_values_are_in_the_package():
    package = Path(recipes.__file__).parent.parent
    assert (package / "recipes" / "digits.toml").is_file() and (package / "paper_values" / "glue.toml").is_file()
