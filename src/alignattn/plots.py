"""Pictures of key and query clouds and of calibration: arrays in, a matplotlib figure out, nothing shown.

    clouds:       t-SNE of queries and keys together,    perplexity = min(30, (points - 1) / 3)
    reliability:  ECE = 100 · sum_g count_g · |accuracy_g - confidence_g| / sum_g count_g

The clouds are those of the first figure of Zhang et al. 2021, blue dots for keys and orange diamonds for queries; the
paper tells neither its perplexity nor how many points it drew. Figures are made without pyplot: none is registered,
none needs a display, and rcParams stay as they are.
"""

import textwrap
from collections.abc import Iterable, Mapping
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignattn.errors import AlignmentError, ConfigError, NonFiniteError, ShapeError, unknown
from alignattn.files import write_whole

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Okabe and Ito's blue and orange: told apart by every kind of colour vision, and in grey.
BLUE, ORANGE, GREY, DARK = "#0072B2", "#E69F00", "#999999", "#404040"
METHODS = ("tsne", "pca")
FIELDS = ("count", "confidence", "accuracy", "edges")
# The metadata of each format, without the date: equal figures are to be equal files.
UNDATED: dict[str, dict[str, str | None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
FEWEST = 5  # distinct points: with fewer t-SNE has no neighbourhoods to keep
COLUMNS = 5  # panels in a row: soft attention and four methods
TITLE = 24  # characters that fit above a panel, capitals too
TICKS = (0, 0.5, 1)
STRIP = 0.16  # height of the histogram above a reliability diagram, in heights of the diagram


def clouds(
    panels: Mapping[str, tuple[Any, Any]],
    *,
    method: str = "tsne",
    seed: int = 0,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> "Figure":
    """Draw the queries [n, d] and keys [m, d] of one head, a panel for each title: {title: (query, key)}.

    Each panel is a t-SNE of its own, of queries and keys together, and has no ticks: directions mean nothing, distances
    little. What can be read off is whether the clouds mix. Fewer than five distinct points are drawn by their principal
    components, and so are all with `method="pca"`. `seed` is that of the jitter t-SNE starts from; equal input gives an
    equal picture. `axes`, one for each panel, are drawn on if given.
    """
    _matplotlib("clouds()")
    if method not in METHODS:
        raise unknown("method of drawing clouds", method, METHODS)
    points = {title: _cloud(title, pair) for title, pair in _checked(panels, "clouds()", "(query, key)").items()}
    figure, places = _places(list(points), axes, side=2.3, gap=0.15, left=0.1, below=0.1, above=0.35)
    for axis, (title, (query, key)) in zip(places, points.items(), strict=True):
        _draw_cloud(axis, query, key, method=method, seed=seed)
        axis.set_title(_wrapped(title), fontsize=10)
    _legend(figure, places, own=axes is None)
    return figure


def reliability(panels: Mapping[str, Mapping[str, Any]], *, axes: "Axes | Iterable[Axes] | None" = None) -> "Figure":
    """Draw accuracy by confidence, a panel for each title: {title: bins}, with its ECE in percent.

    `bins` maps count, confidence, accuracy and edges to lists, as `vars(alignattn.metrics.reliability_bins(...))` does;
    an empty bin may hold NaN. Blue bars are accuracies; orange ones reach from there to the mean confidence: up where a
    model is too sure of itself, down where not sure enough. The strip above shows how the samples fall into the bins.
    `axes`, one for each panel, are drawn on if given; the strip stands above them.
    """
    _matplotlib("reliability()")
    groups = {title: _bins(title, bins) for title, bins in _checked(panels, "reliability()", "bins").items()}
    figure, places = _places(list(groups), axes, side=2.1, gap=0.25, left=0.55, below=0.45, above=0.9)
    leftmost = min(axis.get_position(original=True).x0 for axis in places)
    for axis, (title, bins) in zip(places, groups.items(), strict=True):
        _draw_reliability(axis, **bins)
        error = f"ECE {_calibration_error(bins):.2f} %  (n = {bins['count'].sum():.0f})"
        axis.set_title(f"{_wrapped(title)}\n{error}", fontsize=10, y=1 + STRIP + 0.07)
        axis.set_xlabel("confidence", fontsize=9)
        if axis.get_position(original=True).x0 > leftmost + 1e-6:  # all panels have the scale of the first
            axis.tick_params(labelleft=False)
        else:
            axis.set_ylabel("accuracy", fontsize=9)
    _legend(figure, places, own=axes is None)
    return figure


def save(figure: "Figure", path: str | Path, *, dpi: int = 200) -> None:
    """Write a figure as png, svg or pdf, by the suffix of `path`: whole or not at all, and always the same bytes."""
    mpl = _matplotlib("save()")
    path = Path(path)
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in UNDATED:
        raise unknown("picture format", suffix, UNDATED)
    picture = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "alignattn"}):  # otherwise the names inside an svg are random
        figure.savefig(picture, format=suffix, dpi=dpi, metadata=UNDATED[suffix])
    write_whole(path, picture.getvalue())


def _calibration_error(bins: Mapping[str, "Array"]) -> float:
    """ECE of reliability bins, in percent."""
    full = bins["count"] > 0  # confidence and accuracy of the others are NaN
    gap = abs(bins["accuracy"][full] - bins["confidence"][full])
    return 100 * float((bins["count"][full] * gap).sum() / bins["count"].sum())


def _draw_cloud(axis: "Axes", query: "Array", key: "Array", *, method: str, seed: int) -> None:
    import numpy as np

    points = np.concatenate([key, query])  # (m + n, d)
    distinct = len(np.unique(points, axis=0))
    flat = _tsne(points, seed) if method == "tsne" and distinct >= FEWEST else _principal(points)  # (m + n, 2)
    size = float(np.clip(2500 / len(points), 6, 30))
    style: dict[str, Any] = {"alpha": 0.75, "linewidths": 0}
    (x, y), cut = flat.T, len(key)
    axis.scatter(x[:cut], y[:cut], size, marker="o", color=BLUE, label="keys", **style)
    axis.scatter(x[cut:], y[cut:], 0.8 * size, marker="D", color=ORANGE, label="queries", **style)
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


def _draw_reliability(axis: "Axes", count: "Array", confidence: "Array", accuracy: "Array", edges: "Array") -> None:
    full = count > 0
    low, width = edges[:-1], edges[1:] - edges[:-1]
    bar: dict[str, Any] = {"width": width[full], "align": "edge", "linewidth": 0.8}
    axis.bar(low[full], accuracy[full], color=BLUE, edgecolor="white", label="accuracy", **bar)
    # Hatched, so that a gap within the blue is told from one above it.
    gap: dict[str, Any] = {"facecolor": (ORANGE, 0.3), "edgecolor": ORANGE, "hatch": "/////", **bar}
    axis.bar(low[full], (confidence - accuracy)[full], bottom=accuracy[full], label="gap to confidence", **gap)
    axis.plot([0, 1], [0, 1], linestyle="--", linewidth=1, color=DARK)
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=TICKS, yticks=TICKS)
    axis.set(xticklabels=map(str, TICKS), yticklabels=map(str, TICKS))  # "1" and the next panel's "0" keep apart
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    strip = axis.inset_axes((0, 1.03, 1, STRIP))
    strip.bar(low, count, width=width, align="edge", color=GREY, edgecolor="white", linewidth=0.8)
    strip.set(xlim=(0, 1), xticks=[], yticks=[])
    strip.spines[["top", "right", "left"]].set_visible(False)


