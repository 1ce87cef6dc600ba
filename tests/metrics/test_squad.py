"""SQuAD's exact match and F1 against arithmetic by hand: normalisation, several answers, no answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignattn.errors import ConfigError, ShapeError
from alignattn.metrics import normalise_answer, squad_exact_match, squad_f1

METRICS = [squad_exact_match, squad_f1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Eiffel Tower!", "eiffel tower"),
        ("  an   apple\ta day\n", "apple day"),
        ("Anthem of the Athenian", "anthem of athenian"),  # articles are words, not parts of words
        ("U.S.A.", "usa"),
        ("a.b", "ab"),  # punctuation goes first and joins, so no article is left
        ("the-end", "theend"),
        ("«Zürich» – 5°", "«zürich» – 5°"),  # ASCII punctuation alone
        ("The", ""),
        ("", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalise_answer(text) == expected


def test_exact_match_by_hand():
    predictions = ["The Normans", "in 1066", "10th century"]
    answers = [["normans", "Norman people"], ["1066"], ["the 10th  Century."]]
    assert squad_exact_match(predictions, answers) == 2 / 3  # right, wrong, right


def test_f1_by_hand():
    # words: big red dog / red dog house: common 2, precision 2/3, recall 2/3
    assert squad_f1(["a big red dog"], [["red dog house"]]) == pytest.approx(2 * (2 / 3 * 2 / 3) / (2 / 3 + 2 / 3))
    # in 1066 / 1066: precision 1/2, recall 1
    assert squad_f1(["in 1066"], [["1066"]]) == pytest.approx(2 * (1 / 2 * 1) / (1 / 2 + 1))
    assert squad_f1(["cat"], [["dog"]]) == 0.0
    # the mean over questions, each by its best answer
    assert squad_f1(["in 1066", "cat"], [["dog", "1066"], ["dog"]]) == pytest.approx((2 / 3 + 0) / 2)


def test_repeated_words_count_as_often_as_both_have_them():
    # to be or not to be / to be: common 2, precision 2/6, recall 2/2
    assert squad_f1(["to be or not to be"], [["to be"]]) == pytest.approx(2 * (2 / 6 * 1) / (2 / 6 + 1))
    # to be to / to to to: common 2
    assert squad_f1(["to be to"], [["to to to"]]) == pytest.approx(2 * 2 / (3 + 3))


@pytest.mark.parametrize("metric", METRICS)
def test_questions_without_answer(metric):
    assert metric([""], [[]]) == 1.0
    assert metric([""], [[""]]) == 1.0
    assert metric(["something"], [[]]) == 0.0
    assert metric([""], [["something"]]) == 0.0
    assert metric(["the"], [[]]) == 1.0  # no word left


@pytest.mark.parametrize("metric", METRICS)
def test_a_human_answer_with_no_word_left_is_not_counted(metric):
    assert metric([""], [["the", "who"]]) == 0.0
    assert metric(["a"], [["the"]]) == 1.0  # the only one: as a question without answer


WORDS = st.lists(st.sampled_from(["red", "dog", "house", "the", "a", "1066", "Dog!"]), max_size=6).map(" ".join)


@given(WORDS, st.lists(WORDS, max_size=3))
def test_f1_is_at_least_the_exact_match_and_at_most_one(prediction, answers):
    exact, f1 = squad_exact_match([prediction], [answers]), squad_f1([prediction], [answers])
    assert exact in {0.0, 1.0} and exact <= f1 <= 1.0


@given(WORDS, WORDS)
def test_one_answer_is_symmetric_blind_to_form_and_as_precision_and_recall_say(prediction, answer):
    value = squad_f1([prediction], [[answer]])
    assert squad_f1([answer], [[prediction]]) == pytest.approx(value)
    assert squad_f1([f"The  {prediction.upper()}?"], [[answer]]) == value
    left, right = normalise_answer(prediction).split(), normalise_answer(answer).split()
    common = sum(min(left.count(word), right.count(word)) for word in set(left))
    if common:
        precision, recall = common / len(left), common / len(right)
        assert value == pytest.approx(2 * precision * recall / (precision + recall))
    else:
        assert value == float(not left and not right)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("predictions", "answers", "error", "message"),
    [
        ([], [], ShapeError, "predictions is empty"),
        (["a"], [["a"], ["b"]], ShapeError, "predictions has 1 samples and answers has 2"),
        ("a", [["a"]], ShapeError, "predictions must be a list, .* got str"),
        (["a"], {"0": ["a"]}, ShapeError, "answers must be a list, .* got dict"),
        (["a"], ["a"], ConfigError, r"answers\[0\] must be the list of accepted answers, got str"),
        (["a", None], [["a"], ["b"]], ConfigError, r"predictions\[1\] must be text, got NoneType. No answer is ''"),
        (["a"], [["a", 3]], ConfigError, r"answers\[0\] must hold texts"),
    ],
)
def test_bad_input_is_refused_with_a_reason(metric, predictions, answers, error, message):
    with pytest.raises(error, match=message):
        metric(predictions, answers)
