"""The command, on files and folders as a user has them."""

import csv
import io
import json
import subprocess
import sys

import pytest
from made_models import SENTENCES, WORDS, save_model

import alignattn
from alignattn import cli
from alignattn.diagnosis.result import read

LAYERS = [f"encoder.layer.{i}.attention.self" for i in range(2)]


def diagnose(*arguments):
    return cli.main(["diagnose", *map(str, arguments), "--device", "cpu"])


def test_a_model_and_a_file_give_tables_and_words(plain, reviews, capsys):
    assert diagnose(plain, reviews) == 0
    told = capsys.readouterr().out
    assert told.startswith("tiny-bert: keys and queries in 21 samples")
    assert all(layer in told for layer in LAYERS) and "Keys and queries differ most in head" in told


def test_the_file_has_what_diagnose_finds_on_the_same_rows(plain, reviews, tmp_path, capsys):
    from transformers import AutoModel, AutoTokenizer

    assert diagnose(plain, reviews, "--out", tmp_path / "d.json", "--batch-size", 4) == 0
    written = read(tmp_path / "d.json")
    model, tokenizer = AutoModel.from_pretrained(plain), AutoTokenizer.from_pretrained(plain)
    rows = dict(tokenizer([SENTENCES[i % 7] for i in range(21)], padding=True, return_tensors="pt"))
    expected = alignattn.diagnose(model, [rows]).heads
    assert [(h.layer, h.head) for h in written.heads] == [(layer, i) for layer in LAYERS for i in range(2)]
    for one, other in zip(written.heads, expected, strict=True):
        assert one.mmd == pytest.approx(other.mmd, abs=1e-6) and one.auc == pytest.approx(other.auc, abs=1e-3)
        assert one.noise == pytest.approx(other.noise, abs=1e-5) and one.tokens == other.tokens
    assert written.settings["text"] == ["review"] and written.settings["rows"] == 21
    assert set(written.settings["inputs"]) > {"data", "model/config.json", "model/model.safetensors"}
    assert written.command == "alignattn diagnose tiny-bert reviews.csv --batch-size 4 --device cpu"
    assert (
        str(tmp_path) not in (tmp_path / "d.json").read_text() and str(plain) not in (tmp_path / "d.json").read_text()
    )


def test_a_checkpoint_for_a_task_stands_beside_the_bare_model(plain, tuned, reviews, tmp_path, capsys):
    assert diagnose(tuned, reviews, "--against", plain, "--out", tmp_path / "d.json") == 0
    told = capsys.readouterr().out
    assert told.startswith("tiny-bert (before) and mine/model (after)")
    assert "farther apart in 4" in told  # keys were moved away in every head
    after, before = read(tmp_path / "d.json"), read(tmp_path / "d-against.json")
    assert (before.name, after.name) == ("tiny-bert", "mine/model")
    assert all(a.mean_distance > b.mean_distance for a, b in zip(after.heads, before.heads, strict=True))
    # What all keys share, softmax does not feel; the first layer is given the same tokens.
    assert [h.entropy for h in after.heads[:2]] == pytest.approx([h.entropy for h in before.heads[:2]], abs=1e-4)


def test_other_forms(plain, reviews, capsys):
    assert diagnose(plain, reviews, "--format", "csv") == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 4
    assert diagnose(plain, reviews, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "diagnosis"
    assert diagnose(plain, reviews, "--format", "markdown", "--heads") == 0
    assert "| --- |" in capsys.readouterr().out


def test_rows_and_layers_can_be_chosen(plain, reviews, capsys):
    assert diagnose(plain, reviews, "--rows", 5, "--layers", "-1", "--format", "json", "--max-tokens", 30) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["max_tokens"] == 30
    assert {h["samples"] for h in found["heads"]} == {5} and {h["layer"] for h in found["heads"]} == {LAYERS[1]}
    assert (found["settings"]["rows"], found["settings"]["rows_in_file"]) == (5, 21)


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "json", "csv.gz", "parquet", "tokens", "pairs"])
def test_every_kind_of_file_that_finetune_reads(plain, tmp_path, capsys, kind):
    import gzip

    rows = [{"sentence": text, "label": i % 2} for i, text in enumerate(SENTENCES * 2)]
    path = tmp_path / f"rows.{kind if kind not in ('tokens', 'pairs') else 'jsonl'}"
    if kind == "tokens":
        rows = [{"tokens": row["sentence"].split(), "ner_tags": ["O"] * len(row["sentence"].split())} for row in rows]
    if kind == "pairs":
        rows = [{"premise": row["sentence"], "hypothesis": "not good"} for row in rows]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pip install 'alignattn[parquet]'")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        between = "\t" if kind == "tsv" else ","
        text = "\n".join(between.join(map(str, row)) for row in (rows[0], *(r.values() for r in rows)))
        path.write_bytes(gzip.compress(text.encode()) if kind == "csv.gz" else text.encode())
    assert diagnose(plain, path) == 0
    longer = 3 if kind == "pairs" else 0  # "not good [SEP]"
    tokens = sum(len(text.split()) + 2 + longer for text in SENTENCES * 2)
    assert f"14 samples, {tokens} tokens" in capsys.readouterr().out


def refused(capsys, *arguments):
    assert diagnose(*arguments) == 1
    return capsys.readouterr().err


def test_what_is_wrong_is_said_in_one_sentence(plain, reviews, tmp_path, capsys):
    assert "cannot be loaded" in refused(capsys, tmp_path / "nowhere", reviews)
    assert "has no column 'text'. It has: id, review" in refused(capsys, plain, reviews, "--text", "text")
    assert "--text takes one column, or two" in refused(capsys, plain, reviews, "--text", "id", "review", "id")
    assert "is of no kind that can be read" in refused(capsys, plain, tmp_path / "rows.xls")
    assert "permutations must be at least 40" in refused(capsys, plain, reviews, "--permutations", 3)
    assert "takes 512 tokens at most" in refused(capsys, plain, reviews, "--max-length", 4000)
    assert "matches no attention module" in refused(capsys, plain, reviews, "--layers", "decoder")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(capsys, plain, reviews, "--out", tmp_path / "file" / "d.json")


def test_models_that_read_other_tokens_or_have_other_heads_are_not_compared(plain, reviews, tmp_path, capsys):
    other = save_model(tmp_path / "other", words=[*WORDS[:5], *WORDS[:4:-1]])
    assert "makes other tokens of the same rows" in refused(capsys, plain, reviews, "--against", other)
    deeper = save_model(tmp_path / "deeper", layers=3)
    told = refused(capsys, deeper, reviews, "--against", plain)
    assert "deeper has head 0 of encoder.layer.2.attention.self, and tiny-bert has not" in told


def test_a_decoder_behind_an_encoder_reads_the_same_rows(plain, reviews, tmp_path, capsys):
    import shutil

    from transformers import T5Config, T5Model

    folder = tmp_path / "tiny-t5"
    folder.mkdir()
    for file in plain.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    T5Model(T5Config(vocab_size=len(WORDS), pad_token_id=0, **sizes)).save_pretrained(folder)
    assert diagnose(folder, reviews, "--cross", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len({h["layer"] for h in found["heads"]}) == 6 and {h["samples"] for h in found["heads"]} == {21}


def test_help_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from alignattn import cli\n"
        "try: cli.main(['diagnose', '--help'])\n"
        "except SystemExit as end: sys.exit(end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--against" in done.stdout
