"""What can be wrong: one clear sentence, a non-zero exit, and nothing written or overwritten."""

import json

import pytest
from finetune_rows import rows_of, write_jsonl

from alignattn import cli
from alignattn.config import PRESETS
from alignattn.finetune import run
from alignattn.finetune.folder import Folder

MMD = str(PRESETS["stable"]["mmd"]["weight"])


def tree(folder):
    """Every file with its content and time."""
    return {p: (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None) for p in sorted(folder.rglob("*"))}


GOOD = "text,label\ngood film,pos\nbad film,neg\n"
NUMBERS = "text,score\ngood film,4.5\nbad film,1.5\n"


@pytest.mark.parametrize(
    ("train", "evaluation", "options", "message"),
    [
        (None, GOOD, [], "train.csv cannot be read: No such file or directory."),
        (b"\x00\xff\xfe", GOOD, [], "train.csv is not UTF-8: byte 2 is 0xff."),
        ("", GOOD, [], "train.csv is empty: it has no rows."),
        (GOOD, "text,label\n", [], "eval.csv is empty: it has no rows."),
        (
            GOOD,
            GOOD,
            ["--label", "lable"],
            "train.csv has no column 'lable'. It has: text, label. Did you mean 'label'?",
        ),
        (GOOD, GOOD, ["--text", "body"], "train.csv has no column 'body'. It has: text, label."),
        (GOOD, "text,class\na,pos\n", [], "eval.csv has no column 'label'. It has: text, class."),
        (
            "u,v\na,b\n",
            GOOD,
            [],
            "no column with a usual name for the label. It has: u, v. Say which one: --label COLUMN.",
        ),
        (
            GOOD,
            "text,label\nx,pos\ny,neutral\n",
            [],
            "eval.csv, line 3, has the label 'neutral', which the training file never has. It has: neg, pos.",
        ),
        (
            "text,label\na,x|y\nb,y\n",
            "text,label\na,x|z\n",
            ["--task", "multilabel"],
            "eval.csv, line 2, has the label 'z', which the training file never has.",
        ),
        (
            GOOD,
            GOOD,
            ["--task", "regression"],
            "train.csv, line 2, has 'pos' in the label column 'label', and regression needs a number.",
        ),
        (NUMBERS, "text,score\na,high\n", [], "eval.csv, line 2, has 'high' in the label column 'score'"),
        (GOOD, GOOD, ["--weight", "1"], "--weight is the weight of alignment, and the method is none."),
        (GOOD, GOOD, ["--method", "mmd", "--weight", "-1"], "weight must be a finite number >= 0"),
        (GOOD, GOOD, ["--method", "mmd", "--weight", "much"], "A weight is a number, auto, or auto:0.2 with the share"),
        (GOOD, GOOD, ["--batch-size", "0"], "--batch-size must be > 0, got 0."),
        (GOOD, GOOD, ["--max-length", "9999"], "--max-length is 9999, and"),
        (GOOD, GOOD, ["--precision", "fp16"], "--precision fp16 needs an accelerator."),
        (GOOD, GOOD, ["--text", "text", "label", "--label", "text"], "cannot be both text and label"),
        (GOOD, GOOD, ["--model", "./no/such/model"], "The model './no/such/model' cannot be loaded"),
    ],
)
def test_a_sentence_a_status_and_nothing_written(train, evaluation, options, message, finetune, tmp_path, capsys):
    for name, data in (("train.csv", train), ("eval.csv", evaluation)):
        if data is not None:
            (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    before = tree(tmp_path)
    assert finetune(tmp_path / "train.csv", tmp_path / "eval.csv", tmp_path / "out", *options) == 1
    told = capsys.readouterr().err
    assert told.startswith("alignattn: ") and message in told
    assert told.count("\n") == 1 and "Traceback" not in told
    assert tree(tmp_path) == before


@pytest.fixture
def finished(files, finetune, tmp_path, capsys):
    """A finished run; `again` types its command with something changed."""
    train, evaluation = files("classification")
    assert finetune(train, evaluation, tmp_path / "out", "--method", "mmd") == 0
    capsys.readouterr()
    return lambda *more: finetune(train, evaluation, tmp_path / "out", "--method", "mmd", *more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "1"], "holds another run: seed is 0 there and 1 here."),
        (["--method", "ot"], 'holds another run: method is "mmd" there and "ot" here; '),
        (["--weight", "0.5"], f"holds another run: weight is {MMD} there and 0.5 here"),
        (["--steps", "3", "--precision", "bf16"], 'steps is 2 there and 3 here; precision is "fp32" there'),
    ],
)
def test_a_folder_that_holds_another_run_is_left_alone(options, message, finished, tmp_path, capsys):
    before = tree(tmp_path)
    assert finished(*options) == 1
    told = capsys.readouterr().err
    assert message in told and "Name another folder with --out." in told and told.count("\n") == 1
    assert tree(tmp_path) == before


def test_a_folder_whose_files_have_changed_since_is_left_alone(finished, tmp_path, capsys):
    write_jsonl(tmp_path / "train.jsonl", rows_of("classification")[::-1])
    before = tree(tmp_path)
    assert finished() == 1
    assert "holds another run: training file differs." in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("out/thesis.txt", "precious", "is not empty, and holds no run of finetune: there is thesis.txt."),
        ("out", "precious", "out is a file."),
        ("out/settings.json", "{", "settings.json cannot be read"),
        ("out/settings.json", json.dumps([1]), "settings.json is not of finetune"),
    ],
)
def test_a_folder_with_anything_else_is_left_alone(name, data, message, files, finetune, tmp_path, capsys):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(data)
    train, evaluation = files("classification")
    before = tree(tmp_path)
    assert finetune(train, evaluation, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert tree(tmp_path) == before


def test_a_run_that_another_process_is_at_is_left_to_it(files, finetune, tmp_path, capsys, monkeypatch):
    train, evaluation = files("classification")
    with monkeypatch.context() as patch:
        patch.setattr(run, "_evaluate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            finetune(train, evaluation, tmp_path / "out")
    capsys.readouterr()
    before = tree(tmp_path)
    with Folder(tmp_path / "out").held():
        assert finetune(train, evaluation, tmp_path / "out") == 1
    assert capsys.readouterr().err.endswith("out is in use: this run is under way in another process.\n")
    assert tree(tmp_path) == before
    assert finetune(train, evaluation, tmp_path / "out") == 0


@pytest.mark.parametrize("options", [["--method", "mdm"], ["--epochs", "many"], ["--task", "x"], []])
def test_bad_options_are_refused_with_a_usage_line(options, capsys):
    required = ["--model", "m", "--train", "a.csv", "--eval", "a.csv"] + (["--out", "o"] if options else [])
    with pytest.raises(SystemExit) as exit_:
        cli.main(["finetune", *required, *options])
    assert exit_.value.code == 2
    assert "usage: alignattn finetune" in capsys.readouterr().err
