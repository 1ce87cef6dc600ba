"""Maps of MMD² by layer and head: values, one scale, marks and names of layers."""

import pytest
import torch

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.distances import short_names

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from matplotlib import colormaps

SOFT = {"bert.layer.0.self": [0.5, 0.25], "bert.layer.1.self": [1.0, 0.75]}
ALIGNED = {"bert.layer.0.self": [0.1, -0.02], "bert.layer.1.self": [0.02, -0.3]}


def test_rows_are_layers_columns_heads_and_all_panels_have_one_scale_from_zero():
    axes = plots.distance_map({"soft": SOFT, "aligned": ALIGNED})
    for axis, table in zip(axes, (SOFT, ALIGNED), strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), list(table.values()))
        assert [text.get_text() for text in axis.get_xticklabels()] == ["0", "1"]
    oranges = colormaps["Oranges"]
    for axis, shares in zip(axes, ([[0.5, 0.25], [1, 0.75]], [[0.1, 0], [0.02, 0]]), strict=True):
        image = axis.images[0]
        np.testing.assert_allclose(image.to_rgba(image.get_array()), oranges(shares))
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["0", "1"]
    assert axes[0].transData.transform((0, 0))[1] > axes[0].transData.transform((0, 1))[1]  # the first layer on top
    assert [axis.get_title() for axis in axes] == ["soft\nsum 2.5", "aligned\nsum -0.2"]


def test_heads_within_noise_are_marked():
    _, aligned = plots.distance_map({"soft": SOFT, "aligned": ALIGNED}, noise=0.02)
    (marks,) = aligned.collections
    assert {tuple(place) for place in marks.get_offsets()} == {(1, 0), (0, 1)}  # head, layer: -0.02 and 0.02
    (legend,) = aligned.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["within noise"]
    noise = {"soft": SOFT, "aligned": {name: [1.0, 0.0] for name in ALIGNED}}
    soft, aligned = plots.distance_map({"soft": SOFT, "aligned": ALIGNED}, noise=noise)
    assert len(soft.collections[0].get_offsets()) == 4
    assert {tuple(place) for place in aligned.collections[0].get_offsets()} == {(0, 0), (0, 1)}


def test_without_noise_nothing_is_marked():
    axes = plots.distance_map({"soft": SOFT})
    assert not axes[0].collections and not axes[0].figure.legends


def test_layers_with_fewer_heads_leave_cells_empty():
    (axis,) = plots.distance_map({"soft": {"0": [0.1, 0.2, 0.3], "1": [0.4]}}, noise=1.0)
    values = np.ma.filled(axis.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(values, [[0.1, 0.2, 0.3], [0.4, np.nan, np.nan]])
    assert len(axis.collections[0].get_offsets()) == 4


@pytest.mark.parametrize("value", [0.0, -0.1])
def test_nothing_apart_is_white(value):
    (axis,) = plots.distance_map({"soft": {"0": [value]}})
    image = axis.images[0]
    np.testing.assert_allclose(image.to_rgba(image.get_array())[0, 0], colormaps["Oranges"](0.0))


def test_what_a_model_says_of_itself_is_drawn(bert, batch):
    from alignattn.diagnostics import discrepancy

    found = discrepancy(bert, [batch], call=lambda model, one: model(**one))
    (axis,) = plots.distance_map({"soft": found})
    np.testing.assert_allclose(axis.images[0].get_array(), torch.stack(list(found.values())))
    assert [text.get_text() for text in axis.get_yticklabels()] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["bert.encoder.layer.0.self", "bert.encoder.layer.11.self"], ["0", "11"]),
        (["a.0.self", "a.0.cross", "a.1.self"], ["0.self", "0.cross", "1.self"]),
        (["encoder.0.attn", "decoder.0.attn"], ["encoder", "decoder"]),
        (["encoder.0.attn", "decoder.1.attn"], ["encoder.0", "decoder.1"]),
        (["albert.attention", "albert.attention#1"], ["attention", "attention#1"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["vit.layer.3.attn"], ["3"]),
        (["attention"], ["attention"]),
        (["0", "1"], ["0", "1"]),
    ],
)
def test_layers_are_named_by_what_tells_them_apart(layers, names):
    assert short_names(layers) == names


@pytest.mark.parametrize(
    ("panels", "noise", "error", "message"),
    [
        ({"a": {"0": [float("nan")]}}, None, NonFiniteError, "'a' in layer '0' hold NaN"),
        ({"a": {"0": [[0.1]]}}, None, ShapeError, r"one value a head; got shape \(1, 1\)"),
        ({"a": {"0": []}}, None, ShapeError, "one value a head"),
        ({"a": {}}, None, ConfigError, r"Distances of 'a' must be a mapping \{layer"),
        ({"a": [0.1]}, None, ConfigError, r"Distances of 'a' must be a mapping"),
        ({"a": SOFT, "b": {"0": [0.1]}}, None, ShapeError, "'b' and 'a' differ"),
        ({"a": SOFT}, -1.0, ConfigError, "noise is a number >= 0"),
        ({"a": SOFT}, [1.0], ConfigError, "noise is a number >= 0"),
        ({"a": SOFT}, {"b": SOFT}, ConfigError, "Distances of 'noise of a'"),
        ({"a": SOFT}, {"a": {"0": [1.0]}}, ShapeError, "noise of 'a' must have the layers and heads"),
    ],
)
def test_distances_that_cannot_be_are_refused(panels, noise, error, message):
    with pytest.raises(error, match=message):
        plots.distance_map(panels, noise=noise)
