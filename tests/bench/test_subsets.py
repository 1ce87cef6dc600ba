"""What a part of tokens or layers does to the estimate, where it can be told otherwise."""

import pytest
import torch

from alignattn.bench.subsets import estimate, subsets
from alignattn.bench.workload import Shape

TINY = Shape("tiny", 4, 32, 2, 3, 16, "fp32", vocabulary=50)
CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["mmd", "ct"])
def test_all_tokens_and_layers_are_the_whole(method):
    found = estimate(method, {"max_tokens": 16, "every": 1}, TINY, CPU)
    assert found == pytest.approx({"bias": 0.0, "deviation": 0.0, "cosine": 1.0}, abs=1e-5)


def test_half_of_the_layers_leaves_half_of_the_squared_gradient():
    """Layers share nothing here, and are alike: the cosine of a half with the whole is the root of a half."""
    found = estimate("mmd", {"every": 2}, TINY, CPU)
    assert found["cosine"] == pytest.approx(0.5**0.5, abs=0.02)
    assert abs(found["bias"]) < 0.1 and found["deviation"] < 0.2


def test_an_unbiased_loss_of_few_tokens_is_unbiased_and_less_sure():
    few, more = (estimate("mmd", {"max_tokens": count}, TINY, CPU) for count in (4, 12))
    assert abs(few["bias"]) < 4 * few["deviation"] / 16**0.5 + 1e-6  # four standard errors of sixteen draws
    assert few["deviation"] > more["deviation"] and few["cosine"] < more["cosine"] < 1


def test_rows_tell_time_and_estimate():
    rows = subsets(TINY, ["mmd"], CPU, rounds=1)
    assert [row.name for row in rows] == [
        "soft",
        "mmd",
        "mmd, 4 tokens",
        "mmd, half of the layers",
        "mmd, a quarter of the layers",
    ]
    assert all(row.timing is not None for row in rows)
    assert not rows[1].details and set(rows[2].details) == {"bias", "deviation", "cosine"}
