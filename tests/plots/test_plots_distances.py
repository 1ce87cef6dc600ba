"""Maps of MMD² by layer and head: values, one scale, marks and names of layers."""

import pytest
import torch

from alignattn import plots
from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.distances import short_names

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

import numpy as np
from drawings import map_of, marks_of
from matplotlib import colormaps

SOFT = {"bert.layer.0.self": [0.5, 0.25], "bert.layer.1.self": [1.0, 0.75]}
ALIGNED = {"bert.layer.0.self": [0.1, -0.02], "bert.layer.1.self": [0.02, -0.3]}


def test_rows_are_layers_columns_heads_and_all_panels_have_one_scale_from_zero():
    axes = plots.distance_map({"soft": SOFT, "aligned": ALIGNED})
    for axis, table in zip(axes, (SOFT, ALIGNED), strict=True):
        np.testing.assert_array_equal(map_of(axis).get_array(), list(table.values()))
        assert [text.get_text() for text in axis.get_xticklabels()] == ["0", "1"]
    oranges = colormaps["Oranges"]
    for axis, shares in zip(axes, ([[0.5, 0.25], [1, 0.75]], [[0.1, 0], [0.02, 0]]), strict=True):
        image = map_of(axis)
        np.testing.assert_allclose(image.to_rgba(image.get_array()), oranges(shares))
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["0", "1"]
    assert axes[0].transData.transform((0, 0))[1] > axes[0].transData.transform((0, 1))[1]  # the first layer on top
    assert [axis.get_title() for axis in axes] == ["soft\nsum 2.5", "aligned\nsum -0.2"]


def test_heads_within_noise_are_marked():
    _, aligned = plots.distance_map({"soft": SOFT, "aligned": ALIGNED}, noise=0.02)
    assert marks_of(aligned) == {(1, 0), (0, 1)}  # head, layer: -0.02 and 0.02
    (legend,) = aligned.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["within noise"]
    noise = {"soft": SOFT, "aligned": {name: [1.0, 0.0] for name in ALIGNED}}
    soft, aligned = plots.distance_map({"soft": SOFT, "aligned": ALIGNED}, noise=noise)
    assert len(marks_of(soft)) == 4
    assert marks_of(aligned) == {(0, 0), (0, 1)}


def test_without_noise_nothing_is_marked():
    axes = plots.distance_map({"soft": SOFT})
    assert len(axes[0].collections) == 1 and not axes[0].figure.legends


def test_layers_with_fewer_heads_leave_cells_empty():
    (axis,) = plots.distance_map({"soft": {"0": [0.1, 0.2, 0.3], "1": [0.4]}}, noise=1.0)
    values = np.ma.filled(map_of(axis).get_array(), np.nan)
    np.testing.assert_array_equal(values, [[0.1, 0.2, 0.3], [0.4, np.nan, np.nan]])
    assert len(marks_of(axis)) == 4


def test_a_head_that_was_not_measured_leaves_its_cell_empty_and_counts_for_nothing():
    nan = float("nan")
    (axis,) = plots.distance_map(
        {"soft": {"0": [nan, 0.5], "1": [0.25, 0.125]}}, noise={"soft": {"0": [nan, 0], "1": [1, nan]}}, numbers=True
    )
    assert np.ma.getmaskarray(map_of(axis).get_array()).tolist() == [[True, False], [False, False]]
    assert axis.get_title() == "soft\nsum 0.875" and map_of(axis).norm.vmax == 0.5
    assert len(marks_of(axis)) == 1 and [text.get_text() for text in axis.texts] == [".50", ".25", ".12"]


def test_pictures_of_their_own_share_a_scale_whose_top_is_told():
    soft, aligned = (plots.distance_map({"x": table}, highest=2.0)[0] for table in (SOFT, ALIGNED))
    oranges = colormaps["Oranges"]
    for axis, shares in ((soft, [[0.25, 0.125], [0.5, 0.375]]), (aligned, [[0.05, 0], [0.01, 0]])):
        image = map_of(axis)
        np.testing.assert_allclose(image.to_rgba(image.get_array()), oranges(shares))
        (bar,) = (one for one in axis.figure.axes if one is not axis)
        assert bar.get_ylim() == (0, 2)


@pytest.mark.parametrize("highest", [0.47, 0.9, 1.0, 3.0, 0.0004, 70.0])
def test_the_ticks_of_the_scale_are_at_equal_steps_from_zero_almost_to_its_top(highest):
    (axis,) = plots.distance_map({"soft": {"0": [highest]}})
    (bar,) = (one for one in axis.figure.axes if one is not axis)
    ticks = bar.get_yticks()
    step = ticks[1]
    np.testing.assert_allclose(ticks, step * np.arange(len(ticks)))
    assert 3 <= len(ticks) <= 6 and highest - step < ticks[-1] <= highest


