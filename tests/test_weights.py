"""The weight of the alignment loss, as it is written and read."""

import pytest

import alignattn
from alignattn.config import resolve
from alignattn.errors import ConfigError
from alignattn.weights import read_weight, write_weight


@pytest.mark.parametrize(
    ("text", "weight"),
    [("0.1", 0.1), ("1e-3", 0.001), ("auto", alignattn.Auto(0.2)), ("auto:0.03", alignattn.Auto(0.03))],
)
def test_a_weight_is_read_as_it_is_meant(text, weight):
    assert read_weight(text) == weight
    assert resolve("mmd", text, "stable", {}).weight == weight


@pytest.mark.parametrize(
    "text", ["", "much", "auto:", "auto:much", "auto:-1", "auto:0", "auto:nan", "-1", "nan", "inf"]
)
def test_what_is_no_weight_is_refused_in_a_sentence(text):
    with pytest.raises(ConfigError, match=r"weight|share"):
        read_weight(text)


@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0, 1e-300, 0.1 + 0.2, 1234567.5])
def test_a_written_weight_reads_as_itself(weight):
    assert read_weight(write_weight(weight)) == weight


@pytest.mark.parametrize("share", [0.03, 0.1, 2.0, 0.1234567, 1e-05])
def test_a_chosen_weight_is_told_with_its_share(share):
    told = resolve("ot", alignattn.Auto(share), "stable", {}).told_weight
    assert told == write_weight(told) and read_weight(told) == alignattn.Auto(share)


def test_a_weight_among_the_options_is_read_as_well():
    assert resolve("mmd", None, "stable", {"weight": "auto"}).weight == alignattn.Auto()