def _places(
    titles: list[str], axes: Any, *, side: float, gap: float, left: float, below: float, above: float
) -> "tuple[Figure, list[Axes]]":
    """Square axes, one for each title and all of one size, lengths in inches; or those that were given."""
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if axes is not None:
        given = [axes] if isinstance(axes, Axes) else list(np.ravel(list(axes)))
        if len(given) != len(titles):
            raise ConfigError(f"Each panel needs its axes: got {len(given)} axes for {len(titles)} panels.")
        owner: Any = given[0].figure
        while not isinstance(owner, Figure):  # a subfigure belongs to another
            owner = owner.figure
        return owner, given
    rows = ceil(len(titles) / COLUMNS)
    columns = ceil(len(titles) / rows)
    above += 0.17 * max(_wrapped(title).count("\n") for title in titles)
    legend, right = 0.3, 0.1
    width = left + columns * side + (columns - 1) * gap + right
    height = rows * (above + side + below) + legend
    figure = Figure(figsize=(width, height))
    places = []
    for index in range(len(titles)):
        row, column = divmod(index, columns)
        x, y = left + column * (side + gap), legend + (rows - row - 1) * (above + side + below) + below
        places.append(figure.add_axes((x / width, y / height, side / width, side / height)))
    return figure, places


def _legend(figure: "Figure", places: "list[Axes]", *, own: bool) -> None:
    handles, labels = places[0].get_legend_handles_labels()
    style: dict[str, Any] = {"markerscale": 1.5, "handletextpad": 0.4, "handlelength": 1.5, "fontsize": 9}
    if own:
        figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, **style)
    else:
        places[0].legend(handles, labels, **style)


