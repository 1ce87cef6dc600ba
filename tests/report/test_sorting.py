"""Cells sort by the number that a reader sees in them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignattn.experiments.tables import _number, _signed
from alignattn.report.sorting import in_script, is_missing, is_numeric, sort_key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("77.2", 77.2),
        ("77.21 ± 0.34", 77.21),
        ("77.21 ± 0.34 ▲", 77.21),
        ("−1.5", -1.5),
        ("-1.5", -1.5),
        ("+0.25", 0.25),
        ("−0.0021 to +0.0034", -0.0021),
        ("5 (1 failed)", 5),
        ("12,345", 12345),
        ("1e-5", 1e-5),
        ("1e−5", 1e-5),
        ("12 %", 12),
        ("∞", math.inf),
        ("−∞", -math.inf),
        ("inf", math.inf),
        ("soft", None),
        ("2026-01-02T03:04:05", None),
        ("3d", None),
        ("–", None),
        ("", None),
    ],
)
def test_the_number_that_a_cell_begins_with(text, key):
    assert sort_key(text) == key


def test_a_bound_lies_beside_its_number():
    assert sort_key("0.0009") < sort_key("< 0.001") < sort_key("0.001") < sort_key("> 0.001") < sort_key("0.0011")


@given(st.lists(st.integers(-(10**6), 10**6), min_size=2))
def test_cells_of_the_tables_sort_as_their_numbers(numbers):
    for write in (_number, _signed):
        cells = [write(number / 100, 2) for number in numbers]
        assert [sort_key(cell) for cell in cells] == [number / 100 for number in numbers]


@pytest.mark.parametrize("text", ["–", "—", "-", "", " ", "NaN"])
def test_what_is_missing(text):
    assert is_missing(text)


def test_a_column_is_one_of_numbers_if_every_cell_is():
    assert is_numeric(["1.2 ± 0.3", "–", "−4"])
    assert not is_numeric(["1.2", "gan 0.1"])
    assert not is_numeric(["–", ""])


def test_infinity_is_written_as_a_script_reads_it():
    assert [in_script(key) for key in (math.inf, -math.inf, 0.5)] == ["Infinity", "-Infinity", "0.5"]
