"""Every task from files to a checkpoint, through the command."""

import json

import numpy as np
import pytest
import torch
from finetune_rows import rows_of, write_jsonl
from sklearn import metrics as sk
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from alignattn import cli, results
from alignattn.config import PRESETS
from alignattn.finetune import run

MMD = str(PRESETS["stable"]["mmd"]["weight"])

TASKS = ["classification", "pairs", "multilabel", "regression", "tokens"]


def saved_logits(folder, task, rows):
    """What the plain checkpoint says of each row, loaded and asked as anybody would."""
    kind = AutoModelForTokenClassification if task == "tokens" else AutoModelForSequenceClassification
    model, tokenizer = kind.from_pretrained(folder / "model").eval(), AutoTokenizer.from_pretrained(folder / "model")
    found = []
    for row in rows:
        texts = [row[name] for name in ("text", "tokens", "premise", "hypothesis") if name in row]
        batch = tokenizer(*texts, return_tensors="pt", is_split_into_words=task == "tokens")
        with torch.no_grad():
            logits = model(**batch).logits[0].double()
        if task == "tokens":  # the first piece of each word
            words = batch.word_ids(0)
            logits = logits[[words.index(i) for i in range(len(row["tokens"]))]]
        found.append(logits)
    return found, model.config


def ece(confidence, hit):
    """In percent, ten bins, closed below."""
    total = 0.0
    for low in range(10):
        inside = (confidence >= low / 10) & ((confidence < (low + 1) / 10) | (low == 9))
        if inside.any():
            total += inside.sum() * abs(hit[inside].mean() - confidence[inside].mean())
    return 100 * total / len(hit)


def spans_of(sentences):
    """Entities as (sentence, first, last, kind): maximal runs of one kind that no B interrupts."""
    found = set()
    for s, tags in enumerate(sentences):
        for i in range(len(tags)):
            for j in range(i, len(tags)):
                kinds = {tag[2:] for tag in tags[i : j + 1]}
                inside = "O" not in tags[i : j + 1] and len(kinds) == 1
                starts = i == 0 or tags[i][0] == "B" or tags[i - 1][2:] != tags[i][2:]
                ends = j == len(tags) - 1 or tags[j + 1][0] != "I" or tags[j + 1][2:] != tags[j][2:]
                if inside and starts and ends and not any(tag[0] == "B" for tag in tags[i + 1 : j + 1]):
                    found.add((s, i, j, kinds.pop()))
    return found


def expected(task, logits, rows, names):
    """The metrics, by hand and by scikit-learn."""
    if task == "regression":
        p, y = np.array([float(l[0]) for l in logits]), np.array([row["label"] for row in rows])
        assert np.diff(np.sort(p)).min() > 1e-4  # ranks that rounding decides would prove nothing
        ranks = [np.array([(v > s).sum() + ((v == s).sum() + 1) / 2 for s in v]) for v in (p, y)]
        return {
            "pearson": 100 * np.corrcoef(p, y)[0, 1],
            "spearman": 100 * np.corrcoef(-ranks[0], -ranks[1])[0, 1],
            "rmse": np.sqrt(((p - y) ** 2).mean()),
        }
    if task == "multilabel":
        p = torch.stack(logits).sigmoid().numpy()
        y = np.array([[float(name in row["label"]) for name in names] for row in rows])
        return {
            "f1": 100 * sk.f1_score(y, p > 0.5, average="micro", zero_division=0),
            "accuracy": 100 * sk.accuracy_score(y, p > 0.5),
            "ece": ece(np.maximum(p, 1 - p).ravel(), ((p > 0.5) == y).ravel()),
        }
    if task == "tokens":
        p, y = torch.cat(logits).softmax(-1).numpy(), [tag for row in rows for tag in row["ner_tags"]]
    else:
        p, y = torch.stack(logits).softmax(-1).numpy(), [str(row["label"]) for row in rows]
    guess = [names[i] for i in p.argmax(-1)]
    hit = np.array([g == t for g, t in zip(guess, y, strict=True)])
    found = {"accuracy": 100 * hit.mean(), "ece": ece(p.max(-1), hit)}
    if task == "tokens":
        lengths = np.cumsum([len(row["ner_tags"]) for row in rows])[:-1]
        spans = [spans_of(np.split(np.array(tags), lengths)) for tags in (guess, y)]
        found["f1"] = 200 * len(spans[0] & spans[1]) / (len(spans[0]) + len(spans[1]))
    else:
        truth = np.array([names.index(t) for t in y])
        found["nll"] = -np.log(p[np.arange(len(y)), truth]).mean()
        found["brier"] = ((p - np.eye(len(names))[truth]) ** 2).sum(-1).mean()
        if len(names) == 2:
            found["f1"] = 100 * sk.f1_score(y, guess, pos_label=names[1], zero_division=0)
            found["matthews"] = 100 * sk.matthews_corrcoef(y, guess)
    return found