def _wrapped(title: str) -> str:
    return "\n".join(textwrap.wrap(str(title), TITLE)) or " "


def _matplotlib(who: str) -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise AlignmentError(f"{who} needs matplotlib: pip install 'alignattn[plot]'") from error
    return mpl


def _checked(panels: Any, who: str, what: str) -> Mapping[str, Any]:
    if not isinstance(panels, Mapping):
        raise ConfigError(f"{who} takes a mapping {{title: {what}}}, got {type(panels).__name__}.")
    if not panels:
        raise ConfigError(f"{who} got no panels. Give it a mapping {{title: {what}}} with one entry or more.")
    return panels


def _array(value: Any, what: str) -> "Array":
    import numpy as np

    if hasattr(value, "detach"):  # a tensor, maybe of a graph, on another device, or in a precision numpy lacks
        value = value.detach().cpu().double()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{what} must be an array of numbers: {error}") from error


def _cloud(title: str, pair: Any) -> "tuple[Array, Array]":
    import numpy as np

    try:
        query, key = pair
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Panel {title!r} must be a pair (query, key), got {type(pair).__name__}.") from error
    arrays = {"queries": _array(query, f"Queries of {title!r}"), "keys": _array(key, f"Keys of {title!r}")}
    for name, array in arrays.items():
        if array.ndim != 2:
            raise ShapeError(
                f"The {name} of {title!r} must be [points, width], those of one head; got shape {array.shape}."
            )
        if not array.size:
            raise ShapeError(f"The {name} of {title!r} have shape {array.shape}: there is no point to draw.")
        if not np.isfinite(array).all():
            raise NonFiniteError(f"The {name} of {title!r} hold NaN or infinity. Leave those points out.")
    query, key = arrays["queries"], arrays["keys"]
    if query.shape[1] != key.shape[1]:
        raise ShapeError(f"Queries and keys of {title!r} differ in width: {query.shape[1]} and {key.shape[1]}.")
    return query, key


def _bins(title: str, bins: Any) -> "dict[str, Array]":
    import numpy as np

    if not isinstance(bins, Mapping):
        raise ConfigError(f"Bins of {title!r} must be a mapping, got {type(bins).__name__}. For an object, vars(bins).")
    missing = [name for name in FIELDS if name not in bins]
    if missing:
        raise ConfigError(f"Bins of {title!r} lack {', '.join(missing)}. They need {', '.join(FIELDS)}.")
    arrays = {name: _array(bins[name], f"{name} of {title!r}") for name in FIELDS}
    count, edges = arrays["count"], arrays["edges"]
    shapes = {name: array.shape for name, array in arrays.items()}
    if count.ndim != 1 or shapes != dict.fromkeys(FIELDS, count.shape) | {"edges": (len(count) + 1,)}:
        raise ShapeError(f"Bins of {title!r} need one value for each bin, and one edge more; got shapes {shapes}.")
    if not (np.isfinite(count).all() and (count >= 0).all() and count.sum() > 0):
        raise ConfigError(f"Bins of {title!r} hold no samples, or not a count >= 0 each: {count.tolist()}.")
    if not (np.diff(edges) > 0).all() or edges[0] < 0 or edges[-1] > 1:
        raise ConfigError(f"Edges of {title!r} must rise from 0 to 1, got {edges.tolist()}.")
    for name in ("confidence", "accuracy"):
        share = arrays[name][count > 0]
        if not ((share >= 0) & (share <= 1)).all():
            raise ConfigError(f"The {name} of a bin with samples lies in [0, 1]; {title!r} has {share.tolist()}.")
    return arrays
