"""Metrics as pure functions: tensors (texts for SQuAD) in, numbers out, computed in float64.

Everything is a share, from 0 to 1 or -1 to 1, except `expected_calibration_error`, which is in percent,
`brier_score`, from 0 to 2, and `negative_log_likelihood`, in nats.
"""

from alignattn.metrics.calibration import (
    ReliabilityBins,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability_bins,
)
from alignattn.metrics.classification import accuracy, f1, matthews
from alignattn.metrics.correlation import pearson, spearman
from alignattn.metrics.pavpu import certain, pavpu, pavpu_of, soft_pavpu, vqa_accuracy
from alignattn.metrics.squad import normalise_answer, squad_exact_match, squad_f1
from alignattn.metrics.student import student_p_value, welch_p_value

__all__ = [
    "ReliabilityBins",
    "accuracy",
    "brier_score",
    "certain",
    "expected_calibration_error",
    "f1",
    "matthews",
    "negative_log_likelihood",
    "normalise_answer",
    "pavpu",
    "pavpu_of",
    "pearson",
    "reliability_bins",
    "soft_pavpu",
    "spearman",
    "squad_exact_match",
    "squad_f1",
    "student_p_value",
    "vqa_accuracy",
    "welch_p_value",
]
