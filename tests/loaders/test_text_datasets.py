"""Each data set as its official files write it: a few rows by hand, and what must come out of them."""

import ast
import gzip
import hashlib
import json
import sys
from pathlib import Path

import pytest

import alignattn.datasets
from alignattn.datasets import DATASETS, load
from alignattn.errors import ConfigError, DataError

INFERENCE = ("entailment", "neutral", "contradiction")
PARSES = "( a b )\t( c d )\t(ROOT a b)\t(ROOT c d)"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    return path


def test_mrpc(tmp_path):
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    write(tmp_path / "train.tsv", header, '1\t12\t34\tHe said " no .\tNo , he said .', "0\t5\t6\tRain .\tSun .")
    data = load("mrpc", "train", tmp_path)
    assert data.texts == [('He said " no .', "No , he said ."), ("Rain .", "Sun .")]
    assert data.labels == [1, 0]
    assert data.classes == ("not_paraphrase", "paraphrase")
    assert (data.name, data.split, data.file, len(data)) == ("mrpc", "train", tmp_path / "train.tsv", 2)
    assert (data.left_out, data.malformed) == ({}, ())


@pytest.mark.parametrize("name", ["test_labelled.tsv", "msr_paraphrase_test.txt"])
def test_both_labelled_test_files_of_mrpc_are_read(tmp_path, name):
    write(tmp_path / name, "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t1\t2\tA .\tB .")
    assert load("mrpc", "test", tmp_path).texts == [("A .", "B .")]


def test_sst2_keeps_the_space_at_the_end(tmp_path):
    write(tmp_path / "dev.tsv", "sentence\tlabel", "a charming journey . \t1", "bleak \t0")
    data = load("sst2", "dev", tmp_path)
    assert data.texts == [("a charming journey . ",), ("bleak ",)]
    assert data.labels == [1, 0] and data.classes == ("negative", "positive")


def test_cola_has_no_header(tmp_path):
    write(tmp_path / "train.tsv", "gj04\t1\t\tThe sailors rode.", "cj99\t0\t*\tUs love they.")
    data = load("cola", "train", tmp_path)
    assert data.texts == [("The sailors rode.",), ("Us love they.",)]
    assert data.labels == [1, 0] and data.classes == ("unacceptable", "acceptable")


def test_rte(tmp_path):
    rows = "0\tNo weapons found.\tWeapons found.\tnot_entailment", "1\tA man died.\tSomebody died.\tentailment"
    write(tmp_path / "dev.tsv", "index\tsentence1\tsentence2\tlabel", *rows)
    data = load("rte", "dev", tmp_path)
    assert data.texts == [("No weapons found.", "Weapons found."), ("A man died.", "Somebody died.")]
    assert data.labels == [1, 0] and data.classes == ("entailment", "not_entailment")


