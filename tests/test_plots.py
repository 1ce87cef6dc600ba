"""What the pictures show, read off the artists: points, colours, heights, bytes, and that nothing is left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignattn import plots
from alignattn.errors import AlignmentError, ConfigError, NonFiniteError, ShapeError
from alignattn.metrics import expected_calibration_error, reliability_bins

mpl = pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")
pytest.importorskip("sklearn", reason="pip install 'alignattn[demo]'")

import numpy as np  # noqa: E402  (comes with matplotlib)
from matplotlib._pylab_helpers import Gcf  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.markers import MarkerStyle  # noqa: E402
from sklearn.manifold import TSNE  # noqa: E402
from threadpoolctl import threadpool_info, threadpool_limits  # noqa: E402

BINS = {
    "count": [0, 10, 0, 30],
    "confidence": [float("nan"), 0.4, float("nan"), 0.9],
    "accuracy": [float("nan"), 0.5, float("nan"), 0.7],
    "edges": [0, 0.25, 0.5, 0.75, 1],
}


def gaussian(n: int, d: int = 8, *, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, d)) + shift


def probabilities(seed: int, *, n: int = 400, c: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, generator=generator).softmax(-1), torch.randint(c, (n,), generator=generator)


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


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = dict(mpl.rcParams)
    yield
    assert not Gcf.figs, "a figure is registered with pyplot"
    assert dict(mpl.rcParams) == before, "rcParams were changed"


# Clouds


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_every_query_and_key_is_drawn_once(method):
    figure = plots.clouds({"soft": (gaussian(7), gaussian(12)), "aligned": (gaussian(30), gaussian(4))}, method=method)
    assert [axis.get_title() for axis in figure.axes] == ["soft", "aligned"]
    assert [tuple(map(len, drawn(axis))) for axis in figure.axes] == [(12, 7), (4, 30)]
    for axis in figure.axes:  # within the frame
        for points in drawn(axis):
            for value, (low, high) in zip(points.T, (axis.get_xlim(), axis.get_ylim()), strict=True):
                assert (low < value).all() and (value < high).all()


def test_keys_are_blue_dots_and_queries_orange_diamonds():
    (axis,) = plots.clouds({"soft": (gaussian(7), gaussian(12))}).axes
    for artist, marker, colour, label in zip(
        axis.collections, ("o", "D"), ("#0072b2", "#e69f00"), ("keys", "queries"), strict=True
    ):
        style = MarkerStyle(marker)
        expected = style.get_path().transformed(style.get_transform()).vertices
        np.testing.assert_array_equal(artist.get_paths()[0].vertices, expected)
        assert to_hex(artist.get_facecolor()[0]) == colour
        assert artist.get_label() == label


def test_the_axes_of_a_cloud_have_no_ticks_and_one_scale():
    figure = plots.clouds({"a": (gaussian(7), gaussian(12)), "b": (gaussian(7), gaussian(12))})
    for axis in figure.axes:
        assert not axis.get_xticks().size and not axis.get_yticks().size
        assert axis.get_aspect() == 1
        assert np.diff(axis.get_xlim()) == pytest.approx(np.diff(axis.get_ylim()))
        assert axis.get_legend() is None
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["keys", "queries"]


@pytest.mark.parametrize(("method", "scale"), [("tsne", 1.0), ("tsne", 1e-30), ("tsne", 1e30), ("pca", 1.0)])
def test_clouds_apart_stay_apart_and_equal_clouds_mix(method, scale):
    apart = (scale * gaussian(60, shift=10), scale * gaussian(60, seed=1))
    mixed = (scale * gaussian(60), scale * gaussian(60, seed=1))
    first, second = plots.clouds({"apart": apart, "mixed": mixed}, method=method).axes
    assert share_with_a_neighbour_of_its_kind(first) == 1
    assert 0.35 < share_with_a_neighbour_of_its_kind(second) < 0.65


def test_tsne_keeps_four_clusters_that_no_plane_shows():
    centres = 20 * np.eye(4)  # corners of a tetrahedron: a projection may lay one upon another, neighbourhoods remain
    groups = [gaussian(20, 4, seed=i) + centre for i, centre in enumerate(centres)]
    (axis,) = plots.clouds({"": (np.concatenate(groups[:2]), np.concatenate(groups[2:]))}).axes
    keys, queries = drawn(axis)
    placed = [queries[:20], queries[20:], keys[:20], keys[20:]]
    widest = max(float(np.linalg.norm(group - group.mean(0), axis=1).max()) for group in placed)
    middles = [group.mean(0) for group in placed]
    nearest = min(float(np.linalg.norm(a - b)) for i, a in enumerate(middles) for b in middles[:i])
    assert nearest > 2 * widest


def test_pca_in_two_dimensions_keeps_every_distance():
    query, key = gaussian(6, 2), gaussian(9, 2, seed=1)
    (axis,) = plots.clouds({"": (query, key)}, method="pca").axes
    before, after = np.concatenate([key, query]), np.concatenate(drawn(axis))
    for i in range(15):
        for j in range(15):
            assert np.linalg.norm(after[i] - after[j]) == pytest.approx(np.linalg.norm(before[i] - before[j]))


def test_pca_takes_the_directions_of_most_variance():
    points = gaussian(50, 3) * [1, 5, 25]
    (axis,) = plots.clouds({"": (points[:20], points[20:])}, method="pca").axes
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
    (axis,) = plots.clouds({"": (query, key)}).axes
    assert [points.shape for points in drawn(axis)] == [(n + 1, 2), (n, 2)]
    assert all(np.isfinite(points).all() for points in drawn(axis))
    if kind != "identical":
        assert len(np.unique(np.concatenate(drawn(axis)), axis=0)) == 2 * n + 1


def test_points_on_a_line_have_no_second_component():
    (axis,) = plots.clouds({"": ([[0.0], [1.0]], [[3.0]])}, method="pca").axes
    keys, queries = drawn(axis)
    # the mean is 4/3, and the farthest point, the key, lies to the right of it
    np.testing.assert_allclose(np.concatenate([keys, queries]), [[5 / 3, 0], [-4 / 3, 0], [-1 / 3, 0]], atol=1e-12)


def test_tensors_of_a_graph_and_in_bfloat16_are_drawn():
    query = torch.randn(6, 3, requires_grad=True)
    key = torch.randn(6, 3).bfloat16()
    (axis,) = plots.clouds({"": (query * 1, key)}, method="pca").axes
    (expected,) = plots.clouds({"": (query.detach().tolist(), key.float().numpy())}, method="pca").axes
    for points, others in zip(drawn(axis), drawn(expected), strict=True):
        np.testing.assert_allclose(points, others)


def test_equal_seeds_give_equal_pictures_and_others_do_not():
    def picture(seed: int) -> np.ndarray:
        return np.concatenate(drawn(plots.clouds({"": (gaussian(40), gaussian(40, seed=1))}, seed=seed).axes[0]))

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


# Reliability


def test_bars_are_accuracies_and_gaps_reach_to_the_confidence():
    (axis,) = plots.reliability({"soft": BINS}).axes
    accuracy, gap = axis.containers
    assert [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in accuracy] == [
        (0.25, 0.25, 0.5),
        (0.75, 0.25, 0.7),
    ]
    for bar, low, high in zip(gap, (0.4, 0.7), (0.5, 0.9), strict=True):
        box = bar.get_bbox()
        assert (box.ymin, box.ymax) == pytest.approx((low, high))
    assert [to_hex(bar.patches[0].get_facecolor()) for bar in (accuracy, gap)] == ["#0072b2", "#e69f00"]
    (diagonal,) = axis.lines
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
    assert axis.get_xlim() == axis.get_ylim() == (0, 1)


def test_the_strip_counts_the_samples():
    (axis,) = plots.reliability({"soft": BINS}).axes
    (strip,) = axis.child_axes
    assert [bar.get_height() for bar in strip.containers[0]] == [0, 10, 0, 30]
    assert strip.get_xlim() == axis.get_xlim()


def test_the_title_tells_the_calibration_error():
    # (10 · |0.5 - 0.4| + 30 · |0.7 - 0.9|) / 40 = 7/40
    (axis,) = plots.reliability({"soft": BINS}).axes
    assert axis.get_title() == "soft\nECE 17.50 %  (n = 40)"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bins", [1, 7, 10])
def test_the_error_is_that_of_the_metric_and_survives_json(seed, bins):
    probability, label = probabilities(seed)
    groups = vars(reliability_bins(probability, label, bins=bins))
    stored = json.loads(json.dumps({name: value.tolist() for name, value in groups.items()}))
    error = expected_calibration_error(probability, label, bins=bins)
    for axis in plots.reliability({"tensors": groups, "lists": stored}).axes:
        assert axis.get_title().split("\n")[1] == f"ECE {error:.2f} %  (n = 400)"
        heights = [bar.get_height() for bar in axis.containers[0]]
        assert heights == [value for value in stored["accuracy"] if value == value]


# Layout


@pytest.mark.parametrize("count", [1, 2, 5, 7])
@pytest.mark.parametrize("kind", ["clouds", "reliability"])
def test_panels_are_of_one_size_and_overlap_nowhere(kind, count):
    titles = ["soft", *(f"MAXIMUM MEAN DISCREPANCY, BANDWIDTH FROM THE MEDIAN, {index}" for index in range(1, count))]
    if kind == "clouds":
        figure = plots.clouds({title: (gaussian(7), gaussian(12)) for title in titles}, method="pca")
    else:
        figure = plots.reliability({title: BINS | {"count": [0, 10_000, 0, 300_000]} for title in titles})
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    sizes = {tuple(np.round(axis.get_window_extent(renderer).size, 3)) for axis in figure.axes}
    assert len(sizes) == 1 and len(set(sizes.pop())) == 1, "not squares of one size"
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes]
    boxes.append(figure.legends[0].get_tightbbox(renderer))
    for index, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, "cut off at a side"
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, "cut off above or below"
        assert not box.count_overlaps(boxes[:index]), "panels overlap"


def test_axes_of_the_caller_are_drawn_on():
    figure = Figure(figsize=(6, 6))
    upper, lower = figure.subfigures(2)
    first, second = upper.subplots(1, 2), lower.subplots(1, 2)
    count = len(figure.axes)
    pair = (gaussian(7), gaussian(12))
    assert plots.clouds({"a": pair, "b": pair}, axes=first) is figure
    assert plots.reliability({"a": BINS}, axes=second[0]) is figure
    assert [len(axis.collections) for axis in first] == [2, 2]
    assert len(second[0].containers) == 2 and not second[1].containers
    assert not figure.legends and first[0].get_legend() and not first[1].get_legend()
    assert len(figure.axes) == count


# Files


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "SVG"])
def test_equal_input_gives_equal_bytes(tmp_path, suffix):
    def figure() -> Figure:
        return plots.clouds({"soft": (gaussian(20), gaussian(20, seed=1)), "aligned": (gaussian(9), gaussian(9))})

    once = figure()
    for name, picture in {"first": once, "again": once, "anew": figure()}.items():
        plots.save(picture, tmp_path / f"{name}.{suffix}")
    plots.save(plots.reliability({"soft": BINS}), tmp_path / f"other.{suffix}")
    files = {name: (tmp_path / f"{name}.{suffix}").read_bytes() for name in ("first", "again", "anew", "other")}
    assert files["first"] == files["again"] == files["anew"] != files["other"]
    assert files["first"].startswith({"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()])
    assert b"<dc:date>" not in files["first"] and b"CreationDate" not in files["first"]


def test_a_picture_is_readable_by_those_who_may_read_the_folder(tmp_path):
    (tmp_path / "plain").write_text("")
    plots.save(plots.reliability({"soft": BINS}), str(tmp_path / "new" / "a.png"))
    assert (tmp_path / "new" / "a.png").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("broken", [(Figure, "savefig"), (os, "fsync"), (Path, "replace")])
def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = tmp_path / "a.png"
    path.write_text("old")
    figure = plots.reliability({"soft": BINS})

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(*broken, fail)
    with pytest.raises(OSError, match="disk full"):
        plots.save(figure, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_nothing_is_imported_before_it_is_needed_and_pyplot_never(tmp_path):
    script = """