@pytest.mark.parametrize("task", TASKS)
def test_a_task_ends_in_a_plain_checkpoint_whose_logits_give_the_metrics(
    task, files, finetune, tmp_path, monkeypatch, capsys
):
    in_training, score = [], run.score
    monkeypatch.setattr(run, "score", lambda *args: in_training.append(args[2]) or score(*args))
    train, evaluation = files(task)
    assert finetune(train, evaluation, tmp_path / "out", "--method", "mmd") == 0
    told = capsys.readouterr()
    kind = "classification" if task == "pairs" else task
    assert f"Task: {kind}" in told.out and "12 to train on, 6 to evaluate on" in told.out
    assert "2/2" in told.err  # the progress bar
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model", "result.json", "settings.json"]

    rows = rows_of(task)[:6]
    logits, config = saved_logits(tmp_path / "out", task, rows)
    names = {
        "classification": ["neg", "pos"],
        "pairs": ["0", "1", "2"],
        "multilabel": ["a", "b", "c"],
        "tokens": ["B-X", "B-Y", "I-X", "O"],
    }.get(task)
    if names:
        assert [config.id2label[i] for i in range(len(names))] == names
    if task != "tokens":
        torch.testing.assert_close(in_training[0].double(), torch.stack(logits), rtol=1e-5, atol=1e-5)
    result = results.read(tmp_path / "out" / "result.json")
    for name, value in expected(task, logits, rows, names).items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert (result.name, result.method, result.weight, result.seed) == ("finetune", "mmd", MMD, 0)
    assert result.recipe["train"]["steps"] == 2 and result.command.startswith("alignattn finetune --model tiny-bert")
    assert str(tmp_path) not in (tmp_path / "out" / "result.json").read_text()
    assert "alignattn" not in (tmp_path / "out" / "model" / "config.json").read_text()


@pytest.mark.parametrize("method", ["gan", "ot", "ct"])
def test_the_other_methods_train_too_and_differ_from_none(method, files, finetune, tmp_path):
    train, evaluation = files("classification")
    assert finetune(train, evaluation, tmp_path / "out", "--method", method, "--weight", "1") == 0
    result = results.read(tmp_path / "out" / "result.json")
    assert result.method == method and result.weight == 1 and all(entry[2] for entry in result.details["curve"])


def test_the_weight_can_be_chosen_while_training(files, finetune, tmp_path):
    train, evaluation = files("classification")
    assert finetune(train, evaluation, tmp_path / "out", "--method", "mmd", "--weight", "auto:0.2") == 0
    result = results.read(tmp_path / "out" / "result.json")
    assert result.weight == "auto:0.2" and result.alignment["weight"] == {"share": 0.2}
    first, second = (entry[2] for entry in result.details["curve"])
    assert first != second and "--weight auto:0.2" in result.command
    weights = result.details["figures"]["alignment_weight"]
    assert weights[0] == pytest.approx(0.3) and weights[1] > 0 and weights[1] != weights[0]


def test_method_none_is_a_plain_trainer_run_to_the_bit(files, finetune, tmp_path, encoder):
    train, evaluation = files("classification")
    assert finetune(train, evaluation, tmp_path / "out", "--seed", "3") == 0

    set_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    data = [{**tokenizer(row["text"]), "labels": int(row["label"] == "pos")} for row in rows_of("classification")]
    args = TrainingArguments(
        output_dir=str(tmp_path / "plain"),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.002,
        seed=3,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer)).train()
    ours = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model").state_dict()
    assert results.read(tmp_path / "out" / "result.json").method == "soft"
    for name, value in model.state_dict().items():
        assert torch.equal(ours[name], value), name


def test_a_finished_run_is_reported_and_not_run_again(files, finetune, tmp_path, capsys):
    train, evaluation = files("regression")
    assert finetune(train, evaluation, tmp_path / "out") == 0
    first = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    said = capsys.readouterr().out
    assert finetune(train, evaluation, tmp_path / "out") == 0
    again = capsys.readouterr().out
    assert "finished: nothing to do" in again and again.splitlines()[1:] == said.splitlines()[2:]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == first


def test_epochs_precision_and_comparison(files, encoder, tmp_path, capsys):
    """Two results, soft and aligned, are what `alignattn compare` takes."""
    train, evaluation = files("classification")
    for method in ("none", "mmd"):
        out = tmp_path / method
        options = ["--method", method, "--precision", "bf16", "--epochs", "1", "--max-length", "6"]
        places = ["--model", str(encoder), "--train", str(train)]
        places += ["--eval", str(evaluation), "--out", str(out), "--batch-size", "8", "--device", "cpu"]
        assert cli.main(["finetune", *places, *options]) == 0
        result = results.read(out / "result.json")
        assert result.recipe["train"] == {
            "epochs": 1.0,
            "learning_rate": 2e-5,
            "batch_size": 8,
            "precision": "bf16",
            "processes": 1,
        }
        assert [entry[0] for entry in result.details["curve"]] == [1, 2]
    assert "Cut off at 6 tokens: 2 rows in training, 1 in evaluation." in capsys.readouterr().out
    assert cli.main(["compare", str(tmp_path / "none" / "result.json"), str(tmp_path / "mmd" / "result.json")]) == 0
    told = capsys.readouterr().out
    assert f"mmd {MMD}" in told and "soft" in told and "ECE %" in told


def test_labels_and_rows_reach_the_settings_file(files, finetune, tmp_path):
    train, evaluation = files("tokens")
    write_jsonl(evaluation, rows_of("tokens")[:1])
    assert finetune(train, evaluation, tmp_path / "out") == 0
    kept = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert kept["settings"]["labels"] == ["B-X", "B-Y", "I-X", "O"] and kept["settings"]["text"] == ["tokens"]
    assert len(kept["inputs"]["training file"]) == 64