def test_stsb_has_scores_and_no_classes(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    start = "main-captions\tMSRvid\t2012test\t0001\tnone\tnone"
    rows = f"0\t{start}\tA plane.\tAn air plane.\t5.000", f"1\t{start}\tA dog.\tA cat.\t0", f"2\t{start}\tA\tB\t3.8"
    write(tmp_path / "train.tsv", header, *rows)
    data = load("stsb", "train", tmp_path)
    assert data.texts == [("A plane.", "An air plane."), ("A dog.", "A cat."), ("A", "B")]
    assert data.labels == [5.0, 0.0, 3.8] and all(isinstance(label, float) for label in data.labels)
    assert data.classes == ()


MNLI_DEV = f"index\tpromptID\tpairID\tgenre\t{PARSES}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\t"


def test_glue_mnli_looks_its_columns_up_by_name(tmp_path):
    votes = "neutral\tneutral\tentailment\tneutral\tneutral"
    write(
        tmp_path / "dev_matched.tsv", f"{MNLI_DEV}gold_label", f"0\t1\t1n\tfiction\t{PARSES}\tP.\tH.\t{votes}\tneutral"
    )
    few = "contradiction\tP2.\t9\tn/a", "entailment\tP3.\t10\tH3."
    write(tmp_path / "dev_mismatched.tsv", "gold_label\tsentence1\tindex\tsentence2", *few)
    many = load("mnli", "dev", tmp_path)
    assert (many.texts, many.labels, many.classes) == ([("P.", "H.")], [1], INFERENCE)
    data = load("mnli", "dev_mismatched", tmp_path)
    assert (data.texts, data.labels) == ([("P2.", "n/a"), ("P3.", "H3.")], [2, 0])


def as_json(label: str, first: str, second: str) -> str:
    return json.dumps({"annotator_labels": [label], "gold_label": label, "sentence1": first, "sentence2": second})


@pytest.mark.parametrize(
    ("name", "split", "file"),
    [
        ("mnli", "train", "multinli_1.0_train.jsonl"),
        ("mnli", "dev", "multinli_1.0_dev_matched.jsonl"),
        ("mnli", "dev_mismatched", "multinli_1.0_dev_mismatched.jsonl"),
        ("snli", "train", "snli_1.0_train.jsonl"),
        ("snli", "train", "snli_1.0_train_100k.jsonl"),
        ("snli", "dev", "snli_1.0_dev.jsonl"),
        ("snli", "test", "snli_1.0_test.jsonl"),
    ],
)
def test_inference_from_json_lines(tmp_path, name, split, file):
    rows = [as_json("neutral", "Two men.", "Three\tmen."), as_json("-", "A", "B"), as_json("entailment", "É?", "N/A")]
    write(tmp_path / file, *rows, as_json("-", "A", ""), as_json("contradiction", "A dog.", "A cat."))
    data = load(name, split, tmp_path)
    assert data.texts == [("Two men.", "Three\tmen."), ("É?", "N/A"), ("A dog.", "A cat.")]
    assert data.labels == [1, 0, 2] and data.classes == INFERENCE
    assert data.left_out == {"no majority label": 2} and data.malformed == ()


def test_snli_as_text(tmp_path):
    header = f"gold_label\t{PARSES}\tsentence1\tsentence2\tcaptionID\tpairID\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5"
    rows = [
        f"neutral\t{PARSES}\tOne.\tTwo.\t1.jpg#0\t1.jpg#0r1n\tneutral\t\t\t\t",
        f"-\t{PARSES}\tOne.\tSix.\t1.jpg#0\t1.jpg#0r1n\tneutral\tentailment\tneutral\tentailment\tcontradiction",
        f"contradiction\t{PARSES}\tOne.\tSun.\t1.jpg#0\t1.jpg#0r1c\tcontradiction",  # tabs cut off at the end
    ]
    write(tmp_path / "snli_1.0_dev.txt", header, *rows)
    data = load("snli", "dev", tmp_path)
    assert data.texts == [("One.", "Two."), ("One.", "Sun.")]
    assert (data.labels, data.left_out) == ([1, 2], {"no majority label": 1})


SNLI_TRAIN = f"index\tcaptionID\tpairID\t{PARSES}\tsentence1\tsentence2\tlabel1\tgold_label"


def test_glue_snli_has_rows_with_more_votes_than_its_header_names(tmp_path):
    start = f"7\t1.jpg#0\t1.jpg#0r1n\t{PARSES}"
    five = "neutral\tentailment\tneutral\tneutral\tcontradiction"
    rows = (
        f"{start}\tA\tB\tneutral\tneutral",
        f"{start}\tC\tD\t{five}\tentailment",
        f"{start}\tE\tF\tneutral\t\t\t\t\tneutral",
    )
    write(tmp_path / "train.tsv", SNLI_TRAIN, *rows)
    data = load("snli", "train", tmp_path, strict=True)
    assert (data.texts, data.labels) == ([("A", "B"), ("C", "D"), ("E", "F")], [1, 0, 1])


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ("A\tB\tand more\tneutral\tneutral", 12),  # a tab inside a sentence shifts the rest
        ("A\tB" + 6 * "\tneutral" + "\tentailment", 16),  # there were five annotators
        ("A\tneutral", 9),
    ],
)
def test_other_columns_than_votes_must_be_as_the_header_says(tmp_path, cells, count):
    start = f"7\t1.jpg#0\t1.jpg#0r1n\t{PARSES}"
    good = f"{start}\tA\tB\tneutral\tneutral"
    write(tmp_path / "train.tsv", SNLI_TRAIN, good, good, f"{start}\t{cells}")
    with pytest.raises(DataError, match=f"train.tsv:4: expected 11 columns, found {count}"):
        load("snli", "train", tmp_path, strict=True)


