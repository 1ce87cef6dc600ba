"""Lines and sentences survive: whatever characters they hold, packed or not, whatever ends the file."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignattn.datasets import Malformed, load
from alignattn.datasets.reading import numbered_lines
from alignattn.errors import AlignmentWarning, DataError

# What str.splitlines, universal newlines or a reader of CSV would cut at.
ODD = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", '"', "'", ",", "\\", "\ufeff", "\0"]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_only_a_newline_ends_a_line(tmp_path, odd):
    (tmp_path / "train.tsv").write_bytes(f"x\t1\t\ta{odd}b\ny\t0\t\t{odd}c\nz\t1\t\td\n".encode())
    data = load("cola", "train", tmp_path, strict=True)
    assert data.texts == [(f"a{odd}b",), (f"{odd}c",), ("d",)] and data.labels == [1, 0, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf1 good\n0 bad\n",  # byte order mark
        b"1 good\r\n0 bad\r\n",
        b"1 good\n0 bad",  # the last line without its end
        b"1 good\r\n0 bad\r",
        b"1 good\n0 bad\n\n",
        b"1 good\r\n0 bad\r\n\r\n \n\t\n\n",
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_marks_and_ends_are_no_part_of_the_data(tmp_path, content, packed):
    if packed:
        (tmp_path / "imdb.gz").write_bytes(gzip.compress(content, mtime=0))
    else:
        (tmp_path / "imdb").write_bytes(content)
    data = load("imdb", "test", tmp_path, strict=True)
    assert (data.texts, data.labels) == ([("good",), ("bad",)], [1, 0])


def test_a_header_after_a_byte_order_mark_and_before_crlf_is_read(tmp_path):
    (tmp_path / "dev.tsv").write_bytes(b"\xef\xbb\xbfsentence\tlabel\r\ngood\t1\r\n")
    assert load("sst2", "dev", tmp_path).texts == [("good",)]


def test_only_the_first_line_has_a_byte_order_mark(tmp_path):
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert list(numbered_lines(tmp_path / "file")) == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


def test_one_carriage_return_goes_with_the_newline_and_a_second_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"a\r\r\n\rb\r\n")
    assert list(numbered_lines(tmp_path / "file")) == [(1, b"a\r"), (2, b"\rb")]


def test_empty_lines_in_the_middle_keep_their_numbers(tmp_path):
    (tmp_path / "file").write_bytes(b"\na\n\n \nb\n\n")
    assert list(numbered_lines(tmp_path / "file")) == [(1, b""), (2, b"a"), (3, b""), (4, b""), (5, b"b")]
    (tmp_path / "imdb").write_bytes(b"1 a\n\n1 b\n1 c\n\n")
    with pytest.warns(AlignmentWarning, match="imdb:2: empty line"):
        data = load("imdb", "test", tmp_path)
    assert data.malformed == (Malformed(2, "empty line"),) and len(data) == 3


CONTENT = "".join(f"{i % 2} sentence {i * 7919}\n" for i in range(2000)).encode()
PACKED = gzip.compress(CONTENT, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        PACKED[: len(PACKED) // 2],
        PACKED[:-1],
        PACKED[:500] + bytes([PACKED[500] ^ 255]) + PACKED[501:],
        PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:],  # the checksum
        PACKED + b"and more",
        CONTENT,  # not packed at all
    ],
)
def test_a_broken_gz_is_refused_by_name(tmp_path, content):
    (tmp_path / "imdb.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"imdb\.gz is truncated or corrupt: "):
        load("imdb", "test", tmp_path)


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"nothing cannot be read: .*No such file"):
        list(numbered_lines(tmp_path / "nothing"))


@pytest.mark.parametrize("content", [b"", b"\n", b"\xef\xbb\xbf", b" \r\n\n"])
@pytest.mark.parametrize("name", ["sst2", "cola", "snli"])
def test_an_empty_file_is_refused_by_name(tmp_path, name, content):
    file = tmp_path / ("snli_1.0_dev.jsonl" if name == "snli" else "dev.tsv")
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file} is empty"):
        load(name, "dev", tmp_path)
    file.unlink()
    Path(f"{file}.gz").write_bytes(gzip.compress(content, mtime=0))
    with pytest.raises(DataError, match=f"{file}.gz is empty"):
        load(name, "dev", tmp_path)


@pytest.mark.parametrize("name", ["sst2", "stsb", "mnli"])
def test_a_header_alone_is_no_data_set(tmp_path, name):
    header = "sentence\tlabel" if name == "sst2" else "gold_label\tsentence1\tsentence2\tscore"
    (tmp_path / "train.tsv").write_text(f"{header}\n\n")
    with pytest.raises(DataError, match=f"train.tsv holds no sample of {name}: 0 rows"):
        load(name, "train", tmp_path)


lawful = settings(deadline=None, derandomize=True, database=None)
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from(ODD), min_size=1).filter(str.strip)
JSON_TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from([*ODD, "\t", "\n"]), min_size=1).filter(str.strip)
# Neither tab nor newline; and a \r at the end of a line is read as the end of the line.
CELL = TEXT.map(lambda text: text.replace("\t", " ").replace("\n", " ")).filter(str.strip)
LAST = CELL.filter(lambda text: not text.endswith("\r"))


def round_trip(name: str, split: str, file: str, content: str, packed: bool):
    with tempfile.TemporaryDirectory() as folder:
        if packed:
            (Path(folder) / f"{file}.gz").write_bytes(gzip.compress(content.encode(), mtime=0))
        else:
            (Path(folder) / file).write_bytes(content.encode())
        data = load(name, split, folder, strict=True)
    return data.texts, data.labels


@lawful
@given(st.lists(st.tuples(st.tuples(CELL, LAST), st.sampled_from([0, 1])), min_size=1), st.booleans())
def test_any_pairs_survive_a_table(rows, packed):
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *(f"{y}\t1\t2\t{a}\t{b}" for (a, b), y in rows)]
    texts, labels = round_trip("mrpc", "train", "train.tsv", "\n".join(lines), packed)
    assert (texts, labels) == ([pair for pair, _ in rows], [label for _, label in rows])


@lawful
@given(st.lists(st.tuples(CELL, st.sampled_from([0, 1])), min_size=1), st.sampled_from(["\n", "\r\n"]))
def test_any_sentences_survive_a_table_with_either_line_end(rows, end):
    content = "".join(f"{line}{end}" for line in ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)])
    texts, labels = round_trip("sst2", "dev", "dev.tsv", content, packed=False)
    assert (texts, labels) == ([(text,) for text, _ in rows], [label for _, label in rows])


@lawful
@given(st.lists(st.tuples(LAST, st.sampled_from([0, 1])), min_size=1), st.booleans())
def test_any_sentences_survive_after_a_label_and_a_space(rows, packed):
    content = "".join(f"{label} {text}\n" for text, label in rows)
    texts, labels = round_trip("imdb", "test", "imdb", content, packed)
    assert (texts, labels) == ([(text,) for text, _ in rows], [label for _, label in rows])


@lawful
@given(st.lists(st.tuples(JSON_TEXT, JSON_TEXT, st.sampled_from([0, 1, 2])), min_size=1), st.booleans(), st.booleans())
def test_any_pairs_survive_json_lines(rows, packed, plain_ascii):
    names = ["entailment", "neutral", "contradiction"]
    lines = [{"sentence1": first, "sentence2": second, "gold_label": names[label]} for first, second, label in rows]
    content = "".join(json.dumps(line, ensure_ascii=plain_ascii) + "\n" for line in lines)
    texts, labels = round_trip("snli", "test", "snli_1.0_test.jsonl", content, packed)
    assert (texts, labels) == ([(first, second) for first, second, _ in rows], [label for *_, label in rows])


@lawful
@given(st.lists(st.floats(0, 5), min_size=1))
def test_any_scores_survive(scores):
    content = "".join(["sentence1\tsentence2\tscore\n", *(f"a\tb\t{score!r}\n" for score in scores)])
    assert round_trip("stsb", "dev", "dev.tsv", content, packed=False)[1] == scores
