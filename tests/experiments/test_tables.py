"""Comparisons as text, Markdown, CSV and JSON: read back, and looked at as a reader would."""

import csv
import io
import itertools
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignattn.experiments.compare import Cell, Comparison, Row
from alignattn.experiments.paper import PaperValue
from alignattn.experiments.statistics import Difference, paired
from alignattn.experiments.tables import FORMATS, as_csv, as_json, differences, markdown, notes, piped, summary, text

pytestmark = pytest.mark.filterwarnings("error")

nan, inf = math.nan, math.inf
lawful = settings(deadline=None, derandomize=True, database=None)


def row(label="mmd 0.1", *, seeds=(0, 1, 2), failed=(), **cells):
    method, _, weight = label.partition(" ")
    return Row(
        label=label,
        series=method,
        method=method,
        preset=None if method == "soft" else "stable",
        weight=float(weight) if weight else None,
        seeds=tuple(seeds),
        failed=tuple(failed),
        cells=cells,
    )


def table(*rows, metrics=("accuracy",), **changes):
    values = {"name": "digits", "model": "vit", "description": "", "metrics": tuple(metrics), "rows": rows}
    return Comparison(**(values | changes))


def difference(mean=1.0, low=0.5, high=1.5, p=0.01, effect=2.0, verdict="better", more=None, seeds=3, error=0.125):
    return Difference(seeds, mean, low, high, p, effect, verdict, more, error)


SOFT = row("soft", accuracy=Cell(80.0, 1.0, 3, PaperValue(86.5, None)), ece=Cell(9.5, 0.25, 3))
GAN = row(
    "gan 0.1",
    accuracy=Cell(81.25, 0.5, 3, PaperValue(87.5, 0.3), difference(1.25, 0.75, 1.75, 0.0204, 4.0), 0.0408),
    ece=Cell(10.0, 0.125, 3, None, difference(0.5, -0.25, 1.0, 0.3, 0.625, "cannot tell", 20), 0.3),
)
OT = row(
    "ot 0.1",
    seeds=(0,),
    failed=("seed 1: ValueError: no", "seed 2: OSError: disk"),
    accuracy=Cell(79.0, nan, 1, PaperValue(87.0, 0.2), difference(-1.0, nan, nan, nan, nan, "cannot tell", seeds=1)),
)
WHOLE = table(SOFT, GAN, OT, metrics=("accuracy", "ece"), paper={"table": "glue"})


# Text


def columns(lines: list[str]) -> list[list[str]]:
    """The cells of a table of text, cut where its second line, of dashes, says that columns are."""
    spans = [found.span() for found in re.finditer("-+", lines[1])]
    gaps = [(a[1], b[0]) for a, b in itertools.pairwise(spans)]
    for line in lines:
        assert len(line) <= len(lines[1]) and not line.endswith(" ")
        assert all(not line[start:end].strip() for start, end in gaps), f"{line!r} does not keep to its columns"
    return [[line[start:end].strip() for start, end in spans] for line in [lines[0], *lines[2:]]]


def test_text_has_its_tables_in_columns():
    title, rule, *body = text([WHOLE]).split("\n\n")[0].splitlines()
    assert title == "digits, vit" and rule == "=" * len(title)
    assert columns(body) == [
        ["attention", "seeds", "accuracy %", "paper", "ECE %"],
        ["soft", "3", "80.00 ± 1.00", "86.5", "9.50 ± 0.25"],
        ["gan 0.1", "3", "81.25 ± 0.50 ▲", "87.5 ± 0.3", "10.00 ± 0.12"],
        ["ot 0.1", "1 (2 failed)", "79.00", "87.0 ± 0.2", "–"],
    ]
    second = text([WHOLE]).split("\n\n")[1].splitlines()
    assert columns(second) == [
        ["attention", "metric", "difference", "95 % interval", "p", "effect", "verdict"],
        ["gan 0.1", "accuracy %", "+1.25", "+0.75 to +1.75", "0.020", "4.00", "better"],
        ["gan 0.1", "ECE %", "+0.50", "−0.25 to +1.00", "0.300", "0.62", "cannot tell: about 20 seeds more would"],
        ["ot 0.1", "accuracy %", "−1.00", "–", "–", "–", "cannot tell: 2 seeds more at least"],
    ]


