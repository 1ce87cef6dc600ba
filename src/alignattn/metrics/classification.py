"""How often predicted classes are right.

    accuracy = 1/n sum_i [ŷ_i = y_i],    F1 = 2 TP / (2 TP + FP + FN)
    Matthews = (n·hits - sum_k p_k t_k) / sqrt((n² - sum_k p_k²)(n² - sum_k t_k²)),    p_k, t_k: how often k is ŷ and y

All are shares, not percent. F1 is that of one class, the positive one. Matthews takes any number of classes (Gorodkin
2004); for two it is (TP·TN - FP·FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)). Where a quotient is 0/0 it is 0, as in
scikit-learn: F1 when the positive class is neither predicted nor true, Matthews when one side is constant.
"""

from typing import Any

import torch
from jaxtyping import Integer
from torch import Tensor

from alignattn.errors import ConfigError, checked
from alignattn.metrics.inputs import check_labels, check_length, exact


def _check_classes(prediction: Any, label: Any, *, positive: Any = 1) -> None:
    if isinstance(positive, bool) or not isinstance(positive, int) or positive < 0:
        raise ConfigError(f"positive must be the number of a class, got {positive!r}. GLUE's positive class is 1.")
    check_labels("prediction", prediction)
    check_labels("label", label)
    check_length("prediction", len(prediction), "label", len(label))


@checked(_check_classes)
def accuracy(prediction: Integer[Tensor, " n"], label: Integer[Tensor, " n"]) -> float:
    """Share of predictions that are right."""
    return float(exact(prediction == label.to(prediction.device)).mean())


@checked(_check_classes)
def f1(prediction: Integer[Tensor, " n"], label: Integer[Tensor, " n"], *, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of the class `positive`."""
    predicted, true = prediction == positive, label.to(prediction.device) == positive
    both = int((predicted & true).sum())
    total = int(predicted.sum()) + int(true.sum())  # 2 TP + FP + FN
    return 2 * both / total if total else 0.0


@checked(_check_classes)
def matthews(prediction: Integer[Tensor, " n"], label: Integer[Tensor, " n"]) -> float:
    """Correlation of predicted and true classes, from -1 to 1; 0 for constant predictions or labels."""
    label = label.to(prediction.device)
    classes, index = torch.unique(torch.cat([prediction.long(), label.long()]), return_inverse=True)
    predicted, true = (exact(torch.bincount(part, minlength=len(classes))) for part in index.chunk(2))
    n, hits = float(len(label)), float((prediction == label).sum())
    covariance = n * hits - float(predicted @ true)
    predicted_spread, true_spread = (n * n - float(count @ count) for count in (predicted, true))
    # The roots apart: the product of two counts to the fourth power would leave float64's whole numbers earlier.
    scale = predicted_spread**0.5 * true_spread**0.5
    return covariance / scale if scale else 0.0
