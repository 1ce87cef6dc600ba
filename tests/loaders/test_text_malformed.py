"""Rows that cannot be read are named by line and reason, left out or refused, and never taken for samples."""

import json
import re
from pathlib import Path

import pytest

from alignattn.datasets import Malformed, load
from alignattn.errors import AlignmentError, AlignmentWarning, DataError

GOOD_JSON = {"sentence1": "A", "sentence2": "B", "gold_label": "neutral"}


def without(key: str) -> str:
    return json.dumps({name: value for name, value in GOOD_JSON.items() if name != key})


def with_value(**values: object) -> str:
    return json.dumps(GOOD_JSON | values)


FILES = {  # the file, its header, and a good row
    "mrpc": ("train.tsv", "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t1\t2\tA\tB"),
    "sst2": ("train.tsv", "sentence\tlabel", "good\t1"),
    "cola": ("train.tsv", None, "x\t1\t\tgood"),
    "rte": ("train.tsv", "index\tsentence1\tsentence2\tlabel", "0\tA\tB\tentailment"),
    "stsb": ("train.tsv", "sentence1\tsentence2\tscore", "A\tB\t2.5"),
    "snli": ("snli_1.0_train.jsonl", None, json.dumps(GOOD_JSON)),
    "twitter_ppdb": ("Twitter_URL_Corpus_test.txt", None, "a\tb\t(6,6)\tlink"),
    "imdb": ("imdb", None, "1 good"),
}


def write(folder: Path, name: str, *rows: str | bytes) -> Path:
    """A file of these rows; "good" stands for a good one."""
    file, header, good = FILES[name]
    lines = [] if header is None else [header]
    lines += [good if row == "good" else row for row in rows]
    content = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    (folder / file).write_bytes(content)
    return folder / file


