"""Files as people have them: quotes, line ends, byte order marks, gzip; and what is found in them."""

import csv
import gzip
import importlib.util
import json

import pytest

from alignattn.errors import ConfigError, DataError
from alignattn.finetune import columns, labels, tables
from alignattn.finetune.entities import are_iob, entities
from alignattn.finetune.tables import Table

ODD = [
    "plain",
    'a "quoted" word',
    "comma, here",
    "two\nlines",
    "two\r\nlines",
    "naïve 東京 😀",
    " spaces ",
    "tab\tinside",
    "",
]


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packed", [False, True])
def test_csv_comes_back_as_csv_writer_wrote_it(ending, mark, packed, tmp_path):
    plain = tmp_path / "a.csv"
    with plain.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator=ending)
        writer.writerows([["text", "label"], *([text, i] for i, text in enumerate(ODD))])
    data = mark + plain.read_bytes()
    path = write(tmp_path / "b.csv.gz", gzip.compress(data, mtime=0)) if packed else write(tmp_path / "b.csv", data)
    table = tables.read(path)
    assert table.columns == ("text", "label")
    assert table.column("text") == ODD and table.column("label") == [str(i) for i in range(len(ODD))]
    assert table.lines == [2, 3, 4, 5, 7, 9, 10, 11, 12]  # where each begins: two cells hold a line end


def test_tsv_knows_no_quoting(tmp_path):
    table = tables.read(write(tmp_path / "a.tsv", b'\xef\xbb\xbftext\tlabel\r\n"open\t1\r\nsay "x"\t0\r\n\r\n'))
    assert table.column("text") == ['"open', 'say "x"'] and table.column("label") == ["1", "0"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz"])
def test_json_lines_keep_types(name, tmp_path):
    rows = [{"text": "línea\u2028x", "label": [1, 2]}, {"text": "b", "label": []}]
    data = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()
    table = tables.read(write(tmp_path / name, gzip.compress(data, mtime=0) if name.endswith("gz") else data))
    assert table.rows == rows and table.lines == [1, 3]


def test_a_json_list_is_read_too(tmp_path):
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    assert tables.read(write(tmp_path / "a.json", json.dumps(rows, indent=1))).rows == rows


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pip install 'alignattn[parquet]'")
def test_parquet_is_read(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"tokens": ["a", "b"], "tags": [0, 1]}, {"tokens": ["c"], "tags": [1]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert tables.read(tmp_path / "a.parquet").rows == rows
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        tables.read(write(tmp_path / "b.parquet", "no parquet"))


def test_without_pyarrow_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"alignattn\[parquet\]"):
        tables.read(write(tmp_path / "a.parquet", "x"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"text,label\n", "a.csv is empty: it has no rows"),
        ("a.tsv", b"\n\n", "a.tsv is empty"),
        ("a.tsv", b"text\tlabel\n", "no rows"),
        ("a.jsonl", b"", "empty"),
        ("a.json", b"[]", "empty"),
        ("a.csv", b"text,label\ncaf\xe9,1\n", "not UTF-8: byte 15 is 0xe9"),
        ("a.tsv", b"text\tlabel\ncaf\xe9\t1\n", "line 2, is not UTF-8: byte 4"),
        ("a.csv", b"text,label\na,1\nb\n", "line 3, has 1 cells, and the first line names 2 columns"),
        ("a.tsv", b"text\tlabel\na\tb\t1\n", "line 2, has 3 cells"),
        ("a.csv", b'text,label\na,1\n"b,0\n', "line 3, cannot be read as CSV: unexpected end of data"),
        ("a.csv", b"text,text\na,1\n", "two columns 'text'"),
        ("a.jsonl", b'{"text": 1}\n{"text": \n', "line 2, cannot be read as JSON"),
        ("a.jsonl", b'"text"\n', "line 1, is no JSON object"),
        ("a.json", b"[1]", "row 1, is no JSON object"),
        ("a.json", b'[{"text":', "cannot be read as JSON"),
        ("a.csv.gz", b"text,label\n", "truncated or corrupt"),
        ("a.csv.gz", gzip.compress(b"text,label\n" * 99, mtime=0)[:40], "truncated or corrupt"),
        ("a.xlsx", b"PK", "no kind that can be read"),
        ("a", b"text", "no kind that can be read"),
        ("a.gz", b"text", "no kind that can be read"),
    ],
)
def test_what_cannot_be_read_is_told_with_file_and_line(name, data, message, tmp_path):
    with pytest.raises(DataError) as told:
        tables.read(write(tmp_path / name, data))
    assert message in str(told.value) and str(tmp_path / name) in str(told.value)


