"""What several tasks measure alike. Shares are in percent here, as in the paper's tables."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alignattn import metrics
from alignattn.coordinates import rebase
from alignattn.diagnosis.mmd import discrepancy
from alignattn.experiments.tasks.task import Measured


def classification(probability: Tensor, label: Tensor, *, on: str = "", binary: bool = False) -> Measured:
    """Accuracy and calibration, with F1 and Matthews for two classes; `on` names data other than the main ones."""
    probability, label = probability.double().cpu(), label.cpu()
    probability = probability / probability.sum(-1, keepdim=True)  # softmax in low precision is off by a rounding
    prediction = probability.argmax(-1)
    values = {
        "accuracy": 100 * metrics.accuracy(prediction, label),
        "ece": metrics.expected_calibration_error(probability, label),
        "brier": metrics.brier_score(probability, label),
        "nll": metrics.negative_log_likelihood(probability, label),
    }
    if binary:
        values["f1"] = 100 * metrics.f1(prediction, label)
        values["matthews"] = 100 * metrics.matthews(prediction, label)
    bins = metrics.reliability_bins(probability, label)
    details = {
        "reliability": {
            "count": bins.count.tolist(),
            "confidence": _rounded(bins.confidence),
            "accuracy": _rounded(bins.accuracy),
            "edges": _rounded(bins.edges),
        }
    }
    return named(Measured(values, details), on)


def regression(prediction: Tensor, target: Tensor, *, on: str = "") -> Measured:
    """Correlations of predictions and targets."""
    prediction, target = prediction.double().cpu(), target.double().cpu()
    values = {
        "pearson": 100 * metrics.pearson(prediction, target),
        "spearman": 100 * metrics.spearman(prediction, target),
    }
    return named(Measured(values), on)


def key_query_distance(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[nn.Module, Any], object] = lambda model, batch: model(batch),
    on: str = "",
) -> Measured:
    """Unbiased squared MMD of keys and queries, summed over heads and layers: median bandwidth, and the paper's.

    Once more without the pairs of a query and its own key: where those are alike the plain form falls below zero.
    """
    batches = list(batches)
    median = discrepancy(model, batches, call=call)
    apart = discrepancy(model, batches, without_own=True, call=call)
    unit = discrepancy(model, batches, bandwidth=1.0, call=call)
    values = {"mmd": _total(median), "mmd_apart": _total(apart), "mmd_unit": _total(unit)}
    return named(Measured(values, {"mmd": {layer: _rounded(heads) for layer, heads in median.items()}}), on)


def distance_when_rebased(
    model: nn.Module,
    telling: Iterable[Any],
    batches: Mapping[str, Sequence[Any]],
    *,
    call: Callable[[nn.Module, Any], object] = lambda model, batch: model(batch),
) -> Measured:
    """MMD² once queries and keys are rebased, by batches `telling`: what goes by it was never felt.

    `batches` of each data set, by the name that stands behind the metric. Nothing where no layer can be rebased.
    """
    model = copy.deepcopy(model)
    measured = Measured()
    if rebase(model, telling, call=call):
        for on, some in batches.items():
            value = _total(discrepancy(model, some, call=call))
            measured.metrics |= named(Measured({"mmd_rebased": value}), on).metrics
    return measured


def named(measured: Measured, on: str) -> Measured:
    """The same, with the name of the data behind every name: "accuracy@noisy"."""
    suffix = f"@{on}" if on else ""
    return Measured(
        {f"{name}{suffix}": float(value) for name, value in measured.metrics.items()},
        {f"{name}{suffix}": value for name, value in measured.details.items()},
    )


def _total(heads: dict[str, Tensor]) -> float:
    return float(torch.cat([values.flatten() for values in heads.values()]).sum())


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