import sys
from alignattn import plots
assert not {"matplotlib", "sklearn"} & set(sys.modules)
plots.clouds({"": ([[0.0, 1.0]], [[1.0, 2.0]])})
assert "sklearn" not in sys.modules, "two points need no t-SNE"
plots.save(plots.clouds({"": ([[0.0, 1.0]] * 9, [[i, i * i] for i in range(9)])}), sys.argv[1])
assert "sklearn" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.svg")], check=True)


# Errors


@pytest.mark.parametrize("call", [plots.clouds, plots.reliability, lambda _: plots.save(None, "a.png")])
def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(AlignmentError, match=r"\(\) needs matplotlib: pip install 'alignattn\[plot\]'"):
        call({})


def test_without_scikit_learn_the_error_names_a_way_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    panels = {"soft": (gaussian(7), gaussian(12))}
    with pytest.raises(AlignmentError, match=r"alignattn\[demo\]', or choose method='pca'"):
        plots.clouds(panels)
    assert plots.clouds(panels, method="pca").axes


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"count": [0, 0, 0, 0]}, ConfigError, "hold no samples"),
        ({"count": [0, -1, 0, 30]}, ConfigError, "count >= 0"),
        ({"count": [0, 10, 30]}, ShapeError, "one value for each bin, and one edge more"),
        ({"edges": [0, 0.25, 0.5, 0.75]}, ShapeError, "one edge more"),
        ({"edges": [0, 0.5, 0.25, 0.75, 1]}, ConfigError, "must rise from 0 to 1"),
        ({"edges": [0, 25, 50, 75, 100]}, ConfigError, "must rise from 0 to 1"),
        ({"accuracy": [0, 50.0, 0, 70.0]}, ConfigError, r"accuracy of a bin with samples lies in \[0, 1\]"),
        ({"confidence": [0.1, float("nan"), 0.1, 0.9]}, ConfigError, "confidence of a bin with samples"),
        ({"count": 3}, ShapeError, "one value for each bin"),
    ],
)
def test_bins_that_cannot_be_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        plots.reliability({"a": BINS | change})


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match=r"'a' lack accuracy, edges. They need count, confidence, accuracy, edges"):
        plots.reliability({"a": {"count": [1], "confidence": [1.0]}})
    with pytest.raises(ConfigError, match=r"reliability\(\) got no panels"):
        plots.reliability({})


def test_the_bins_of_the_metric_are_refused_with_advice_that_works():
    bins = reliability_bins(*probabilities(0))
    with pytest.raises(ConfigError, match=r"got ReliabilityBins. For an object, vars\(bins\)"):
        plots.reliability({"a": bins})
    assert plots.reliability({"a": vars(bins)}).axes


def test_unknown_names_are_answered_with_the_choices(tmp_path):
    pair = {"a": (gaussian(3), gaussian(3))}
    with pytest.raises(ConfigError, match=r"Unknown method of drawing clouds 't-sne'. Choose one of: tsne, pca"):
        plots.clouds(pair, method="t-sne")
    with pytest.raises(ConfigError, match=r"Unknown picture format 'gif'. Choose one of: png, svg, pdf"):
        plots.save(Figure(), tmp_path / "a.gif")
    with pytest.raises(ConfigError, match="got 2 axes for 1 panels"):
        plots.clouds(pair, axes=Figure().subplots(1, 2))