def test_numbers_stand_under_each_other_whether_marked_or_not():
    cells = [Cell(mean, 1.0, 3, None, difference(verdict=v)) for mean, v in ((5.0, "better"), (50.0, "cannot tell"))]
    lines = text([table(*(row(f"ot {i}", accuracy=c) for i, c in enumerate(cells)))]).splitlines()[2:6]
    assert columns(lines)[1:] == [["ot 0", "3", "5.00 ± 1.00 ▲"], ["ot 1", "3", "50.00 ± 1.00"]]
    assert lines[2].index("±") == lines[3].index("±") and lines[2].index(".00") == lines[3].index(".00")


words = st.text(st.characters(categories=["L", "N", "P"], include_characters=" |"), min_size=1, max_size=12)
cells_ = st.builds(
    Cell,
    mean=st.floats(-1e6, 1e6) | st.sampled_from([nan, inf, -inf]),
    deviation=st.floats(0, 100) | st.just(nan),
    seeds=st.integers(0, 9),
    paper=st.none() | st.builds(PaperValue, st.floats(0, 100).map(lambda x: round(x, 2)), st.none() | st.just(0.2)),
    difference=st.none()
    | st.builds(
        lambda d, higher: paired(d, [0.0] * len(d), higher),
        st.lists(st.floats(-5, 5) | st.just(nan), min_size=1, max_size=4),
        st.sampled_from([True, False, None]),
    ),
    p_holm=st.floats(0, 1) | st.just(nan),
)
rows_ = st.builds(
    Row,
    label=words.map(lambda word: word.strip() or "x"),
    method=words,
    preset=st.none() | words,
    weight=st.none() | st.floats(0, 10),
    seeds=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    failed=st.lists(words, max_size=2).map(tuple),
    cells=st.dictionaries(st.sampled_from(["accuracy", "ece", "brier@noisy"]), cells_),
)
tables_ = st.lists(rows_, min_size=1, max_size=4).map(
    lambda rows: table(*rows, metrics=("accuracy", "ece", "brier@noisy"), paper={"table": "glue"})
)


@settings(lawful, max_examples=30)
@given(tables_)
def test_any_table_keeps_to_its_columns(comparison):
    pages = text([comparison]).split("\n\n")
    columns(pages[0].splitlines()[2:])
    if len(differences(comparison)) > 1:
        columns(pages[1].splitlines())
    for lines in (summary(comparison), differences(comparison)):
        parsed = pipes(piped(lines))
        assert [parsed[0], *parsed[2:]] == [[cell.strip() for cell in line] for line in lines]
    assert len(list(csv.DictReader(io.StringIO(as_csv([comparison]))))) == 3 * len(comparison.rows)
    strict(as_json([comparison]))


def test_several_tables_follow_each_other():
    other = table(SOFT, name="mine", model="")
    for form in (text, markdown):
        both = form([WHOLE, other])
        assert both == form([WHOLE]) + "\n" + form([other])
        assert both.endswith("\n") and not both.endswith("\n\n")
    assert "\nmine\n====\n" in text([WHOLE, other])


# Markdown


def pipes(text_: str) -> list[list[str]]:
    """The cells of a Markdown table: a pipe ends one unless a backslash stands before it."""
    lines = text_.splitlines()
    assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert len({len(line) for line in cells}) == 1
    return [[cell.strip().replace("\\|", "|") for cell in line] for line in cells]


