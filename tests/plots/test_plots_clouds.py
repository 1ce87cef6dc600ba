"""Clouds of keys and queries: points, colours and neighbourhoods, read off the artists."""

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
from matplotlib.markers import MarkerStyle
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_info, threadpool_limits


def drawn(axis) -> tuple[np.ndarray, np.ndarray]:
    """Positions of keys and queries."""
    keys, queries = axis.collections
    return np.asarray(keys.get_offsets()), np.asarray(queries.get_offsets())


def share_with_a_neighbour_of_its_kind(axis) -> float:
    keys, queries = drawn(axis)
    points = np.concatenate([keys, queries])
    kind = [0] * len(keys) + [1] * len(queries)
    same = 0
    for i, point in enumerate(points):
        distance = [np.inf if j == i else float(((point - other) ** 2).sum()) for j, other in enumerate(points)]
        same += kind[int(np.argmin(distance))] == kind[i]
    return same / len(points)


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_every_query_and_key_is_drawn_once(method):
    axes = plots.clouds({"soft": (gaussian(7), gaussian(12)), "aligned": (gaussian(30), gaussian(4))}, method=method)
    assert [axis.get_title() for axis in axes] == ["soft", "aligned"]
    assert [tuple(map(len, drawn(axis))) for axis in axes] == [(12, 7), (4, 30)]
    for axis in axes:  # within the frame
        for points in drawn(axis):
            for value, (low, high) in zip(points.T, (axis.get_xlim(), axis.get_ylim()), strict=True):
                assert (low < value).all() and (value < high).all()


def test_keys_are_blue_dots_and_queries_orange_diamonds():
    (axis,) = plots.clouds({"soft": (gaussian(7), gaussian(12))})
    for artist, marker, colour, label in zip(
        axis.collections, ("o", "D"), ("#0072b2", "#e69f00"), ("keys", "queries"), strict=True
    ):
        style = MarkerStyle(marker)
        expected = style.get_path().transformed(style.get_transform()).vertices
        np.testing.assert_array_equal(artist.get_paths()[0].vertices, expected)
        assert to_hex(artist.get_facecolor()[0]) == colour
        assert artist.get_label().endswith(label)


def test_the_axes_of_a_cloud_have_no_ticks_and_one_scale():
    axes = plots.clouds({"a": (gaussian(7), gaussian(12)), "b": (gaussian(7), gaussian(12))})
    for axis in axes:
        assert not axis.get_xticks().size and not axis.get_yticks().size
        assert axis.get_aspect() == 1
        assert np.diff(axis.get_xlim()) == pytest.approx(np.diff(axis.get_ylim()))
        assert axis.get_legend() is None
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["keys", "queries"]


@pytest.mark.parametrize(("method", "scale"), [("tsne", 1.0), ("tsne", 1e-30), ("tsne", 1e30), ("pca", 1.0)])
def test_clouds_apart_stay_apart_and_equal_clouds_mix(method, scale):
    apart = (scale * gaussian(60, shift=10), scale * gaussian(60, seed=1))
    mixed = (scale * gaussian(60), scale * gaussian(60, seed=1))
    first, second = plots.clouds({"apart": apart, "mixed": mixed}, method=method)
    assert share_with_a_neighbour_of_its_kind(first) == 1
    assert 0.35 < share_with_a_neighbour_of_its_kind(second) < 0.65


def test_tsne_keeps_four_clusters_that_no_plane_shows():
    centres = 20 * np.eye(4)  # corners of a tetrahedron: a projection may lay one upon another, neighbourhoods remain
    groups = [gaussian(20, 4, seed=i) + centre for i, centre in enumerate(centres)]
    (axis,) = plots.clouds({"": (np.concatenate(groups[:2]), np.concatenate(groups[2:]))})
    keys, queries = drawn(axis)
    placed = [queries[:20], queries[20:], keys[:20], keys[20:]]
    widest = max(float(np.linalg.norm(group - group.mean(0), axis=1).max()) for group in placed)
    middles = [group.mean(0) for group in placed]
    nearest = min(float(np.linalg.norm(a - b)) for i, a in enumerate(middles) for b in middles[:i])
    assert nearest > 2 * widest


def test_pca_in_two_dimensions_keeps_every_distance():
    query, key = gaussian(6, 2), gaussian(9, 2, seed=1)
    (axis,) = plots.clouds({"": (query, key)}, method="pca")
    before, after = np.concatenate([key, query]), np.concatenate(drawn(axis))
    for i in range(15):
        for j in range(15):
            assert np.linalg.norm(after[i] - after[j]) == pytest.approx(np.linalg.norm(before[i] - before[j]))


def test_pca_takes_the_directions_of_most_variance():
    points = gaussian(50, 3) * [1, 5, 25]
    (axis,) = plots.clouds({"": (points[:20], points[20:])}, method="pca")
    drawn_variance = np.concatenate(drawn(axis)).var(0)
    expected = np.sort(np.linalg.eigvalsh(np.cov(points.T, bias=True)))[::-1][:2]
    np.testing.assert_allclose(drawn_variance, expected)