def split_of(name: str) -> str:
    return "test" if name in {"imdb", "twitter_ppdb"} else "train"


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("mrpc", "1\t1\t2\tA B", "expected 5 columns, found 4"),
        ("mrpc", "1\t1\t2\tA\tB\t", "expected 5 columns, found 6"),
        ("mrpc", '1\t1\t2\t"A\tB"\tC', "expected 5 columns, found 6"),  # quotes hold nothing together
        ("mrpc", "2\t1\t2\tA\tB", "Quality is '2', expected one of 0, 1"),
        ("mrpc", "1\t1\t2\tA\t", "#2 String is empty"),
        ("mrpc", "1\t1\t2\t \u2028\x85\tB", "#1 String is empty"),
        ("mrpc", b"1\t1\t2\tA\tcaf\xe9", "not UTF-8, byte 12 of the line is 0xe9"),
        ("sst2", "good\t1.0", "label is '1.0', expected one of 0, 1"),
        ("sst2", "good\t", "label is '', expected one of 0, 1"),
        ("sst2", "good\t 1", "label is ' 1', expected one of 0, 1"),
        ("sst2", "", "empty line"),
        ("sst2", "  ", "empty line"),
        ("cola", "x\t1\tgood", "expected 4 columns, found 3"),
        ("rte", "0\tA\tB\tneutral", "label is 'neutral', expected one of entailment, not_entailment"),
        ("stsb", "A\tB\tnan", "score is 'nan', expected a number from 0 to 5"),
        ("stsb", "A\tB\tinf", "score is 'inf', expected a number from 0 to 5"),
        ("stsb", "A\tB\t5.001", "score is '5.001', expected a number from 0 to 5"),
        ("stsb", "A\tB\t-0.1", "score is '-0.1', expected a number from 0 to 5"),
        ("stsb", "A\tB\tfour", "score is 'four', expected a number from 0 to 5"),
        ("stsb", "A\tB\t", "score is '', expected a number from 0 to 5"),
        ("snli", '{"gold_label": "neutral"', "invalid JSON: Expecting ',' delimiter: line 1 column 25 (char 24)"),
        ("snli", "[" * 100_000, "invalid JSON: .*"),
        ("snli", '["A", "B"]', "JSON holds a list, expected an object"),
        ("snli", without("sentence2"), "no key 'sentence2', found sentence1, gold_label"),
        ("snli", without("gold_label"), "no key 'gold_label', found sentence1, sentence2"),
        ("snli", with_value(sentence1=3), "sentence1 is 3, expected text"),
        ("snli", with_value(sentence2=None), "sentence2 is None, expected text"),
        ("snli", with_value(gold_label=1), "gold_label is 1, expected text"),
        ("snli", with_value(sentence1=" "), "sentence1 is empty"),
        ("snli", with_value(sentence1="a\ud800"), "sentence1 holds half of a surrogate pair, which is no character"),
        ("snli", with_value(gold_label="Neutral"), "gold_label is 'Neutral', expected one of entailment, neutral, c.*"),
        ("snli", b'{"sentence1": "\xff"}', "not UTF-8, byte 16 of the line is 0xff"),
        ("twitter_ppdb", "a\tb\t(4,5)\tlink", r"votes is '(4,5)', expected one of (0,6), .*"),
        ("twitter_ppdb", "a\tb\t4\tlink", "votes is '4', expected one of .*"),
        ("twitter_ppdb", " \tb\t(6,6)\tlink", "sentence1 is empty"),
        ("imdb", "1", "expected 2 columns, found 1"),
        ("imdb", "1 ", "text is empty"),
        ("imdb", "good 1", "label is 'good', expected one of 0, 1"),
        ("imdb", "1\tgood film", "label is '1\\\\tgood', expected one of 0, 1"),
    ],
)
def test_the_line_and_the_reason(tmp_path, name, row, reason):
    file = write(tmp_path, name, "good", row, "good", "good")
    line = 2 if FILES[name][1] is None else 3
    with pytest.warns(AlignmentWarning) as caught:
        data = load(name, split_of(name), tmp_path)
    (bad,) = data.malformed
    assert bad.line == line
    if reason.endswith(".*"):
        assert bad.reason.startswith(reason.removesuffix(".*"))
    else:
        assert bad.reason == reason.replace("\\\\", "\\")
    assert len(data) == len(data.labels) == 3
    text = f"1 of 4 rows of {file} are malformed:\n  {file}:{line}: {bad.reason}"
    assert str(caught[0].message) == f"{text}\nThey are left out."
    assert caught[0].filename == __file__  # attributed to whoever called load
    with pytest.raises(DataError) as error:
        load(name, split_of(name), tmp_path, strict=True)
    assert str(error.value) == text


def test_neighbours_of_a_malformed_row_keep_their_own_labels(tmp_path):
    write(tmp_path, "imdb", "1 a", "0 b", "x c", "0 d", "1 e")
    with pytest.warns(AlignmentWarning):
        data = load("imdb", "test", tmp_path)
    assert list(zip(data.texts, data.labels, strict=True)) == [(("a",), 1), (("b",), 0), (("d",), 0), (("e",), 1)]
    assert data.malformed == (Malformed(3, "label is 'x', expected one of 0, 1"),)


def test_the_first_ten_are_named_and_all_are_kept(tmp_path):
    rows = ["? bad" if i % 100 == 4 else "1 good" for i in range(1200)]
    file = write(tmp_path, "imdb", *rows)
    with pytest.warns(AlignmentWarning) as caught:
        data = load("imdb", "test", tmp_path)
    message = str(caught[0].message)
    assert message.startswith(f"12 of 1200 rows of {file} are malformed:\n  {file}:5: label is '?'")
    assert re.findall(r":(\d+): ", message) == [str(5 + 100 * i) for i in range(10)]
    assert message.endswith("\n  and 2 more\nThey are left out.")
    assert [bad.line for bad in data.malformed] == [5 + 100 * i for i in range(12)] and len(data) == 1188