def test_markdown_has_the_same_tables():
    heading, first, second, remarks = markdown([WHOLE]).split("\n\n")
    assert heading == "## digits, vit" and markdown([WHOLE], level=4).startswith("#### digits")
    for block, lines in ((first, summary(WHOLE)), (second, differences(WHOLE))):
        head, rule, *body = pipes(block)
        assert [head, *body] == lines
        assert all(re.fullmatch("---:?", cell) for cell in rule)
        assert [cell[-1] for cell in rule] == [
            "-" if name in ("attention", "metric", "verdict") else ":" for name in head
        ]
    assert remarks.splitlines() == [f"- {note}" for note in notes(WHOLE)]


def test_pipes_in_names_end_no_cell():
    found = markdown([table(row("ot 0.1", seeds=(), failed=()), row("a|b", accuracy=Cell(1.0, nan, 1)))])
    assert pipes(found.split("\n\n")[1])[3] == ["a|b", "3", "1.00"]


def test_what_looks_like_html_is_shown():
    failed = table(row(failed=["seed 0: TypeError: <class 'str'> is none"]))
    assert "TypeError: \\<class 'str'>" in markdown([failed]) and "TypeError: <class 'str'>" in text([failed])


# CSV


def test_csv_has_a_line_for_every_metric_of_every_row():
    lines = list(csv.DictReader(io.StringIO(as_csv([WHOLE, table(SOFT, name='with, "quotes"')]))))
    assert [(line["recipe"], line["attention"], line["metric"]) for line in lines] == [
        ("digits", "soft", "accuracy"),
        ("digits", "soft", "ece"),
        ("digits", "gan 0.1", "accuracy"),
        ("digits", "gan 0.1", "ece"),
        ("digits", "ot 0.1", "accuracy"),
        ("digits", "ot 0.1", "ece"),
        ('with, "quotes"', "soft", "accuracy"),
    ]
    assert lines[2] == {
        "recipe": "digits",
        "model": "vit",
        "attention": "gan 0.1",
        "method": "gan",
        "preset": "stable",
        "weight": "0.1",
        "metric": "accuracy",
        "seeds": "3",
        "failed": "0",
        "mean": "81.25",
        "deviation": "0.5",
        "paper": "87.5",
        "paper_deviation": "0.3",
        "paired_seeds": "3",
        "difference": "1.25",
        "low": "0.75",
        "high": "1.75",
        "p": "0.0204",
        "p_holm": "0.0408",
        "effect": "4.0",
        "verdict": "better",
        "more_seeds": "",
    }
    assert (lines[3]["verdict"], lines[3]["more_seeds"], lines[3]["paper"]) == ("cannot tell", "20", "")
    assert lines[0]["preset"] == lines[0]["weight"] == lines[0]["difference"] == lines[0]["p_holm"] == ""
    assert (lines[4]["seeds"], lines[4]["failed"], lines[4]["deviation"], lines[4]["p"]) == ("1", "2", "", "")
    assert (lines[4]["difference"], lines[4]["paired_seeds"]) == ("-1.0", "1")


def test_csv_counts_the_seeds_of_the_cell_and_of_the_pairs():
    """Five runs, of which four have the metric, of which three have a soft run."""
    part = row(seeds=range(5), accuracy=Cell(1.0, 0.1, 4, None, difference(seeds=3)))
    (line,) = csv.DictReader(io.StringIO(as_csv([table(part)])))
    assert (line["seeds"], line["paired_seeds"]) == ("4", "3")


def test_csv_tells_of_kinds_of_which_every_run_failed():
    lines = list(csv.DictReader(io.StringIO(as_csv([table(row(seeds=(), failed=["seed 0: no", "seed 1: no"]))]))))
    assert [(line["attention"], line["seeds"], line["failed"], line["mean"]) for line in lines] == [
        ("mmd 0.1", "0", "2", "")
    ]