def test_mnli_is_not_taken_for_snli_nor_snli_for_mnli(tmp_path):
    write(tmp_path / "train.tsv", SNLI_TRAIN, f"7\t1.jpg#0\t1.jpg#0r1n\t{PARSES}\tA\tB\tneutral\tneutral")
    write(tmp_path / "dev.tsv", f"{MNLI_DEV}gold_label")
    with pytest.raises(DataError, match=r"train.tsv:1: the header names captionID, as another data set does"):
        load("mnli", "train", tmp_path)
    with pytest.raises(DataError, match=r"dev.tsv:1: the header names promptID, genre, as another data set does"):
        load("snli", "dev", tmp_path)


def test_twitter_votes(tmp_path):
    rows = [f"a{k} \tb{k} \t({k},{' ' * (k % 2)}6)\thttps://t.co/x" for k in range(7)]  # both spellings
    write(tmp_path / "Twitter_URL_Corpus_test.txt", *rows)
    data = load("twitter_ppdb", "test", tmp_path)
    assert data.texts == [(f"a{k} ", f"b{k} ") for k in (0, 1, 2, 4, 5, 6)]
    assert data.labels == [0, 0, 0, 1, 1, 1] and data.classes == ("not_paraphrase", "paraphrase")
    assert data.left_out == {"3 of 6 votes": 1}


def test_the_odd_lines_of_the_published_twitter_file_are_left_out_and_others_are_malformed(tmp_path):
    good, doubled = "a\tb\t(6,6)\tlink", "a\tb\t(0,6)\t\tlink"
    write(tmp_path / "Twitter_URL_Corpus_test.txt", good, "", doubled, good, "", good)
    data = load("twitter_ppdb", "test", tmp_path, strict=True)
    assert len(data) == 3 and data.left_out == {"empty line": 2, "empty column before the link": 1}
    for bad in ("a\tb\t(0,6)\tlink\t", "a\tb\t(0,6)\tmore\tlink", "a\tb\t(7,6)\tlink", "a\tb\t(7,6)\t\tlink"):
        write(tmp_path / "Twitter_URL_Corpus_test.txt", good, "", doubled, good, bad, good)
        with pytest.raises(DataError, match=r"test.txt:5: "):
            load("twitter_ppdb", "test", tmp_path, strict=True)


@pytest.mark.parametrize("name", ["imdb", "yelp"])
def test_reviews_are_a_label_a_space_and_all_the_rest(tmp_path, name):
    write(tmp_path / name, '1 great  \tfilm , " 10 "', r"0 bad .\n\nvery 1 bad")
    data = load(name, "test", tmp_path)
    assert data.texts == [('great  \tfilm , " 10 "',), (r"bad .\n\nvery 1 bad",)]
    assert data.labels == [1, 0] and data.classes == ("negative", "positive")


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("mrpc", ["", "MRPC", "glue/MRPC", "glue_data/MRPC"]),
        ("sst2", ["", "SST-2", "glue/SST-2"]),
        ("cola", ["", "CoLA", "glue/CoLA"]),
        ("rte", ["", "RTE", "glue/RTE"]),
        ("stsb", ["", "STS-B", "glue/STS-B"]),
        ("mnli", ["", "MNLI", "glue/MNLI", "multinli_1.0"]),
        ("snli", ["", "snli", "snli_1.0", "glue/SNLI"]),
        ("twitter_ppdb", ["", "twitter_ppdb"]),
        ("imdb", ["", "attack_sets"]),
        ("yelp", ["", "attack_sets"]),
    ],
)
def test_every_file_is_found_in_every_usual_folder_packed_or_not(tmp_path, name, folders):
    spec = DATASETS[name]
    label = next(iter(spec.labels), "2.5")
    columns = spec.columns or (*spec.sentences, spec.label)
    row = spec.separator.join(label if column == spec.label else "word" for column in columns)
    table = f"{row}\n" if spec.columns else f"{spec.separator.join(columns)}\n{row}\n"
    objects = json.dumps({column: label if column == spec.label else "word" for column in columns})
    for number, folder in enumerate(folders):
        for split, files in spec.files.items():
            for file in files:
                content = (objects if file.endswith(".jsonl") else table).encode()
                root = tmp_path / f"{number}-{split}-{file}"
                place = root / folder
                place.mkdir(parents=True)
                (place / f"{file}.gz").write_bytes(gzip.compress(content, mtime=0))
                packed = load(name, split, root)
                (place / file).write_bytes(content)
                plain = load(name, split, str(root))
                assert (packed.file, plain.file) == (place / f"{file}.gz", place / file)
                assert packed.texts == plain.texts == [("word",) * len(spec.sentences)]
                assert packed.labels == plain.labels == [0 if spec.classes else 2.5]


