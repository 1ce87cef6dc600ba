"""Clouds of keys and queries: t-SNE of both together, perplexity = min(30, (points - 1) / 3).

The first figure of Zhang et al. 2021: blue dots for keys and orange diamonds for queries. The paper tells neither its
perplexity nor how many points it drew.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alignattn.errors import AlignmentError, ConfigError, NonFiniteError, ShapeError, unknown
from alignattn.plots.colours import BLUE, GREY, ORANGE
from alignattn.plots.panels import array, checked, entitle, explain, label, matplotlib_for, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

METHODS = ("tsne", "pca")
LABELS = ("keys", "queries")
FEWEST = 5  # distinct points: with fewer t-SNE has no neighbourhoods to keep


def clouds(
    panels: Mapping[str, tuple[Any, Any]],
    *,
    method: str = "tsne",
    seed: int = 0,
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw the queries [n, d] and keys [m, d] of one head, a panel for each title: {title: (query, key)}.

    Each panel is a t-SNE of its own, of queries and keys together, and has no ticks: directions mean nothing, distances
    little. What can be read off is whether the clouds mix. Fewer than five distinct points are drawn by their principal
    components, and so are all with `method="pca"`. `seed` is that of the jitter t-SNE starts from; equal input gives an
    equal picture. `axes`, one for each panel, are drawn on if given.
    """
    matplotlib_for("clouds()")
    if method not in METHODS:
        raise unknown("method of drawing clouds", method, METHODS)
    points = {title: _cloud(title, pair) for title, pair in checked(panels, "clouds()", "(query, key)").items()}
    figure, drawn = places(
        list(points), axes, size=(2.3, 2.3), gap=0.15, left=0.1, below=0.1, above=0.35, labels=LABELS
    )
    for axis, (title, (query, key)) in zip(drawn, points.items(), strict=True):
        _draw_cloud(axis, query, key, method=method, seed=seed)
        entitle(axis, title)
    explain(figure, drawn, LABELS, own=axes is None)
    return drawn


def _draw_cloud(axis: "Axes", query: "Array", key: "Array", *, method: str, seed: int) -> None:
    import numpy as np

    points = np.concatenate([key, query])  # (m + n, d)
    distinct = len(np.unique(points, axis=0))
    flat = _tsne(points, seed) if method == "tsne" and distinct >= FEWEST else _principal(points)  # (m + n, 2)
    size = float(np.clip(2500 / len(points), 6, 30))
    style: dict[str, Any] = {"alpha": 0.75, "linewidths": 0}
    (x, y), cut = flat.T, len(key)
    axis.scatter(x[:cut], y[:cut], size, marker="o", color=BLUE, label=label(LABELS[0]), **style)
    axis.scatter(x[cut:], y[cut:], 0.8 * size, marker="D", color=ORANGE, label=label(LABELS[1]), **style)
    low, high = flat.min(0), flat.max(0)
    reach = 0.55 * float((high - low).max()) or 1.0  # one for points that all coincide
    middle = (low + high) / 2
    axis.set(xlim=middle[0] + [-reach, reach], ylim=middle[1] + [-reach, reach], aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set(color=GREY, linewidth=0.6)


def _tsne(points: "Array", seed: int) -> "Array":
    import numpy as np

    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn
    except ImportError as error:
        raise AlignmentError(
            "clouds() needs scikit-learn for t-SNE: pip install 'alignattn[demo]', or choose method='pca'."
        ) from error
    with threadpool_limits(1):  # several threads add up in no fixed order, and t-SNE makes much of a last digit
        points = points - points.mean(0)
        points /= abs(points).max()  # t-SNE has no scale, its float32 has
        start = _principal(points)
        start = 1e-4 * start / start[:, 0].std() + 1e-5 * np.random.default_rng(seed).standard_normal(start.shape)
        perplexity = min(30.0, (len(points) - 1) / 3)
        tsne = TSNE(perplexity=perplexity, init=start.astype(np.float32), random_state=seed)
        return np.asarray(tsne.fit_transform(points), dtype=np.float64)


def _principal(points: "Array") -> "Array":
    """The two directions of most variance, zeros where there is no second one."""
    import numpy as np

    left, scale, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    flat = np.zeros((len(points), 2))
    flat[:, : len(scale)] = (left * scale)[:, :2]
    peak = np.take_along_axis(flat, abs(flat).argmax(0)[None], axis=0)  # (1, 2)
    return flat * np.where(peak < 0, -1.0, 1.0)  # the sign of a direction is arbitrary: the farthest point is positive


def _cloud(title: str, pair: Any) -> "tuple[Array, Array]":
    import numpy as np

    try:
        query, key = pair
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Panel {title!r} must be a pair (query, key), got {type(pair).__name__}.") from error
    arrays = {"queries": array(query, f"Queries of {title!r}"), "keys": array(key, f"Keys of {title!r}")}
    for name, points in arrays.items():
        if points.ndim != 2:
            raise ShapeError(
                f"The {name} of {title!r} must be [points, width], those of one head; got shape {points.shape}."
            )
        if not points.size:
            raise ShapeError(f"The {name} of {title!r} have shape {points.shape}: there is no point to draw.")
        if not np.isfinite(points).all():
            raise NonFiniteError(f"The {name} of {title!r} hold NaN or infinity. Leave those points out.")
    query, key = arrays["queries"], arrays["keys"]
    if query.shape[1] != key.shape[1]:
        raise ShapeError(f"Queries and keys of {title!r} differ in width: {query.shape[1]} and {key.shape[1]}.")
    return query, key
