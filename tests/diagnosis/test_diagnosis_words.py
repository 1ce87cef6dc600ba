"""What is said about a diagnosis, and about two side by side; and how they are laid out."""

import csv
import io
import json
import math

import pytest
from made_diagnoses import diagnosis, head

from alignattn.diagnosis.result import Diagnosis
from alignattn.diagnosis.side_by_side import compare_diagnoses
from alignattn.diagnosis.tables import FORMATS, head_table, layer_table
from alignattn.diagnosis.words import differ, words_of
from alignattn.errors import DataError


def near(number, **other):
    """A head whose keys and queries cannot be told apart."""
    return head(number, **{"mmd": 0.001, "mmd_p": 0.4, "auc": 0.5, "auc_interval": (0.45, 0.55)} | other)


def test_the_worst_head_is_named_with_its_figures():
    said = words_of([head(0), head(3, layer="encoder.2", mmd=0.31, noise=(-0.002, 0.003)), head(1)])
    assert said[0] == (
        "Keys and queries differ most in head 3 of encoder.2: MMD² 0.3100, where chance gives −0.0020 to 0.0030; a "
        "held-out classifier tells them apart with AUC 0.90 (0.85 to 0.95)."
    )
    assert said[1].startswith("In 3 of 3 heads the difference is beyond noise")


def test_within_noise_there_is_nothing_to_align():
    said = " ".join(words_of([near(i) for i in range(12)]))
    assert "nothing to align" in said and "Try" not in said


def test_one_of_many_heads_may_be_beyond_noise_by_chance():
    many = [near(i) for i in range(71)]
    assert not differ([head(71), *many])  # of 72, about two
    assert differ([*(head(71 + i) for i in range(6)), *many])
    assert differ([head()]) and not differ([near(0)])


def test_a_shift_is_told_from_a_difference_of_spread_and_each_has_its_advice():
    shift = " ".join(words_of([head(mean_distance=1.5, covariance_distance=0.4)]))
    assert "Mostly it is the means that differ" in shift and "recentre" in shift and "98%" in shift
    spread = " ".join(words_of([head(mean_distance=0.1, covariance_distance=1.2)]))
    assert "Mostly it is spread and directions" in spread and "by OT or MMD" in spread and "recentre" not in spread


def test_layers_that_hold_most_of_it_are_named():
    heads = [head(0, f"encoder.{i}", mmd=0.5 if i == 2 else 0.03) for i in range(4)]
    assert any(
        "75% of the difference is in 1 of 4 layers" in s and "layers=['encoder.2']" in s for s in words_of(heads)
    )
    even = [head(0, f"encoder.{i}") for i in range(4)]
    assert not any("layers=" in sentence for sentence in words_of(even))


def test_lengths_heads_that_met_and_attention_are_spoken_of_where_they_stand_out():
    said = " ".join(words_of([head(query_norm=6.0, key_norm=2.0), near(1, mmd=-0.1), head(2, entropy=0.99)]))
    assert "In 1 of 3 heads MMD² is below zero" in said
    assert "1 of 3 heads look at all keys almost alike" in said
    longer = " ".join(words_of([head(query_norm=6.0, key_norm=2.0)]))
    assert "Queries are 3.0 times as long as keys" in longer
    quiet = " ".join(words_of([head()]))
    assert "times as long" not in quiet and "below zero" not in quiet and "almost" not in quiet
    assert "almost one key" in " ".join(words_of([head(entropy=0.05)]))


# --- side by side ----------------------------------------------------------------------------------------------------


def test_a_change_is_beyond_noise_where_errors_do_not_explain_it():
    before = diagnosis(head(0, mmd=0.2), head(1, mmd=0.2), head(2, mmd=0.2), name="plain")
    after = diagnosis(head(0, mmd=0.1), head(1, mmd=0.205), head(2, mmd=0.4), name="tuned")
    both = compare_diagnoses(before, after)
    assert [change.verdict for change in both.heads] == ["closer", "cannot tell", "farther"]
    low, high = both.heads[0].interval
    margin = 1.96 * math.sqrt(2) * 0.004
    assert (low, high) == (pytest.approx(-0.1 - margin, abs=1e-5), pytest.approx(-0.1 + margin, abs=1e-5))
    said = " ".join(both.words)
    assert "0.600 in plain, 0.705 in tuned" in said
    assert "closer in 1 of 3 heads and farther apart in 1" in said
    assert "The most changed is head 2 of encoder.0: MMD² 0.2000 before, 0.4000 after" in said


def test_what_was_aligned_is_said_to_be():
    before, after = diagnosis(*(head(i) for i in range(8))), diagnosis(*(near(i) for i in range(8)), name="aligned")
    assert any(
        "In aligned keys and queries can no longer be told apart" in s for s in compare_diagnoses(before, after).words
    )
    still = compare_diagnoses(before, diagnosis(*(head(i, mmd=0.1) for i in range(8)), name="b")).words
    assert any("In b 8 of 8 heads still differ" in sentence for sentence in still)


