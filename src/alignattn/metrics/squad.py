"""Answers in words against the answers that humans gave.

    EM = mean over questions of max_a [norm(answer) = norm(a)]
    F1 = mean over questions of max_a 2·common / (words(answer) + words(a)),    words with their multiplicity

Rajpurkar et al. 2016 and 2018. norm: lower case, no ASCII punctuation, no article (a, an, the), single spaces; as in
the official scripts. Both are shares, where the scripts print percent. A question without an answer (version 2.0) has
an empty list, and is right when the prediction has no word left. Departure from the script of 1.1, as in that of 2.0:
a human answer with no word left is not counted, where 1.1 gives such a pair EM 1 and F1 0.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from alignattn.errors import ConfigError, ShapeError, checked
from alignattn.metrics.inputs import check_length

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces; in this order, as the official scripts do."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def _check_texts(predictions: Any, answers: Any) -> None:
    for name, value in (("predictions", predictions), ("answers", answers)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ShapeError(f"{name} must be a list, one entry a question, got {type(value).__name__}.")
    check_length("predictions", len(predictions), "answers", len(answers))
    if not predictions:
        raise ShapeError("predictions is empty. A metric needs at least one sample.")
    for i, (prediction, accepted) in enumerate(zip(predictions, answers, strict=True)):
        if not isinstance(prediction, str):
            raise ConfigError(f"predictions[{i}] must be text, got {type(prediction).__name__}. No answer is ''.")
        if isinstance(accepted, str) or not isinstance(accepted, Sequence):
            raise ConfigError(f"answers[{i}] must be the list of accepted answers, got {type(accepted).__name__}.")
        if not all(isinstance(answer, str) for answer in accepted):
            raise ConfigError(f"answers[{i}] must hold texts, got {accepted!r}.")


@checked(_check_texts)
def squad_exact_match(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Share of questions whose prediction is, but for form, one of the accepted answers."""
    hits = [normalise_answer(text) in _accepted(answer) for text, answer in zip(predictions, answers, strict=True)]
    return sum(hits) / len(hits)


@checked(_check_texts)
def squad_f1(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Mean over questions of the F1 of the words shared with the nearest accepted answer."""
    scores = [
        max(_overlap(normalise_answer(text).split(), accepted.split()) for accepted in _accepted(answer))
        for text, answer in zip(predictions, answers, strict=True)
    ]
    return sum(scores) / len(scores)


def _accepted(answers: Sequence[str]) -> list[str]:
    normalised = [normalise_answer(answer) for answer in answers]
    return [answer for answer in normalised if answer] or [""]


def _overlap(predicted: list[str], accepted: list[str]) -> float:
    if not predicted or not accepted:
        return float(predicted == accepted)
    common = sum((Counter(predicted) & Counter(accepted)).values())
    return 2 * common / (len(predicted) + len(accepted))
