"""Embeddings by class: every node once, each class by a mark of its own, and what is read off the plane."""

import sys

import pytest
import torch

from alignattn import plots
from alignattn.errors import AlignmentError, ConfigError, NonFiniteError, ShapeError

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
pytest.importorskip("sklearn", reason="pip install 'alignattn[demo]'")

import numpy as np
from drawings import gaussian
from matplotlib.colors import to_hex


def drawn(axis) -> dict[str, np.ndarray]:
    """The places of each class, by what the legend calls it."""
    return {artist.get_label().lstrip("\u2060"): np.asarray(artist.get_offsets()) for artist in axis.collections}


def look(artist) -> tuple[str, bytes]:
    """Colour and shape."""
    return to_hex(artist.get_facecolor()[0]), artist.get_paths()[0].vertices.tobytes()


def test_every_node_stands_once_with_its_class_in_all_panels():
    classes = [2, 0, 0, 1, 2, 2]
    points = gaussian(6, 2)
    axes = plots.embeddings({"soft": points, "aligned": 2 * points}, classes=classes, method="pca")
    assert [axis.get_title() for axis in axes] == ["soft", "aligned"]
    turned = points - points.mean(0)
    for axis, scale in zip(axes, (1, 2), strict=True):
        found = drawn(axis)
        assert list(found) == ["class 0", "class 1", "class 2"]
        for kind in range(3):  # in two dimensions PCA turns, and keeps how far each is from the middle
            own = [place for place, one in enumerate(classes) if one == kind]
            lengths = np.linalg.norm(found[f"class {kind}"], axis=1)
            np.testing.assert_allclose(lengths, scale * np.linalg.norm(turned[own], axis=1))


def test_classes_that_a_model_keeps_apart_stay_apart():
    classes = np.repeat([0, 1, 2], 20)
    apart = gaussian(60) + 12 * np.eye(8)[classes]
    first, second = plots.embeddings({"apart": apart, "mixed": gaussian(60)}, classes=classes.tolist())
    shares = []
    for axis in (first, second):
        points = np.concatenate(list(drawn(axis).values()))  # class after class
        distance = np.linalg.norm(points[:, None] - points[None], axis=-1) + np.diag([np.inf] * 60)
        shares.append((classes[distance.argmin(1)] == classes).mean())
    assert shares[0] == 1 and 0.1 < shares[1] < 0.6


@pytest.mark.parametrize("count", [2, 7, 8, 49])
def test_each_class_has_a_colour_and_a_shape_of_its_own(count):
    classes = list(range(count)) * 2
    axes = plots.embeddings({"a": gaussian(2 * count), "b": gaussian(2 * count)}, classes=classes, method="pca")
    looks = [[look(artist) for artist in axis.collections] for axis in axes]
    assert len(set(looks[0])) == count and looks[0] == looks[1]
    if count <= 7:  # then either tells them apart
        assert len({colour for colour, _ in looks[0]}) == len({shape for _, shape in looks[0]}) == count
    (legend,) = axes[0].figure.legends
    assert len(legend.get_texts()) == count


def test_a_number_has_the_same_mark_whichever_others_are_there():
    def looks(classes) -> dict[str, tuple[str, bytes]]:
        (axis,) = plots.embeddings({"": gaussian(len(classes))}, classes=classes, method="pca")
        return {artist.get_label(): look(artist) for artist in axis.collections}

    all_of_them, two = looks([0, 1, 2, 3]), looks([3, 1])
    assert two == {name: all_of_them[name] for name in two} and len(two) == 2


def test_numbers_are_in_their_order_and_names_in_that_of_the_alphabet():
    def names(classes) -> list[str]:
        return list(drawn(plots.embeddings({"": gaussian(3)}, classes=classes, method="pca")[0]))

    assert names([10, 9, 2]) == ["class 2", "class 9", "class 10"]
    assert names(["tree", "bird", "_x"]) == ["_x", "bird", "tree"]
    assert names(torch.tensor([1, 0, 1])) == ["class 0", "class 1"]
    assert names(np.array([1, 0, 1])) == ["class 0", "class 1"]


def test_tensors_of_a_graph_and_in_bfloat16_are_drawn():
    values = torch.randn(6, 3, requires_grad=True)
    (axis,) = plots.embeddings({"": values.bfloat16()}, classes=[0] * 6, method="pca")
    (expected,) = plots.embeddings({"": values.detach().bfloat16().float().numpy()}, classes=[0] * 6, method="pca")
    np.testing.assert_allclose(drawn(axis)["class 0"], drawn(expected)["class 0"])


def test_without_scikit_learn_the_error_names_a_way_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(AlignmentError, match=r"embeddings\(\) needs scikit-learn.* or choose method='pca'"):
        plots.embeddings({"": gaussian(9)}, classes=[0] * 9)
    assert plots.embeddings({"": gaussian(9)}, classes=[0] * 9, method="pca")


@pytest.mark.parametrize(
    ("panels", "classes", "error", "message"),
    [
        ({}, [0, 1], ConfigError, "got no panels"),
        ({"a": gaussian(3)}, [0, 1], ShapeError, "'a' has embeddings of 3 nodes, and classes are given of 2"),
        ({"a": gaussian(2)[0]}, [0, 1], ShapeError, r"must be \[nodes, width\]; got shape \(8,\)"),
        ({"a": gaussian(2) * np.nan}, [0, 1], NonFiniteError, "embeddings of 'a' hold NaN"),
        ({"a": gaussian(2)}, "ab", ConfigError, "a list with one for each node; got 'ab'"),
        ({"a": gaussian(2)}, [], ConfigError, "a list with one for each node"),
        ({"a": gaussian(2)}, torch.eye(2), ConfigError, r"numbers or names, one for each node; got \[1.0, 0.0\]"),
        ({"a": gaussian(50)}, list(range(50)), ConfigError, "tell 49 classes apart, and there are 50"),
    ],
)
def test_embeddings_that_cannot_be_drawn_are_refused(panels, classes, error, message):
    with pytest.raises(error, match=message):
        plots.embeddings(panels, classes=classes)


def test_an_unknown_method_is_answered_with_the_choices():
    with pytest.raises(ConfigError, match=r"Unknown method of drawing embeddings 'umap'. Choose one of: tsne, pca"):
        plots.embeddings({"a": gaussian(3)}, classes=[0] * 3, method="umap")