def test_other_samples_are_told_of():
    said = compare_diagnoses(diagnosis(head(samples=9)), diagnosis(head())).words[0]
    assert said.startswith("They were measured on different samples")


def test_errors_that_are_not_known_leave_a_change_open():
    one = diagnosis(head(mmd=0.1, mmd_error=math.nan))
    assert compare_diagnoses(one, diagnosis(head(mmd=0.9))).heads[0].verdict == "cannot tell"


def test_sums_are_over_the_heads_that_both_could_measure():
    before = diagnosis(head(0, mmd=0.5), head(1, mmd=0.25), head(2, mmd=math.nan), name="a")
    after = diagnosis(head(0, mmd=0.125), head(1, mmd=math.nan), head(2, mmd=1.0), name="b")
    assert "MMD², summed over heads and layers: 0.500 in a, 0.125 in b." in compare_diagnoses(before, after).words


def test_heads_that_one_of_them_has_not_are_named():
    with pytest.raises(DataError, match=r"tuned has head 5 of encoder\.0, and plain has not"):
        compare_diagnoses(diagnosis(head(), name="plain"), diagnosis(head(), head(5), name="tuned"))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_layer_has_the_means_of_its_heads():
    one = diagnosis(head(0, mmd=0.1, entropy=0.4), head(1, mmd=0.3, entropy=0.6), near(0, layer="encoder.1"))
    table = layer_table(one)
    assert [row[0] for row in table] == ["layer", "encoder.0", "encoder.1"]
    line = dict(zip(table[0], table[1], strict=True))
    assert (line["heads"], line["MMD²"], line["beyond noise"], line["entropy"]) == ("2", "0.2000", "2", "0.50")
    assert table[2][3] == "0"


def test_what_could_not_be_measured_is_in_no_mean_and_comes_last():
    unknown = {"mmd": math.nan, "auc": math.nan}
    one = diagnosis(head(0, **unknown), head(1, mmd=0.1, auc=0.8), head(2, **unknown), head(3, mmd=0.3, auc=0.9))
    for told, column in ((one, "MMD²"), (compare_diagnoses(one, one), "MMD² before")):
        titles, line = layer_table(told)
        assert line[titles.index(column)] == "0.2000" and "0.85" in line
    order = diagnosis(*(head(i, mmd=math.nan if i % 2 else i / 100) for i in range(22)))
    assert [row[1] for row in head_table(order)[1:]] == [str(i) for i in range(20, 0, -2)]
    none = diagnosis(*(head(i, mmd=0.0) for i in range(22)))
    shown = [row[1] for row in head_table(compare_diagnoses(none, order))[1:]]
    assert shown == [str(i) for i in range(20, 0, -2)]


def test_the_heads_that_differ_most_come_first_and_all_in_their_order():
    many = diagnosis(*(head(i, mmd=i / 100) for i in range(14)))
    assert [row[1] for row in head_table(many)[1:]] == [str(i) for i in range(13, 3, -1)]
    assert [row[1] for row in head_table(many, every_head=True)[1:]] == [str(i) for i in range(14)]
    text = FORMATS["text"](many, False)
    assert "Shown are 10 of 14 heads, those that differ most" in text
    changed = FORMATS["text"](compare_diagnoses(many, many), False)
    assert "Shown are 10 of 14 heads, those that changed most" in changed
    assert "Shown" not in FORMATS["text"](many, True)


@pytest.fixture(params=["one", "two"])
def told(request):
    one = diagnosis(head(0, auc=math.nan), head(1), words=["Plain words."])
    return one if request.param == "one" else compare_diagnoses(one, diagnosis(head(0), head(1), name="b"))


def test_every_form_has_every_head_and_the_words(told):
    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"](told, False))))
    assert [(line["layer"], line["head"]) for line in lines] == [("encoder.0", "0"), ("encoder.0", "1")]
    prefix = "" if isinstance(told, Diagnosis) else "before_"
    assert float(lines[1][f"{prefix}noise_low"]) == -0.01 and float(lines[1][f"{prefix}auc_high"]) == 0.95
    found = json.loads(FORMATS["json"](told, False))
    assert found["words"] == told.words
    for form in ("text", "markdown"):
        page = FORMATS[form](told, True)
        assert all(sentence in page for sentence in told.words) and page.count("encoder.0") >= 3
    rows = [line for line in FORMATS["markdown"](told, True).splitlines() if line.startswith("|")]
    columns = {line.replace("\\|", "").count("|") for line in rows}
    assert len(columns) == 2  # two tables, each with one number of columns