def test_the_whole_training_set_is_preferred_to_the_part_wherever_they_lie(tmp_path):
    write(tmp_path / "snli_1.0_train_100k.jsonl", as_json("neutral", "part", "part"))
    write(tmp_path / "snli" / "snli_1.0_train.jsonl", as_json("neutral", "whole", "whole"))
    assert load("snli", "train", tmp_path).texts == [("whole", "whole")]


def test_the_digest_is_that_of_the_bytes_as_stored(tmp_path):
    content = gzip.compress(b"1 good\n0 bad\n", mtime=0)
    (tmp_path / "imdb.gz").write_bytes(content)
    assert load("imdb", "test", tmp_path).sha256 == hashlib.sha256(content).hexdigest()


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path):
    with pytest.raises(DataError) as error:
        load("mrpc", "test", tmp_path)
    assert str(error.value) == (
        f"No file for test of mrpc in {tmp_path}. Looked for test_labelled.tsv or msr_paraphrase_test.txt (or .gz of "
        "it), there and in MRPC, glue/MRPC, glue_data/MRPC. Splits of mrpc: train, dev, test."
    )


def test_a_directory_in_place_of_the_file_is_named_and_does_not_hide_one(tmp_path):
    (tmp_path / "imdb").mkdir()
    with pytest.raises(DataError, match=f"No file for test of imdb .*{tmp_path / 'imdb'} is not a file"):
        load("imdb", "test", tmp_path)
    write(tmp_path / "attack_sets" / "imdb", "1 good")
    assert load("imdb", "test", tmp_path).texts == [("good",)]


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(DataError, match="nowhere is missing: it should hold imdb"):
        load("imdb", "test", tmp_path / "nowhere")
    with pytest.raises(DataError, match="file is not a folder"):
        load("imdb", "test", write(tmp_path / "file", "1 good"))


def test_unknown_names(tmp_path):
    with pytest.raises(ConfigError, match=r"Unknown data set 'sst-2'. Choose one of: mrpc, sst2, .*mean 'sst2'"):
        load("sst-2", "dev", tmp_path)
    with pytest.raises(ConfigError, match=r"Unknown split of mnli 'validation'. Choose one of: train, dev, dev_mism"):
        load("mnli", "validation", tmp_path)
    with pytest.raises(ConfigError, match=r"Unknown split of sst2 'test'.* The published test file carries no labels"):
        load("sst2", "test", tmp_path)


def test_the_registry_agrees_with_itself():
    assert list(DATASETS) == ["mrpc", "sst2", "cola", "rte", "stsb", "mnli", "snli", "twitter_ppdb", "imdb", "yelp"]
    for spec in DATASETS.values():
        assert set(spec.labels.values()) == set(range(len(spec.classes)))
        assert not set(spec.left_out) & set(spec.labels)
        assert not spec.columns or {*spec.sentences, spec.label} <= set(spec.columns)
        assert spec.classes or spec.scores[0] < spec.scores[1]
    assert DATASETS["mnli"].classes == DATASETS["snli"].classes == INFERENCE


def test_what_is_shown_of_a_data_set_is_short(tmp_path):
    write(tmp_path / "imdb", *["1 very long review"] * 1000)
    assert len(repr(load("imdb", "test", tmp_path))) < 1000


def test_the_standard_library_suffices():
    for file in Path(alignattn.datasets.__file__).parent.glob("*.py"):
        if file.stem == "graphs":  # which are read by PyG
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {name.split(".")[0] for name in names} <= {"alignattn", *sys.stdlib_module_names}, file