def test_numbers_stand_in_their_cells_as_long_as_there_is_room():
    table = {"0": [0.123, -0.004, -0.25], "1": [1.234, 12.3, 0.999]}
    (axis,) = plots.distance_map({"soft": table}, numbers=True, noise=0.01)
    assert {(t.get_position(), t.get_text()) for t in axis.texts} == {
        ((0, 0), ".12"),
        ((1, 0), "0"),
        ((2, 0), "−.25"),
        ((0, 1), "1.23"),
        ((1, 1), "12"),
        ((2, 1), "1.00"),
    }
    ((head, layer),) = marks_of(axis)  # within the cell of head 1 in layer 0, beside its number
    assert 1.2 < head < 1.5 and -0.5 < layer < -0.2
    assert not plots.distance_map({"soft": table})[0].texts
    assert not plots.distance_map({"soft": {"0": [0.1] * 17}}, numbers=True)[0].texts


def test_a_number_stands_out_from_its_cell():
    """By WCAG 2: luminances (lighter + 0.05) / (darker + 0.05) of 4.5 or more, whatever the shade."""
    from matplotlib.colors import to_rgb

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour[:3])]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    values = np.linspace(0, 1, 256).reshape(16, 16)
    (axis,) = plots.distance_map({"soft": {str(i): row for i, row in enumerate(values)}}, numbers=True)
    for text, value in zip(axis.texts, values.ravel(), strict=True):
        both = sorted((luminance(to_rgb(text.get_color())), luminance(colormaps["Oranges"](value))))
        assert (both[1] + 0.05) / (both[0] + 0.05) > 4.5, value


@pytest.mark.parametrize(("heads", "images"), [(48, 0), (49, 1)])
def test_a_map_is_of_shapes_until_its_cells_are_many(heads, images, tmp_path):
    axes = plots.distance_map({"soft": {"0": np.arange(heads) / heads, "1": np.zeros(heads)}})
    (axis,) = axes
    assert len(axis.images) == images
    assert axis.get_xlim() == (-0.5, heads - 0.5) and axis.get_ylim() == (1.5, -0.5)  # centres at whole numbers
    plots.save(axes, tmp_path / "map.svg")
    assert (tmp_path / "map.svg").read_text().count("<image ") == images


@pytest.mark.parametrize("value", [0.0, -0.1])
def test_nothing_apart_is_white(value):
    (axis,) = plots.distance_map({"soft": {"0": [value]}})
    image = map_of(axis)
    np.testing.assert_allclose(image.to_rgba(image.get_array())[0, 0], colormaps["Oranges"](0.0))


def test_what_a_model_says_of_itself_is_drawn(bert, batch):
    from alignattn.diagnosis.mmd import discrepancy

    found = discrepancy(bert, [batch], call=lambda model, one: model(**one))
    (axis,) = plots.distance_map({"soft": found})
    np.testing.assert_allclose(map_of(axis).get_array(), torch.stack(list(found.values())))
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
        ({"a": {"0": [float("nan")]}}, None, NonFiniteError, "distances of 'a' are all NaN"),
        ({"a": {"0": [float("inf")]}}, None, NonFiniteError, "'a' in layer '0' hold infinity"),
        ({"a": {"0": [[0.1]]}}, None, ShapeError, r"one value a head; got shape \(1, 1\)"),
        ({"a": {"0": []}}, None, ShapeError, "one value a head"),
        ({"a": {}}, None, ConfigError, r"The distances of 'a' must be a mapping \{layer"),
        ({"a": [0.1]}, None, ConfigError, r"The distances of 'a' must be a mapping"),
        ({"a": SOFT, "b": {"0": [0.1]}}, None, ShapeError, "'b' and 'a' differ"),
        ({"a": SOFT}, -1.0, ConfigError, "noise is a number >= 0"),
        ({"a": SOFT}, [1.0], ConfigError, "noise is a number >= 0"),
        ({"a": SOFT}, {"b": SOFT}, ConfigError, "The noise of 'a' must be a mapping"),
        ({"a": SOFT}, {"a": {"0": [1.0]}}, ShapeError, "noise of 'a' must have the layers and heads"),
    ],
)
def test_distances_that_cannot_be_are_refused(panels, noise, error, message):
    with pytest.raises(error, match=message):
        plots.distance_map(panels, noise=noise)


@pytest.mark.parametrize("highest", [0.0, -1.0, float("inf"), float("nan")])
def test_a_top_that_is_none_is_refused(highest):
    with pytest.raises(ConfigError, match="highest is the top of the scale, a number > 0"):
        plots.distance_map({"a": SOFT}, highest=highest)
