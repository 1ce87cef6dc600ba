"""How closely predicted numbers follow the true ones.

    Pearson = sum_i (x_i - x̄)(y_i - ȳ) / (|x - x̄| |y - ȳ|)
    Spearman = Pearson of the ranks, ties sharing their mean rank

From -1 to 1, as shares. Constant predictions or targets have no correlation: NaN, with an `AlignmentWarning` that says
which side is constant. A collapsed model is a result to be seen, not a run to be lost, and zero would claim too much.
"""

import math
import warnings
from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor

from alignattn.errors import AlignmentWarning, ShapeError, checked
from alignattn.metrics.inputs import check_length, check_real, exact


def _check_numbers(prediction: Any, target: Any) -> None:
    check_real("prediction", prediction, "n")
    check_real("target", target, "n")
    check_length("prediction", len(prediction), "target", len(target))
    if len(target) < 2:
        raise ShapeError("A correlation needs at least two samples, got one.")


@checked(_check_numbers)
def pearson(prediction: Real[Tensor, " n"], target: Real[Tensor, " n"]) -> float:
    """Linear correlation; NaN, with a warning, when a side is constant."""
    return _correlation("Pearson", exact(prediction), exact(target).to(prediction.device))


@checked(_check_numbers)
def spearman(prediction: Real[Tensor, " n"], target: Real[Tensor, " n"]) -> float:
    """Correlation of ranks; NaN, with a warning, when a side is constant."""
    return _correlation("Spearman", _ranks(prediction), _ranks(target).to(prediction.device))


def _ranks(value: Real[Tensor, " n"]) -> Float[Tensor, " n"]:
    _, index, count = torch.unique(value.detach(), return_inverse=True, return_counts=True)
    rank: Tensor = count.cumsum(0) - (exact(count) - 1) / 2  # the mean of the ranks that equal values share
    return rank[index]


def _correlation(name: str, prediction: Float[Tensor, " n"], target: Float[Tensor, " n"]) -> float:
    directions = []
    for side, value in (("prediction", prediction), ("target", target)):
        value = value / value.abs().max().clamp_min(torch.finfo(value.dtype).tiny)  # squares cannot overflow
        value = value - value[0]  # equal values give exact zeros, which a rounded mean would not
        if not bool(value.any()):
            reason = f"{name} correlation is undefined, NaN: all {len(value)} values of {side} are equal."
            warnings.warn(reason, AlignmentWarning, stacklevel=4)
            return math.nan
        value = value / value.abs().max()
        value = value - value.mean()
        directions.append(value / value.norm())
    return max(-1.0, min(1.0, float(directions[0] @ directions[1])))
