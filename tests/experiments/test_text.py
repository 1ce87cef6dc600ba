"""Fine-tuning of a transformers encoder: what it trains on, what it measures, where models come from."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from alignattn import metrics
from alignattn.errors import ConfigError, DataError
from alignattn.experiments.compare import compare
from alignattn.experiments.recipe import load
from alignattn.experiments.runner import carry_out, estimate, sweep
from alignattn.experiments.training import Place, task_of, train
from alignattn.models.pretrained import fingerprints, load_model
from alignattn.results import Result


def recipe(folder, name="sst2", **data):
    return load(
        f"minilm-{name}",
        [
            {
                "seeds": 1,
                "report": ["mmd"],
                "model": {"name": str(folder)},
                "data": {"evaluate": ["dev"], **data} if name == "sst2" else data,
                "train": {"steps": 3, "batch": 4, "precision": "fp32"},
                "align": {"methods": ["soft", "mmd"]},
            }
        ],
    )


def test_a_run_trains_and_measures_as_a_plain_loop_does(encoder_folder, glue_folder):
    run = recipe(encoder_folder).runs()[0]
    place = Place(glue_folder, "cpu", 1)
    trained = train(run, place)
    task, settings = trained.task, run.recipe.train

    torch.manual_seed(0)
    model = task.make_model().train()
    named = list(model.parameters())
    groups = [
        {"params": [p for p in named if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.rate)
    batches = task.batches(0)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * settings.factor(step, 3)
        inputs, labels = next(batches)
        loss = model(**inputs, labels=labels).loss  # transformers' own: the same cross entropy
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained.model.state_dict()[name], value, rtol=0, atol=1e-7)


def test_metrics_are_those_of_every_row_one_by_one(encoder_folder, glue_folder):
    run = recipe(encoder_folder).runs()[0]
    trained = train(run, Place(glue_folder, "cpu", 1))
    with torch.no_grad():
        found = trained.task.evaluate(trained.model).metrics
    rows = (glue_folder / "glue" / "SST-2" / "dev.tsv").read_text().splitlines()[1:]
    logits, labels = [], []
    with torch.no_grad():
        for row in rows:
            text, label = row.split("\t")
            logits.append(trained.model(**trained.task.tokenizer(text, return_tensors="pt")).logits[0])  # no padding
            labels.append(int(label))
    probability, label = torch.stack(logits).double().softmax(-1), torch.tensor(labels)
    assert found["accuracy"] == pytest.approx(100 * float((probability.argmax(-1) == label).double().mean()))
    assert found["ece"] == pytest.approx(metrics.expected_calibration_error(probability, label), abs=1e-4)
    assert found["nll"] == pytest.approx(float(F.nll_loss(probability.log(), label)), abs=1e-5)
    assert {"f1", "matthews", "brier", "mmd", "mmd_unit"} <= found.keys()


def test_regression_is_measured_by_correlation(encoder_folder, glue_folder, tmp_path):
    plan = sweep(recipe(encoder_folder, "stsb"), Place(glue_folder, "cpu", 1), tmp_path / "out")
    outcome = carry_out(plan, quiet=True)
    assert not outcome.failed
    for result in outcome.finished:
        assert {"pearson", "spearman", "mmd"} <= result.metrics.keys()
        assert "accuracy" not in result.metrics


def test_other_data_are_measured_beside_the_main_ones(encoder_folder, glue_folder, tmp_path):
    plan = sweep(recipe(encoder_folder, "snli"), Place(glue_folder, "cpu", 1), tmp_path / "out")
    outcome = carry_out(plan, quiet=True)
    assert not outcome.failed and len(outcome.finished) == 2
    for result in outcome.finished:
        assert {"accuracy", "accuracy@mnli", "ece@mnli", "mmd@mnli"} <= result.metrics.keys()
        assert "f1" not in result.metrics  # three classes
        assert result.inputs.keys() >= {"snli/snli_1.0_train.jsonl", "mnli/dev_matched.tsv", "model/config.json"}
        assert result.recipe["model"]["name"] == "tiny-bert"
        assert str(tmp_path) not in result.to_json()
        assert Result.from_json(result.to_json()) is not None
    task = task_of(recipe(encoder_folder, "snli").runs()[0], Place(glue_folder, "cpu", 1))
    assert task.samples == 6 and task.evaluation_samples == 12  # `-` is no label


def test_a_long_text_is_cut_and_a_limit_kept(encoder_folder, glue_folder):
    task = task_of(recipe(encoder_folder, max_length=4, limit=5).runs()[0], Place(glue_folder, "cpu", 1))
    assert task.samples == 5
    inputs, labels = next(task.batches(0))
    assert inputs["input_ids"].shape[1] <= 4 and len(labels) == 4


def test_batches_are_shuffled_by_their_seed_and_whole(encoder_folder, glue_folder):
    task = task_of(recipe(encoder_folder).runs()[0], Place(glue_folder, "cpu", 1))
    first, again, other = ([next(b)[1].tolist() for _ in range(30)] for b in map(task.batches, (0, 0, 1)))
    assert first == again != other
    assert {len(labels) for labels in first} == {4}
    assert sum(map(sum, first[:12])) == 24  # 48 rows, half of them positive


def test_padding_does_not_change_a_batch(encoder_folder, glue_folder):
    """A short text beside a long one gives the logits it gives alone."""
    task = task_of(recipe(encoder_folder).runs()[0], Place(glue_folder, "cpu", 1))
    model = task.make_model().eval()
    both, _ = task.tests[0].batch([0, 2], torch.device("cpu"))
    alone, _ = task.tests[0].batch([0], torch.device("cpu"))
    assert both["attention_mask"].sum(1).tolist() == [4, 7]
    with torch.no_grad():
        torch.testing.assert_close(model(**both).logits[:1], model(**alone).logits)


def test_a_weight_that_is_chosen_while_training_is_told_with_what_it_came_to(encoder_folder, glue_folder, tmp_path):
    one = recipe(encoder_folder)
    weights = {"methods": ("mmd",), "weights": (0.5, "auto", "auto:0.4")}
    one = replace(one, train=replace(one.train, steps=30), align=replace(one.align, **weights))
    plan = sweep(one, Place(glue_folder, "cpu", 1), tmp_path / "out")
    fixed, less, more = carry_out(plan, quiet=True).finished
    assert [r.weight for r in (fixed, less, more)] == [0.5, "auto:0.2", "auto:0.4"]
    assert less.alignment["weight"] == {"share": 0.2} and fixed.alignment["weight"] == 0.5
    names = [plan.file(run).name for run in plan.recipe.runs()]
    assert [name.rpartition("-")[0] for name in names] == ["mmd-0.5-seed0", "mmd-auto-0.2-seed0", "mmd-auto-0.4-seed0"]
    assert plan.recipe.runs()[1].label.endswith("mmd auto:0.2, seed 0")
    assert not plan.parted()[1]  # found again under these names
    chosen = [r.details["figures"]["alignment_weight"] for r in (fixed, less, more)]
    assert set(chosen[0]) == {0.5} and len(chosen[0]) == len(fixed.details["curve"])
    assert chosen[1][0] == chosen[2][0] == 0.3  # of the preset, up to the first look
    # Both saw the same first update: the weights are as the shares.
    assert chosen[2][1] == pytest.approx(2 * chosen[1][1], rel=1e-4) and chosen[1][1] > 0
    labels = [row.label for row in compare([more, fixed, less])[0].rows]
    assert labels == ["mmd 0.5", "mmd auto:0.2", "mmd auto:0.4"]


def test_an_estimate_leaves_nothing_behind(encoder_folder, glue_folder, tmp_path):
    told = estimate(sweep(recipe(encoder_folder), Place(glue_folder, "cpu", 1), tmp_path / "out"))
    assert (told.runs, told.finished, told.steps) == (2, 0, 3)
    assert told.seconds > 0 and set(told.step_seconds) == {"soft", "mmd"}
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_anything_runs(encoder_folder, glue_folder, tmp_path):
    with pytest.raises(DataError, match="--data-dir"):
        sweep(recipe(encoder_folder), Place(None, "cpu"), tmp_path)
    (glue_folder / "glue" / "SST-2" / "dev.tsv").unlink()
    with pytest.raises(DataError, match=r"dev\.tsv"):
        sweep(recipe(encoder_folder), Place(glue_folder, "cpu"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no model.*config\.json"):
        fingerprints(str(tmp_path / "empty"))


def test_classes_must_agree(encoder_folder, glue_folder):
    run = recipe(encoder_folder, evaluate=["dev", "mnli:dev"]).runs()[0]
    with pytest.raises(ConfigError, match=r"mnli has the classes .*entailment"):
        task_of(run, Place(glue_folder, "cpu", 1))


def test_dropout_is_set_everywhere_or_refused(encoder_folder):
    model = load_model(str(encoder_folder), outputs=2, dropout=0.3, classifier_dropout=0.4, padding=0)
    rates = {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout)}
    assert rates.pop("dropout") == 0.4  # the classifier's
    assert set(rates.values()) == {0.3}
    assert model.config.attention_probs_dropout_prob == 0.3
    kept = load_model(str(encoder_folder), outputs=2, dropout=None, classifier_dropout=None, padding=0)
    assert {m.p for m in kept.modules() if isinstance(m, torch.nn.Dropout)} == {0.1}


def test_half_precision_weights_are_trained_in_float32(encoder_folder):
    from transformers import AutoModelForMaskedLM

    AutoModelForMaskedLM.from_pretrained(encoder_folder, dtype=torch.float16).save_pretrained(encoder_folder)
    model = load_model(str(encoder_folder), outputs=2, dropout=None, classifier_dropout=None, padding=0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fingerprints_follow_the_weights(encoder_folder):
    before = fingerprints(str(encoder_folder))
    assert "model/model.safetensors" in before
    with (encoder_folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    after = fingerprints(str(encoder_folder))
    assert {k for k in before if before[k] != after[k]} == {"model/model.safetensors"}


def test_a_model_of_the_hub_is_found_in_its_cache_and_known_by_its_commit(encoder_folder, tmp_path, monkeypatch):
    """The layout of the hub's cache, made by hand: `models--owner--name/snapshots/COMMIT`."""
    import shutil

    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub" / "models--owner--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    shutil.copytree(encoder_folder, cache / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fingerprints("owner/tiny") == {"model/owner/tiny": commit}
    model = load_model("owner/tiny", outputs=3, dropout=None, classifier_dropout=None, padding=0)
    assert model.config.num_labels == 3
    with pytest.raises(DataError, match=r"The model 'owner/absent' cannot be loaded.*--model MODEL"):
        fingerprints("owner/absent")
