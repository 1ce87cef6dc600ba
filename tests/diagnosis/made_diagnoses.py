"""Diagnoses with figures of our own."""

from alignattn.diagnosis.result import Diagnosis, HeadDiagnosis


def head(number=0, layer="encoder.0", **other):
    values = {
        "layer": layer,
        "head": number,
        "samples": 10,
        "tokens": 90,
        "mmd": 0.2,
        "noise": (-0.01, 0.01),
        "mmd_p": 0.005,
        "mean_distance": 1.0,
        "covariance_distance": 0.5,
        "query_norm": 2.0,
        "key_norm": 2.5,
        "entropy": 0.7,
        "auc": 0.9,
        "auc_interval": (0.85, 0.95),
        "mmd_error": 0.004,
    }
    return HeadDiagnosis(**values | other)


def diagnosis(*heads, name="mine", **other):
    return Diagnosis(name=name, heads=list(heads) or [head()], **other)