@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("kind", ["random", "identical", "line", "huge", "tiny"])
def test_few_identical_and_flat_points_are_drawn(n, d, kind):
    scale = {"huge": 1e30, "tiny": 1e-30}.get(kind, 1.0)
    query, key = scale * gaussian(n, d), scale * gaussian(n + 1, d, seed=1)
    if kind == "identical":
        query, key = np.ones((n, d)), np.ones((n + 1, d))
    if kind == "line":
        query, key = query[:, :1] * np.arange(1, d + 1), key[:, :1] * np.arange(1, d + 1)
    (axis,) = plots.clouds({"": (query, key)})
    assert [points.shape for points in drawn(axis)] == [(n + 1, 2), (n, 2)]
    assert all(np.isfinite(points).all() for points in drawn(axis))
    if kind != "identical":
        assert len(np.unique(np.concatenate(drawn(axis)), axis=0)) == 2 * n + 1


def test_points_on_a_line_have_no_second_component():
    (axis,) = plots.clouds({"": ([[0.0], [1.0]], [[3.0]])}, method="pca")
    keys, queries = drawn(axis)
    # the mean is 4/3, and the farthest point, the key, lies to the right of it
    np.testing.assert_allclose(np.concatenate([keys, queries]), [[5 / 3, 0], [-4 / 3, 0], [-1 / 3, 0]], atol=1e-12)


def test_tensors_of_a_graph_and_in_bfloat16_are_drawn():
    query = torch.randn(6, 3, requires_grad=True)
    key = torch.randn(6, 3).bfloat16()
    (axis,) = plots.clouds({"": (query * 1, key)}, method="pca")
    (expected,) = plots.clouds({"": (query.detach().tolist(), key.float().numpy())}, method="pca")
    for points, others in zip(drawn(axis), drawn(expected), strict=True):
        np.testing.assert_allclose(points, others)


def test_equal_seeds_give_equal_pictures_and_others_do_not():
    def picture(seed: int) -> np.ndarray:
        return np.concatenate(drawn(plots.clouds({"": (gaussian(40), gaussian(40, seed=1))}, seed=seed)[0]))

    np.testing.assert_array_equal(picture(0), picture(0))
    assert not np.allclose(picture(0), picture(1))


def test_tsne_has_one_thread_whatever_the_caller_has(monkeypatch):
    seen: list[int] = []

    class Watched(TSNE):
        def fit_transform(self, points):
            seen.extend(pool["num_threads"] for pool in threadpool_info())
            return super().fit_transform(points)

    monkeypatch.setattr("sklearn.manifold.TSNE", Watched)
    with threadpool_limits(2):
        plots.clouds({"": (gaussian(4), gaussian(4, seed=1))})
        after = {pool["num_threads"] for pool in threadpool_info()}
    assert set(seen) == {1} and after == {2}


def test_without_scikit_learn_the_error_names_a_way_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    panels = {"soft": (gaussian(7), gaussian(12))}
    with pytest.raises(AlignmentError, match=r"alignattn\[demo\]', or choose method='pca'"):
        plots.clouds(panels)
    assert plots.clouds(panels, method="pca")


@pytest.mark.parametrize(
    ("panels", "error", "message"),
    [
        ({}, ConfigError, "got no panels"),
        ([(gaussian(3), gaussian(3))], ConfigError, r"takes a mapping \{title: \(query, key\)\}, got list"),
        ({"a": gaussian(3)}, ConfigError, "'a' must be a pair .query, key., got ndarray"),
        ({"a": 3}, ConfigError, "'a' must be a pair .query, key., got int"),
        ({"a": (gaussian(3, 4), gaussian(3, 5))}, ShapeError, "differ in width: 4 and 5"),
        (
            {"a": (gaussian(3)[0], gaussian(3))},
            ShapeError,
            r"queries of 'a' must be \[points, width\].* got shape \(8,\)",
        ),
        ({"a": (gaussian(3), gaussian(3)[None])}, ShapeError, r"keys of 'a' must be .* got shape \(1, 3, 8\)"),
        ({"a": (gaussian(0), gaussian(3))}, ShapeError, r"queries of 'a' have shape \(0, 8\): there is no point"),
        ({"a": (gaussian(3), gaussian(3, 0))}, ShapeError, r"keys of 'a' have shape \(3, 0\)|differ in width"),
        ({"a": ([[1.0], [2.0, 3.0]], gaussian(3))}, ShapeError, "Queries of 'a' must be an array of numbers"),
        ({"a": (gaussian(3), "keys")}, ShapeError, "Keys of 'a' must be an array of numbers"),
        ({"a": (gaussian(3), gaussian(3) * np.nan)}, NonFiniteError, "keys of 'a' hold NaN"),
    ],
)
def test_clouds_that_cannot_be_drawn_are_refused(panels, error, message):
    with pytest.raises(error, match=message):
        plots.clouds(panels)


def test_an_unknown_method_is_answered_with_the_choices():
    with pytest.raises(ConfigError, match=r"Unknown method of drawing clouds 't-sne'. Choose one of: tsne, pca"):
        plots.clouds({"a": (gaussian(3), gaussian(3))}, method="t-sne")
