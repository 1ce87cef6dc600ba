"""The attention that tokens receive: heights of bars against means written out."""

import pytest

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.colours import KINDS

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from drawings import weights
from matplotlib.colors import to_hex

SENTENCES = [["a", "b"], ["x", "y", "z"]]


def heights(bars) -> list[float]:
    return [bar.get_height() for bar in bars]


def test_bars_are_means_over_the_queries_soft_beside_aligned():
    soft = [[[0.8, 0.2], [0.4, 0.6]], [[0.5, 0.25, 0.25]]]
    aligned = [[0.3, 0.7], [[0.2, 0.2, 0.6], [0.4, 0.0, 0.6]]]  # the first is a mean already
    first, second = plots.received({"soft": soft, "mmd 0.1": aligned}, sentences=SENTENCES)
    for axis, expected in ((first, ([0.6, 0.4], [0.3, 0.7])), (second, ([0.5, 0.25, 0.25], [0.3, 0.1, 0.6]))):
        assert [heights(bars) for bars in axis.containers] == [pytest.approx(one) for one in expected]
        left, right = axis.containers
        for token, (one, other) in enumerate(zip(left, right, strict=True)):
            assert one.get_x() + one.get_width() == pytest.approx(other.get_x())  # side by side, about the token
            assert (one.get_x() + other.get_x() + other.get_width()) / 2 == pytest.approx(token)
        assert [to_hex(bars[0].get_facecolor()) for bars in (left, right)] == [
            KINDS[kind].lower() for kind in ("soft", "mmd")
        ]


def test_each_sentence_has_its_tokens_and_the_line_of_an_even_share():
    axes = plots.received({"soft": [weights(2, 2), weights(3, 3)]}, sentences=SENTENCES)
    for axis, tokens in zip(axes, SENTENCES, strict=True):
        assert [text.get_text() for text in axis.get_xticklabels()] == tokens
        (line,) = axis.lines
        assert set(line.get_ydata()) == {1 / len(tokens)}
    assert axes[0].get_ylim() == axes[1].get_ylim()
    assert axes[0].get_position().y0 > axes[1].get_position().y1  # in their order, downwards
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["soft", "shared evenly"]


@pytest.mark.parametrize("count", [1, 64, 65, 512])
def test_sentences_of_any_length_fit_the_page(count):
    (axis,) = plots.received({"soft": [weights(count, count)]}, sentences=[["token"] * count])
    assert axis.figure.get_size_inches()[0] < 10
    expected = weights(count, count).mean(0)
    drawn = axis.lines[0].get_ydata() if count > 64 else heights(axis.containers[0])
    np.testing.assert_allclose(drawn, expected)


@pytest.mark.parametrize(
    ("kinds", "sentences", "error", "message"),
    [
        ({"a": [[1.0, float("inf")]]}, [["x", "y"]], NonFiniteError, "'a' in sentence 0 hold NaN or infinity"),
        ({"a": [[0.5, 0.5]]}, [["x"]], ShapeError, r"with 1 keys, one a token; got shape \(2,\)"),
        ({"a": [np.ones((2, 3, 3))]}, [["x"]], ShapeError, r"got shape \(2, 3, 3\)"),
        ({"a": [np.ones((0, 1))]}, [["x"]], ShapeError, r"got shape \(0, 1\)"),
        ({"a": [[1.0]]}, [["x"], ["y"]], ShapeError, "weights for 1 sentences, and 2 were given"),
        ({"a": [[-1.0]]}, [["x"]], ConfigError, "no attention weights"),
        ({"a": [[1.0]]}, "xy", ConfigError, "a list of lists of tokens"),
        ({"a": [[1.0]]}, ["xy"], ConfigError, "a list of lists of tokens"),
        ({"a": []}, [], ConfigError, "a list of lists of tokens"),
        ({"a": [[]]}, [[]], ConfigError, "one token or more each"),
        ({}, [["x"]], ConfigError, "got no panels"),
    ],
)
def test_what_cannot_be_received_is_refused(kinds, sentences, error, message):
    with pytest.raises(error, match=message):
        plots.received(kinds, sentences=sentences)