@pytest.mark.parametrize(
    ("bad", "rows", "refused"),
    [
        (1, 100, False),  # 1 %
        (2, 100, True),
        (10, 1000, False),
        (11, 1000, True),
        (49, 99, False),  # fewer than 100: half
        (50, 99, True),
        (1, 2, False),
        (2, 3, True),
        (1, 1, True),
    ],
)
@pytest.mark.parametrize("name", ["imdb", "sst2"])
def test_a_file_with_too_many_of_them_is_of_another_format(tmp_path, name, bad, rows, refused):
    write(tmp_path, name, *["good"] * (rows - bad), *["?"] * bad)
    if refused:
        with pytest.raises(
            DataError, match=f"{bad} of {rows} rows .*(?s:.*)looks like another format than that of {name}"
        ):
            load(name, split_of(name), tmp_path)
    else:
        with pytest.warns(AlignmentWarning, match=f"^{bad} of {rows} rows"):
            assert len(load(name, split_of(name), tmp_path)) == rows - bad


def test_rows_that_are_left_out_count_as_rows_and_not_as_malformed(tmp_path):
    tie = json.dumps(GOOD_JSON | {"gold_label": "-"})
    write(tmp_path, "snli", *[tie] * 98, "good", "?")  # 1 of 100
    with pytest.warns(AlignmentWarning, match="1 of 100 rows"):
        data = load("snli", "train", tmp_path)
    assert len(data) == 1 and data.left_out == {"no majority label": 98}


def test_no_majority_is_never_malformed(tmp_path):
    write(tmp_path, "snli", "good", json.dumps({"gold_label": "-", "sentence1": "", "sentence2": " "}))
    data = load("snli", "train", tmp_path, strict=True)
    assert data.left_out == {"no majority label": 1} and data.malformed == ()


def test_a_file_of_left_out_rows_alone_is_refused(tmp_path):
    file = write(tmp_path, "twitter_ppdb", "a\tb\t(3,6)\tlink", "", "a\tb\t(3, 6)\tlink")
    with pytest.raises(DataError) as error:
        load("twitter_ppdb", "test", tmp_path)
    assert str(error.value) == (
        f"{file} holds no sample of twitter_ppdb: "
        "3 rows, 2 left out (3 of 6 votes), 1 left out (empty line), 0 malformed."
    )


def test_a_file_without_a_good_row_is_refused_though_half_is_left_out(tmp_path):
    tie = json.dumps(GOOD_JSON | {"gold_label": "-"})
    file = write(tmp_path, "snli", tie, "?")
    with pytest.raises(DataError, match=f"{file} holds no sample of snli: 2 rows, 1 left out .*, 1 malformed"):
        load("snli", "train", tmp_path)


def test_a_header_without_a_needed_column_names_those_found(tmp_path):
    (tmp_path / "train.tsv").write_text("index\tsentence1\thypothesis\n0\tA\tB\n")
    with pytest.raises(DataError) as error:
        load("rte", "train", tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'train.tsv'}:1: the header lacks the column sentence2, label. "
        "Found: index, sentence1, hypothesis."
    )


def test_a_file_whose_header_is_gone_is_refused(tmp_path):
    (tmp_path / "train.tsv").write_text("good\t1\nbad\t0\n")
    with pytest.raises(DataError, match=r"train.tsv:1: the header lacks the column sentence, label. Found: good, 1."):
        load("sst2", "train", tmp_path)


def test_a_header_in_utf16_is_refused(tmp_path):
    (tmp_path / "train.tsv").write_bytes("sentence\tlabel\ngood\t1\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"train.tsv:1: not UTF-8, byte 1 of the line is 0xff"):
        load("sst2", "train", tmp_path)


def test_a_long_cell_is_cut_in_the_message(tmp_path):
    write(tmp_path, "imdb", "good", "good", f"{'x' * 10_000} good")
    with pytest.warns(AlignmentWarning) as caught:
        load("imdb", "test", tmp_path)
    assert len(str(caught[0].message)) < 1000


def test_one_data_set_is_not_taken_for_another(tmp_path):
    for name in FILES:
        for other in FILES:
            if FILES[name][0] == FILES[other][0] and name != other:
                write(tmp_path, other, "good", "good", "good")
                with pytest.raises(DataError):
                    load(name, "train", tmp_path)


def test_the_error_is_one_of_ours_and_a_value_error():
    assert issubclass(DataError, AlignmentError) and issubclass(DataError, ValueError)
