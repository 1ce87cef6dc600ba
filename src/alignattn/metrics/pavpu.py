"""Patch accuracy versus patch uncertainty: is a model certain where it is right, and uncertain where it is wrong?

    PAvPU = (n_ac + n_iu) / (n_ac + n_au + n_ic + n_iu)
    n_ac = sum_i Acc_i Cer_i,    n_iu = sum_i (1 - Acc_i)(1 - Cer_i),    Acc(answer) = min(humans who said it / 3, 1)

Mukhoti and Gal 2018; Zhang et al. 2021, appendix, "Uncertainty evaluation via PAvPU". Of s posterior samples, Cer_i = 1
when Welch's test tells the two classes of highest posterior mean apart: p < 0.05. Without any variance it is certain
when the means differ. Acc_i is 0 or 1 in the plain form, and between them for VQA. All sums together make n:
PAvPU is the mean of Acc Cer + (1 - Acc)(1 - Cer), a share, not percent.

Where all samples and classes don't fit into memory, collect `certain` batch by batch and join with `pavpu_of`.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer, Real
from torch import Tensor

from alignattn.errors import ConfigError, ShapeError, checked
from alignattn.metrics.inputs import (
    check_labels,
    check_length,
    check_probabilities,
    check_real,
    check_scores,
    check_tensor,
    exact,
)
from alignattn.metrics.student import welch_p_value

ANNOTATORS = 3  # an answer that so many humans gave counts in full


def _check_certain(samples: Any, *, threshold: Any = 0.05) -> None:
    if not 0 < threshold < 1:
        raise ConfigError(f"threshold must lie between 0 and 1, got {threshold!r}. The paper uses 0.05.")
    check_scores("samples", samples, "s n c")
    if samples.shape[0] < 2:
        raise ShapeError("samples holds one posterior sample, and a variance needs two. The paper draws 20.")
    if samples.shape[2] < 2:
        raise ShapeError("samples has one class. Give the probability of each class, of two for a binary task.")


def _check_pavpu(samples: Any, label: Any, *, threshold: Any = 0.05) -> None:
    _check_certain(samples, threshold=threshold)
    check_probabilities("samples", samples, "s n c")
    check_labels("label", label, samples.shape[2])
    check_length("label", len(label), "samples", samples.shape[1])


def _check_soft(samples: Any, answer_accuracy: Any, *, threshold: Any = 0.05) -> None:
    _check_certain(samples, threshold=threshold)
    check_scores("answer_accuracy", answer_accuracy, "n c")
    if answer_accuracy.shape != samples.shape[1:]:
        raise ShapeError(
            f"answer_accuracy must be [n, c] = {tuple(samples.shape[1:])}, got {tuple(answer_accuracy.shape)}."
        )


def _check_joined(accuracy: Any, certainty: Any) -> None:
    check_scores("accuracy", accuracy, "n")
    check_tensor("certainty", certainty, "n")
    if certainty.dtype != torch.bool:
        raise ShapeError(f"certainty must be bool, got {certainty.dtype}.")
    check_length("certainty", len(certainty), "accuracy", len(accuracy))


def _check_votes(votes: Any) -> None:
    check_real("votes", votes, "n c")
    if bool((votes < 0).any()):
        raise ConfigError("votes must be >= 0: how many humans gave each answer.")


@checked(_check_certain)
def certain(samples: Float[Tensor, "s n c"], *, threshold: float = 0.05) -> Bool[Tensor, " n"]:
    """Whether the two classes of highest mean differ, of s samples of n predictions over c classes.

    Each score lies between 0 and 1; a row need not sum to one, since the answers of VQA models are sigmoids.
    """
    top = _posterior_order(samples)[:, :2]  # (n, 2)
    pair = samples.gather(2, top.expand(len(samples), -1, -1))  # (s, n, 2)
    return welch_p_value(pair[..., 0], pair[..., 1]) < threshold


@checked(_check_pavpu)
def pavpu(samples: Float[Tensor, "s n c"], label: Integer[Tensor, " n"], *, threshold: float = 0.05) -> float:
    """PAvPU of s posterior samples of n predicted distributions; right or wrong by the highest mean."""
    prediction = _posterior_order(samples)[:, 0]
    return pavpu_of(exact(prediction == label.to(prediction.device)), certain(samples, threshold=threshold))


@checked(_check_soft)
def soft_pavpu(
    samples: Float[Tensor, "s n c"], answer_accuracy: Float[Tensor, "n c"], *, threshold: float = 0.05
) -> float:
    """PAvPU of VQA, where answer c to question i is right by `answer_accuracy[i, c]`, see `vqa_accuracy`."""
    prediction = _posterior_order(samples)[:, :1]  # (n, 1)
    accuracy = answer_accuracy.to(prediction.device).gather(1, prediction)[:, 0]
    return pavpu_of(accuracy, certain(samples, threshold=threshold))


@checked(_check_joined)
def pavpu_of(accuracy: Float[Tensor, " n"], certainty: Bool[Tensor, " n"]) -> float:
    """PAvPU of n predictions, each right by a share between 0 and 1, each certain or not."""
    share = exact(accuracy)
    return float(torch.where(certainty.to(share.device), share, 1 - share).mean())


@checked(_check_votes)
def vqa_accuracy(votes: Real[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """Accuracy of each answer, from how many of the ten humans gave it: min(votes / 3, 1)."""
    return (exact(votes) / ANNOTATORS).clamp_max(1.0)


def _posterior_order(samples: Float[Tensor, "s n c"]) -> Int[Tensor, "n 2"]:
    """The two classes of highest mean; of equal means the first class comes first."""
    mean = samples.detach().mean(0, dtype=torch.float64)  # (n, c)
    first = mean.argmax(-1, keepdim=True)
    second = mean.scatter(-1, first, -1.0).argmax(-1, keepdim=True)
    return torch.cat([first, second], -1)
