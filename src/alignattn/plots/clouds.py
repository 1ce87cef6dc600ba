"""Clouds of keys and queries: t-SNE of both together (plane.py).

The first figure of Zhang et al. 2021: blue dots for keys and orange diamonds for queries. The paper tells neither its
perplexity nor how many points it drew.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.colours import BLUE, ORANGE
from alignattn.plots.panels import array, checked, entitle, explain, label, matplotlib_for, places
from alignattn.plots.plane import check_method, flattened, frame, size_of_dots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

LABELS = ("keys", "queries")


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
    check_method(method, "clouds")
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

    flat = flattened(np.concatenate([key, query]), method, seed=seed, who="clouds()")  # (m + n, 2)
    size = size_of_dots(len(flat))
    style: dict[str, Any] = {"alpha": 0.75, "linewidths": 0}
    (x, y), cut = flat.T, len(key)
    axis.scatter(x[:cut], y[:cut], size, marker="o", color=BLUE, label=label(LABELS[0]), **style)
    axis.scatter(x[cut:], y[cut:], 0.8 * size, marker="D", color=ORANGE, label=label(LABELS[1]), **style)
    frame(axis, flat)


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