@lawful
@given(st.floats(allow_nan=False), st.floats(0, 1e300))
def test_csv_loses_no_digit(mean, deviation):
    (line,) = csv.DictReader(io.StringIO(as_csv([table(row(accuracy=Cell(mean, deviation, 3)))])))
    assert float(line["mean"]) == mean and float(line["deviation"]) == deviation


# JSON


def strict(text_: str):
    return json.loads(text_, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_json_has_everything():
    (found,) = strict(as_json([WHOLE]))
    assert (found["name"], found["model"], found["metrics"]) == ("digits", "vit", ["accuracy", "ece"])
    gan = found["rows"][1]
    assert (gan["label"], gan["weight"], gan["seeds"], gan["failed"]) == ("gan 0.1", 0.1, [0, 1, 2], [])
    assert gan["cells"]["accuracy"] == {
        "mean": 81.25,
        "deviation": 0.5,
        "seeds": 3,
        "paper": {"mean": 87.5, "deviation": 0.3},
        "difference": {
            "seeds": 3,
            "mean": 1.25,
            "low": 0.75,
            "high": 1.75,
            "p": 0.0204,
            "effect": 4.0,
            "verdict": "better",
            "more_seeds": None,
            "error": 0.125,
        },
        "p_holm": 0.0408,
    }
    assert found["rows"][2]["failed"] == ["seed 1: ValueError: no", "seed 2: OSError: disk"]
    assert found["rows"][2]["cells"]["accuracy"]["deviation"] is None
    assert found["rows"][2]["cells"]["accuracy"]["difference"]["p"] is None


@lawful
@given(st.floats())
def test_json_loses_no_digit_and_knows_no_nan(mean):
    (found,) = strict(as_json([table(row(accuracy=Cell(mean, nan, 3)))]))
    read = found["rows"][0]["cells"]["accuracy"]["mean"]
    if math.isnan(mean):
        assert read is None
    elif math.isinf(mean):
        assert read == ("Infinity" if mean > 0 else "-Infinity")  # as result files have it
    else:
        assert read == mean and str(read) == str(mean)


# Numbers as they are printed


def spread(cell, name="accuracy"):
    return summary(table(row(**{name: cell}), metrics=(name,)))[1][2]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (Cell(81.256, 0.504, 3), "81.26 ± 0.50"),
        (Cell(81.256, nan, 1), "81.26"),
        (Cell(nan, nan, 3), "NaN"),  # something was measured, and it is no number
        (Cell(inf, nan, 3), "inf"),
        (Cell(-inf, nan, 3), "−inf"),
        (Cell(nan, nan, 0), "–"),
        (Cell(-0.001, 0.0, 3), "0.00 ± 0.00"),
        (Cell(-0.0, nan, 3), "0.00"),
        (Cell(-1.5, 0.1, 3), "−1.50 ± 0.10"),
        (Cell(1.0, 0.1, 3, None, difference(verdict="better")), "1.00 ± 0.10 ▲"),
        (Cell(1.0, 0.1, 3, None, difference(verdict="worse")), "1.00 ± 0.10 ▼"),
        (Cell(1.0, 0.1, 3, None, difference(verdict="differs")), "1.00 ± 0.10 ◆"),
        (Cell(1.0, 0.1, 3, None, difference(verdict="cannot tell")), "1.00 ± 0.10"),
    ],
)
def test_means_as_they_are_printed(cell, shown):
    assert spread(cell) == shown


def test_a_metric_has_the_digits_it_needs():
    assert spread(Cell(0.12345, 0.00004, 3), "brier") == "0.1235 ± 0.0000"
    assert spread(Cell(0.12345, 0.00004, 3), "mmd_unit@noisy") == "0.123 ± 0.000"
    d = difference(0.12345, 0.05, -0.00004, effect=1.23456)
    line = differences(table(row(brier=Cell(0.2, 0.1, 3, None, d)), metrics=("brier",)))[1]
    assert line[2:6] == ["+0.1235", "+0.0500 to 0.0000", "0.010", "1.23"]


