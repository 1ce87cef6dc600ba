"""Reliability: accuracy by confidence.

ECE = 100 · sum_g count_g · |accuracy_g - confidence_g| / sum_g count_g
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, ShapeError
from alignattn.plots.colours import BLUE, DARK, GREY, ORANGE
from alignattn.plots.panels import array, checked, entitle, explain, is_leftmost, label, matplotlib_for, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

FIELDS = ("count", "confidence", "accuracy", "edges")
LABELS = ("accuracy", "gap to confidence")
TICKS = (0, 0.5, 1)
STRIP = 0.16  # height of the histogram above a reliability diagram, in heights of the diagram


def reliability(panels: Mapping[str, Mapping[str, Any]], *, axes: "Given" = None) -> "list[Axes]":
    """Draw accuracy by confidence, a panel for each title: {title: bins}, with its ECE in percent.

    `bins` maps count, confidence, accuracy and edges to lists, as `vars(alignattn.metrics.reliability_bins(...))` does;
    an empty bin may hold NaN. Blue bars are accuracies; orange ones reach from there to the mean confidence: up where a
    model is too sure of itself, down where not sure enough. The strip above shows how the samples fall into the bins.
    `axes`, one for each panel, are drawn on if given; the strip stands above them.
    """
    matplotlib_for("reliability()")
    groups = {title: _bins(title, bins) for title, bins in checked(panels, "reliability()", "bins").items()}
    figure, drawn = places(
        list(groups), axes, size=(2.1, 2.1), gap=0.25, left=0.55, below=0.45, above=0.9, labels=LABELS
    )
    for axis, (title, bins) in zip(drawn, groups.items(), strict=True):
        _draw_reliability(axis, **bins)
        error = f"ECE {_calibration_error(bins):.2f} %  (n = {bins['count'].sum():.0f})"
        entitle(axis, title, error, y=1 + STRIP + 0.07)
        axis.set_xlabel("confidence", fontsize=9)
        if is_leftmost(axis, drawn):  # all panels have the scale of the first
            axis.set_ylabel("accuracy", fontsize=9)
        else:
            axis.tick_params(labelleft=False)
    explain(figure, drawn, LABELS, own=axes is None)
    return drawn


def _calibration_error(bins: Mapping[str, "Array"]) -> float:
    """ECE of reliability bins, in percent."""
    full = bins["count"] > 0  # confidence and accuracy of the others are NaN
    gap = abs(bins["accuracy"][full] - bins["confidence"][full])
    return 100 * float((bins["count"][full] * gap).sum() / bins["count"].sum())


def _draw_reliability(axis: "Axes", count: "Array", confidence: "Array", accuracy: "Array", edges: "Array") -> None:
    full = count > 0
    low, width = edges[:-1], edges[1:] - edges[:-1]
    bar: dict[str, Any] = {"width": width[full], "align": "edge", "linewidth": 0.8}
    axis.bar(low[full], accuracy[full], color=BLUE, edgecolor="white", label=label(LABELS[0]), **bar)
    # Hatched, so that a gap within the blue is told from one above it.
    gap: dict[str, Any] = {"facecolor": (ORANGE, 0.3), "edgecolor": ORANGE, "hatch": "/////", **bar}
    axis.bar(low[full], (confidence - accuracy)[full], bottom=accuracy[full], label=label(LABELS[1]), **gap)
    axis.plot([0, 1], [0, 1], linestyle="--", linewidth=1, color=DARK)
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xticks=TICKS, yticks=TICKS)
    axis.set(xticklabels=map(str, TICKS), yticklabels=map(str, TICKS))  # "1" and the next panel's "0" keep apart
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    strip = axis.inset_axes((0, 1.03, 1, STRIP))
    strip.bar(low, count, width=width, align="edge", color=GREY, edgecolor="white", linewidth=0.8)
    strip.set(xlim=(0, 1), xticks=[], yticks=[])
    strip.spines[["top", "right", "left"]].set_visible(False)


def _bins(title: str, bins: Any) -> "dict[str, Array]":
    import numpy as np

    if not isinstance(bins, Mapping):
        raise ConfigError(f"Bins of {title!r} must be a mapping, got {type(bins).__name__}. For an object, vars(bins).")
    missing = [name for name in FIELDS if name not in bins]
    if missing:
        raise ConfigError(f"Bins of {title!r} lack {', '.join(missing)}. They need {', '.join(FIELDS)}.")
    arrays = {name: array(bins[name], f"{name} of {title!r}") for name in FIELDS}
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
