"""What a run is measured by, from logits and labels. Shares, correlations and ECE are in percent.

Multi-label: F1 = 2 TP / (2 TP + FP + FN) over all decisions, p > 1/2; accuracy is the share of rows with every label
right; ECE is that of the decisions, one a row and label, each with confidence max(p, 1-p). Tokens: accuracy and ECE
over tokens; F1 over entities where labels are IOB tags, else the mean over labels of each one's F1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from alignattn import metrics
from alignattn.errors import NonFiniteError
from alignattn.experiments.tasks import measuring
from alignattn.finetune.entities import are_iob, entities

LABEL_OF_NONE = -100  # of padding, and of all pieces of a word but its first


@dataclass(frozen=True)
class Scores:
    """Metrics by name, the first the chief one, and what pictures need."""

    metrics: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)


def score(task: str, names: Sequence[str], logits: Tensor, labels: Tensor) -> Scores:
    """Logits [n, c], or [n, m, c] for tokens, against labels [n], [n, c] or [n, m]."""
    if task == "tokens":
        return _tokens(names, logits.double(), labels)
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("The trained model gives NaN or infinity: training diverged. Lower --learning-rate.")
    logits = logits.double()
    if task == "regression":
        return _regression(logits[:, 0], labels.double().flatten())
    if task == "multilabel":
        return _multilabel(logits.sigmoid(), labels.long())
    measured = measuring.classification(logits.softmax(-1), labels.long(), binary=len(names) == 2)
    return Scores(measured.metrics, measured.details)


def _regression(prediction: Tensor, target: Tensor) -> Scores:
    rmse = float((prediction - target).square().mean().sqrt())
    if len(target) < 2:
        return Scores({"rmse": rmse})  # one point has no correlation
    return Scores({**measuring.regression(prediction, target).metrics, "rmse": rmse})


def _multilabel(probability: Tensor, label: Tensor) -> Scores:
    decided = (probability > 0.5).long()  # (n, c)
    each = probability.flatten()  # (n·c)
    measured = measuring.classification(torch.stack([1 - each, each], -1), label.flatten())
    found = {
        "f1": 100 * metrics.f1(decided.flatten(), label.flatten()),
        "accuracy": 100 * float((decided == label).all(-1).double().mean()),
        "ece": measured.metrics["ece"],
    }
    return Scores(found, measured.details)


def _tokens(names: Sequence[str], logits: Tensor, labels: Tensor) -> Scores:
    counted = labels != LABEL_OF_NONE  # (n, m)
    if not bool(logits[counted].isfinite().all()):
        raise NonFiniteError("The trained model gives NaN or infinity: training diverged. Lower --learning-rate.")
    measured = measuring.classification(logits[counted].softmax(-1), labels[counted])
    predicted = logits.argmax(-1)  # (n, m)
    if are_iob(names):
        f1 = _entity_f1(names, predicted, labels, counted)
    else:
        p, t = predicted[counted], labels[counted]
        present = torch.cat([p, t]).unique().tolist()
        f1 = sum(metrics.f1(p, t, positive=c) for c in present) / len(present)
    found = {"f1": 100 * f1, "accuracy": measured.metrics["accuracy"], "ece": measured.metrics["ece"]}
    return Scores(found, measured.details)


def _entity_f1(names: Sequence[str], predicted: Tensor, labels: Tensor, counted: Tensor) -> float:
    both = total = 0
    for p, t, mask in zip(predicted, labels, counted, strict=True):
        found, true = (entities([names[i] for i in tags[mask].tolist()]) for tags in (p, t))
        both += len(found & true)
        total += len(found) + len(true)
    return 2 * both / total if total else 0.0