def shown(**changes):
    return differences(table(row(accuracy=Cell(1.0, 0.1, 3, None, difference(**changes)))))[1][2:6]


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({"mean": 1.0, "low": -0.5, "high": 2.5}, ["+1.00", "−0.50 to +2.50", "0.010", "2.00"]),
        ({"mean": -0.001, "low": -0.004, "high": 0.004}, ["0.00", "0.00 to 0.00", "0.010", "2.00"]),
        ({"mean": 0.0, "low": -0.0, "high": 0.0}, ["0.00", "0.00 to 0.00", "0.010", "2.00"]),
        ({"mean": nan, "low": nan, "high": nan, "p": nan, "effect": nan}, ["–", "–", "–", "–"]),
        ({"mean": inf, "low": nan, "high": nan, "p": nan, "effect": nan}, ["+inf", "–", "–", "–"]),
        ({"mean": -inf, "low": nan, "high": nan, "p": nan, "effect": nan}, ["−inf", "–", "–", "–"]),
        ({"p": 0.001}, ["+1.00", "+0.50 to +1.50", "0.001", "2.00"]),
        ({"p": 0.000999}, ["+1.00", "+0.50 to +1.50", "< 0.001", "2.00"]),
        ({"p": 1e-300}, ["+1.00", "+0.50 to +1.50", "< 0.001", "2.00"]),
        ({"p": 0.0}, ["+1.00", "+0.50 to +1.50", "< 0.001", "2.00"]),
        ({"p": 1.0, "effect": -0.001}, ["+1.00", "+0.50 to +1.50", "1.000", "0.00"]),
        ({"effect": -12.345}, ["+1.00", "+0.50 to +1.50", "0.010", "−12.35"]),
    ],
)
def test_differences_as_they_are_printed(changes, cells):
    assert shown(**changes) == cells


@lawful
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_minus_zero_is_never_printed(mean, low, effect):
    d = difference(mean, low, low + 1, effect=effect)
    found = text([table(row(accuracy=Cell(mean, 0.1, 3, None, d), brier=Cell(mean, 0.1, 3)), metrics=("accuracy",))])
    for number in re.findall(r"[-+−]?\d+\.\d+", found):
        assert number[0] not in "+-−" or float(number[1:]), found


@pytest.mark.parametrize(
    ("means", "column"),
    [
        ((86.5, 77.0), ["86.5", "77.0 ± 0.4"]),  # as printed there
        ((73.52, 74.0), ["73.52", "74.00 ± 0.4"]),
        ((None, 77.0), ["–", "77.0 ± 0.4"]),
    ],
)
def test_the_papers_values_have_the_papers_decimals(means, column):
    papers = [None if m is None else PaperValue(m, d) for m, d in zip(means, (None, 0.4), strict=True)]
    found = summary(table(*(row(f"ot {i}", accuracy=Cell(1.0, nan, 1, p)) for i, p in enumerate(papers))))
    assert found[0] == ["attention", "seeds", "accuracy %", "paper"]
    assert [line[3] for line in found[1:]] == column


def test_a_metric_without_values_of_the_paper_has_no_column_for_them():
    assert summary(table(row(accuracy=Cell(1.0, nan, 1))))[0] == ["attention", "seeds", "accuracy %"]


def test_where_there_is_no_difference_there_is_no_line():
    assert len(differences(table(SOFT))) == 1
    assert "verdict" not in text([table(SOFT)]) and "verdict" not in markdown([table(SOFT)])


# Notes


def said(comparison, words_):
    found = [note for note in notes(comparison) if words_ in note]
    assert len(found) <= 1
    return found[0] if found else ""