def test_a_row_without_the_column_is_named(tmp_path):
    table = tables.read(write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b"}\n'))
    with pytest.raises(DataError, match="line 2, has no 'label'"):
        table.column("label")


def table_of(tmp_path, **cells):
    rows = [dict(zip(cells, values, strict=True)) for values in zip(*cells.values(), strict=True)]
    return Table(tmp_path / "t.csv", tuple(cells), rows, list(range(2, len(rows) + 2)))


@pytest.mark.parametrize(
    ("names", "texts", "label"),
    [
        (["label", "text"], ("text",), "label"),
        (["idx", "Sentence", "Label"], ("Sentence",), "Label"),
        (["sentence1", "sentence2", "score"], ("sentence1", "sentence2"), "score"),
        (["premise", "hypothesis", "gold_label", "id"], ("premise", "hypothesis"), "gold_label"),
        (["question", "context", "class"], ("question", "context"), "class"),
        (["review", "stars"], ("review",), "stars"),
        (["id", "tokens", "text", "ner_tags"], ("tokens",), "ner_tags"),
        (["whatever", "target"], ("whatever",), "target"),
    ],
)
def test_columns_are_found_by_usual_names(names, texts, label, tmp_path):
    table = table_of(tmp_path, **{name: ["word", "other"] for name in names})
    assert columns.find(table, None, None) == columns.Columns(texts, label)


def test_columns_given_come_first_and_what_cannot_be_found_is_asked_for(tmp_path):
    table = table_of(tmp_path, text=["a"], body=["b"], label=["0"], other=["1"])
    assert columns.find(table, ("body", "text"), "other") == columns.Columns(("body", "text"), "other")
    with pytest.raises(DataError, match=r"no column 'bodi'. It has: text, body, label, other. Did you mean 'body'\?"):
        columns.find(table, ("bodi",), None)
    with pytest.raises(ConfigError, match="both text and label"):
        columns.find(table, ("text",), "text")
    with pytest.raises(ConfigError, match="one column, or two"):
        columns.find(table, ("text", "body", "other"), None)
    with pytest.raises(DataError, match=r"usual name for the label.*--label COLUMN"):
        columns.find(table_of(tmp_path, text=["a"], y=["b"]), None, None)
    with pytest.raises(DataError, match=r"of the others u, v hold text.*--text COLUMN"):
        columns.find(table_of(tmp_path, u=["a"], v=["b"], n=["1"], label=["b"]), None, None)
    with pytest.raises(DataError, match=r"of the others none holds text"):
        columns.find(table_of(tmp_path, n=["1"], label=["b"]), None, None)


@pytest.mark.parametrize(
    ("text", "label", "task", "names"),
    [
        (["a", "b", "c"], ["1", "0", "10"], "classification", ("0", "1", "10")),
        (["a", "b", "c"], [2, 0, 10], "classification", ("0", "2", "10")),
        (["a", "b"], ["no", " yes "], "classification", ("no", "yes")),
        (["a", "b"], [True, False], "classification", ("False", "True")),
        (["a", "b"], ["3.5", "4"], "regression", ()),
        (["a", "b"], [1.0, 2.0], "regression", ()),
        (["a", "b"], [["x"], []], "multilabel", ("x",)),
        ([["a", "b"], ["c"]], [["X", "O"], ["O"]], "tokens", ("O", "X")),
        ([["a", "b"], ["c"]], [[3, 0], [0]], "tokens", ("0", "3")),
    ],
)
def test_the_task_is_told_from_the_label_column(text, label, task, names, tmp_path):
    table = table_of(tmp_path, text=text, label=label)
    found = labels.learn(table, columns.Columns(("text",), "label"))
    assert (found.task, found.names) == (task, names)


def test_labels_are_encoded(tmp_path):
    where = columns.Columns(("text",), "tags")
    for cells, separator in (
        (["b|a", "", "c, d"], "|"),
        (["b; a", "", "c, d"], ";"),
        (["['b', 'a']", "[]", '["c, d"]'], ","),
    ):
        table = table_of(tmp_path, text=["1", "2", "3"], tags=cells)
        found = labels.learn(table, where, "multilabel")
        assert found == labels.Labels("multilabel", ("a", "b", "c, d"), separator)
        assert found.encode(table, where) == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    table = table_of(tmp_path, text=["1", "2"], tags=["a/b", "a"])
    assert labels.learn(table, where, "multilabel", "/").names == ("a", "b")
    table = table_of(tmp_path, text=["EU rejects it", "no"], tags=["B-ORG O O", "O"])  # told by the column's name
    found = labels.learn(table, where)
    assert found.task == "tokens" and found.encode(table, where) == [[0, 1, 1], [1]]


@pytest.mark.parametrize(
    ("label", "task", "message"),
    [
        (["3.5", "high", "1.0"], None, "line 3, has 'high' in the label column 'label', and regression needs a number"),
        (["3", "nan", "1"], "regression", "line 3, has 'nan'"),
        (["a", None, "b"], None, "line 3, has no label"),
        (["a", " ", "b"], "classification", "line 3, has no label"),
        (["a", "a", "a"], None, "only the label 'a'"),
        (["", "", ""], "multilabel", "no label"),
        (["a", "b", ["a", "b"]], "classification", "line 4, has several labels"),
        (["O", "O O", "O"], "tokens", "line 3, has 1 tokens and 2 labels"),
        (["O", "", "O"], "tokens", "line 3, has no list of tokens"),
    ],
)
def test_labels_that_cannot_be_are_told_with_their_line(label, task, message, tmp_path):
    table = table_of(tmp_path, text=["x", "y", "z"], label=label)
    with pytest.raises(DataError, match=message):
        labels.learn(table, columns.Columns(("text",), "label"), task)


def test_many_labels_are_asked_about(tmp_path):
    table = table_of(tmp_path, text=["x"] * 101, label=list(range(101)))
    with pytest.raises(ConfigError, match=r"101 different values.*--task"):
        labels.learn(table, columns.Columns(("text",), "label"))
    assert len(labels.learn(table, columns.Columns(("text",), "label"), "classification").names) == 101


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-A I-A O B-B", {("A", 0, 2), ("B", 3, 4)}),
        ("B-A B-A", {("A", 0, 1), ("A", 1, 2)}),
        ("I-A I-A I-B", {("A", 0, 2), ("B", 2, 3)}),
        ("O I-A O", {("A", 1, 2)}),
        ("S-A B-B I-B E-B I-B", {("A", 0, 1), ("B", 1, 4), ("B", 4, 5)}),
        ("O O", set()),
    ],
)
def test_entities_are_those_of_conlleval(tags, found):
    assert entities(tags.split()) == found
    assert are_iob(["O", "B-A"]) and not are_iob(["O", "NOUN"]) and not are_iob(["O"])
