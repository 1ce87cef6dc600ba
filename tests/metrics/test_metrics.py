"""What holds for all metrics: the names, and the shapes in their signatures."""

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

from alignattn import metrics

LABEL = torch.tensor([0, 1, 1])
PROBABILITY = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]])
SAMPLES = torch.rand(5, 3, 2).softmax(-1)
TEXTS = (["a cat", "dog"], [["cat"], []])
VALID = {
    "accuracy": (LABEL, LABEL),
    "brier_score": (PROBABILITY, LABEL),
    "certain": (SAMPLES,),
    "expected_calibration_error": (PROBABILITY, LABEL),
    "f1": (LABEL, LABEL),
    "matthews": (LABEL, LABEL),
    "negative_log_likelihood": (PROBABILITY, LABEL),
    "normalise_answer": ("A cat",),
    "pavpu": (SAMPLES, LABEL),
    "pavpu_of": (torch.rand(3), LABEL > 0),
    "pearson": (torch.rand(3), LABEL),
    "reliability_bins": (PROBABILITY, LABEL),
    "soft_pavpu": (SAMPLES, PROBABILITY),
    "spearman": (torch.rand(3), LABEL),
    "squad_exact_match": TEXTS,
    "squad_f1": TEXTS,
    "student_p_value": (torch.rand(3, 2), torch.ones(3, 2)),
    "vqa_accuracy": (torch.ones(3, 2),),
    "welch_p_value": (torch.rand(4, 3), torch.rand(5, 3)),
}


def test_every_public_name_is_there_and_every_function_has_its_example():
    assert metrics.__all__ == sorted(metrics.__all__)
    assert set(metrics.__all__) == {*VALID, "ReliabilityBins"}


@pytest.mark.parametrize("name", sorted(VALID))
def test_shapes_and_types_are_those_of_the_signature(name):
    function = getattr(metrics, name)
    bare = getattr(function, "__wrapped__", function)
    jaxtyped(typechecker=beartype)(bare)(*VALID[name])
