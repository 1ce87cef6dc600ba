"""Where a model puts nodes, or anything that has a class: points in the plane (plane.py), a mark for each class."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.errors import ShapeError
from alignattn.plots.classes import classes_of, label_of, marks
from alignattn.plots.panels import checked, entitle, explain, finite, label, matplotlib_for, places
from alignattn.plots.plane import check_method, flattened, frame, size_of_dots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given


def embeddings(
    panels: Mapping[str, Any],
    *,
    classes: Sequence[Any],
    method: str = "tsne",
    seed: int = 0,
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw embeddings [n, d], a panel for each title: {title: embeddings}, all of the same nodes.

    `classes` are theirs, one a node, numbers or names; each has a colour and a shape of its own, the same in all
    panels. Each panel is a t-SNE of its own, and has no ticks: directions mean nothing, distances little. What can be
    read off is whether classes keep together. Fewer than five distinct points are drawn by their principal components,
    and so are all with `method="pca"`. `seed` is that of the jitter t-SNE starts from; equal input gives an equal
    picture. `axes`, one for each panel, are drawn on if given.
    """
    matplotlib_for("embeddings()")
    check_method(method, "embeddings")
    kinds = classes_of(classes, "embeddings()")
    points = {
        title: _points(title, value, len(kinds))
        for title, value in checked(panels, "embeddings()", "embeddings").items()
    }
    marked = marks(kinds)
    labels = [label_of(kind) for kind in marked]
    figure, drawn = places(
        list(points), axes, size=(2.6, 2.6), gap=0.15, left=0.1, below=0.1, above=0.35, labels=labels
    )
    for axis, (title, values) in zip(drawn, points.items(), strict=True):
        flat = flattened(values, method, seed=seed, who="embeddings()")  # (n, 2)
        size = size_of_dots(len(flat))
        for kind, style in marked.items():
            x, y = flat[[one == kind for one in kinds]].T
            axis.scatter(x, y, size, alpha=0.75, linewidths=0, label=label(label_of(kind)), **style)
        frame(axis, flat)
        entitle(axis, title)
    explain(figure, drawn, labels, own=axes is None)
    return drawn


def _points(title: str, value: Any, count: int) -> "Array":
    points = finite(value, f"The embeddings of {title!r}", "Leave those nodes out.")
    if points.ndim != 2 or not points.size:
        raise ShapeError(f"The embeddings of {title!r} must be [nodes, width]; got shape {points.shape}.")
    if len(points) != count:
        raise ShapeError(f"{title!r} has embeddings of {len(points)} nodes, and classes are given of {count}.")
    return points
