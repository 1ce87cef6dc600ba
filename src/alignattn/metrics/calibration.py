"""How well predicted probabilities tell how often they are right.

    ECE   = 100 · sum_g |G_g|/n · |acc(G_g) - conf(G_g)|,    G_g = {i : g/bins <= max_c p_ic < (g+1)/bins}
    Brier = 1/n sum_i sum_c (p_ic - [c = y_i])²,    NLL = -1/n sum_i log p_{i,y_i}

Zhang et al. 2021 take ten bins as Desai and Durrett 2020 do, whose code closes them below and puts a confidence of one
into the last; Guo et al. 2017 close them above, and torchmetrics gives it one of its own. ECE is in percent. The Brier
score is that of Brier 1950, from 0 to 2: with two classes twice the mean of (p_1 - y)². A probability of zero for what
came true has an infinite NLL, and is not clipped. Of equal probabilities the first class is predicted.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from alignattn.errors import ConfigError, checked
from alignattn.metrics.inputs import check_probabilities_and_labels, exact


@dataclass(frozen=True, kw_only=True)
class ReliabilityBins:
    """Samples by the confidence of their prediction; an empty bin has NaN for confidence and accuracy."""

    count: Int[Tensor, " bins"]
    confidence: Float[Tensor, " bins"]  # mean probability of the predicted class
    accuracy: Float[Tensor, " bins"]  # share of predictions that are right
    edges: Float[Tensor, " bins+1"]  # bin g holds edges[g] <= confidence < edges[g + 1], the last one 1 too


def _check_binned(probability: Any, label: Any, *, bins: Any = 10) -> None:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ConfigError(f"bins must be a whole number > 0, got {bins!r}. The paper uses 10.")
    check_probabilities_and_labels(probability, label)


@checked(_check_binned)
def reliability_bins(
    probability: Float[Tensor, "n c"], label: Integer[Tensor, " n"], *, bins: int = 10
) -> ReliabilityBins:
    """Count, mean confidence and accuracy in each of `bins` bins of equal width over [0, 1]."""
    confidence, prediction = exact(probability).max(-1)  # (n)
    hit = exact(prediction == label.to(prediction.device))
    edges = torch.arange(bins + 1, dtype=torch.float64, device=confidence.device) / bins
    index = torch.bucketize(confidence, edges[1:-1], right=True)  # edges[index] <= confidence < edges[index + 1]
    count = torch.bincount(index, minlength=bins)
    confidence_sum, hits = (torch.bincount(index, weights=value, minlength=bins) for value in (confidence, hit))
    return ReliabilityBins(count=count, confidence=confidence_sum / count, accuracy=hits / count, edges=edges)


@checked(_check_binned)
def expected_calibration_error(
    probability: Float[Tensor, "n c"], label: Integer[Tensor, " n"], *, bins: int = 10
) -> float:
    """ECE of the predicted class, in percent."""
    groups = reliability_bins(probability, label, bins=bins)
    gap = (groups.accuracy - groups.confidence).abs().nan_to_num(0.0)  # an empty bin weighs nothing
    return 100 * float((groups.count * gap).sum() / groups.count.sum())


@checked(check_probabilities_and_labels)
def brier_score(probability: Float[Tensor, "n c"], label: Integer[Tensor, " n"]) -> float:
    """Squared distance to the label's one-hot vector: 0 is perfect, 2 is certain and wrong."""
    residual = exact(probability).clone()  # (n, c)
    residual[torch.arange(len(label), device=residual.device), label.to(residual.device).long()] -= 1
    return float(residual.square().sum(-1).mean())


@checked(check_probabilities_and_labels)
def negative_log_likelihood(probability: Float[Tensor, "n c"], label: Integer[Tensor, " n"]) -> float:
    """Mean of -log p of the label, in nats; infinite where one label has probability zero."""
    chosen = probability.gather(1, label.to(probability.device).long()[:, None])[:, 0]  # (n)
    return float(-exact(chosen).log().mean()) + 0.0  # + 0.0: no minus zero