@pytest.mark.parametrize(("count", "words_"), [(1, "Of 1 test about 0.05 "), (3, "Of 3 tests about 0.15 ")])
def test_chance_findings_are_counted_over_the_tests_made(count, words_):
    made = [row(f"ot {i}", accuracy=Cell(1.0, 0.1, 3, None, difference())) for i in range(count)]
    untold = difference(p=nan, low=nan, high=nan, effect=nan, verdict="cannot tell", seeds=2)
    comparison = table(SOFT, *made, row("gan 9", accuracy=Cell(1.0, 0.1, 2, None, untold)))
    assert said(comparison, "by chance").startswith(words_) and "Holm" in said(comparison, "by chance")


def test_twenty_tests_find_one_by_chance():
    cells = {name: Cell(1.0, 0.1, 3, None, difference()) for name in ("accuracy", "ece", "nll", "mmd")}
    comparison = table(*(row(f"ot {i}", **cells) for i in range(5)), metrics=cells)
    assert said(comparison, "by chance").startswith("Of 20 tests about 1 ")


def test_without_tests_there_is_no_word_of_chance():
    assert not said(table(SOFT), "chance")
    assert OT.cells["accuracy"].difference is not None and not said(table(SOFT, OT), "chance")


def test_failures_are_listed():
    assert [note for note in notes(WHOLE) if "Failed" in note] == [
        "Failed: ot 0.1, seed 1: ValueError: no",
        "Failed: ot 0.1, seed 2: OSError: disk",
    ]
    for form in (text, markdown):
        assert "OSError: disk" in form([WHOLE]) and "1 (2 failed)" in form([WHOLE])


def test_marks_are_explained_where_there_are_any():
    assert "▲ better, ▼ worse" in said(WHOLE, "▲") and "◆" not in said(WHOLE, "▲")
    assert "▲" not in "".join(notes(table(SOFT)))
    neither = table(SOFT, row(accuracy=Cell(1.0, 0.1, 3, None, difference(verdict="differs"))))
    assert "◆ differs" in said(neither, "▲")


def test_a_table_without_soft_attention_says_why_there_are_no_differences():
    alone = row(accuracy=Cell(1.0, 0.1, 3))
    assert said(table(alone), "No differences") and said(table(SOFT, alone), "No differences")
    assert not said(table(SOFT), "No differences") and not said(WHOLE, "No differences")


def test_what_more_seeds_would_do_is_explained_where_it_is_said():
    assert "80 %" in said(WHOLE, "seeds more")
    assert not said(table(SOFT, row(accuracy=Cell(1.0, 0.1, 3, None, difference()))), "seeds more")


def test_seeds_that_are_in_the_mean_and_in_no_difference_are_named():
    part = row(seeds=range(5), accuracy=Cell(1.0, 0.1, 5, None, difference(seeds=3)))
    assert said(table(SOFT, part), "of its").startswith("mmd 0.1: differences are over 3 of its 5 seeds")
    assert not said(WHOLE, "of its")


def test_the_paper_is_named_where_its_values_are():
    assert said(WHOLE, "paper's").endswith("GLUE and SQuAD benchmarks, ALBERT-base.")
    domain = table(SOFT, paper={"table": "domain", "model": "bert-base"})
    assert said(domain, "paper's").endswith("Table 2: Results of domain generalization, bert-base.")
    assert not said(table(SOFT), "paper's")
    assert not said(table(row(accuracy=Cell(1.0, 0.1, 3)), paper={"table": "glue"}), "paper's")


def test_the_verdict_is_that_of_the_difference():
    d = paired([4.0, 6.0, 8.0], [1.0, 2.0, 3.0], higher_is_better=False)
    lines = differences(table(SOFT, row(ece=Cell(6.0, 2.0, 3, None, d)), metrics=("ece",)))
    assert lines[1] == ["mmd 0.1", "ECE %", "+4.00", "+3.00 to +5.00", "0.020", "4.00", "worse"]


def test_every_form_is_there():
    assert list(FORMATS) == ["text", "markdown", "csv", "json"]
    assert all(isinstance(form([WHOLE]), str) and form([WHOLE]).endswith("\n") for form in FORMATS.values())
