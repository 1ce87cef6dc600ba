"""The pictures of a report: what matplotlib draws of them, from numbers that result files hold."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.experiments.settings import SOFT
from alignattn.plots.colours import BLUE, GREY, KINDS, ORANGE
from alignattn.plots.frontier import LINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHADES = 16  # of a map: as many as its key shows
DENSE, PALE = 1 - 1 / SHADES, "#f8fafc"  # on the last shade a number is read better in white, in either scheme
LETTERS, LONGEST = 44, 120  # of a label: in a line of a panel, and in all
MOST_ANNOTATED = 12  # heads in a row whose cells have room for a number

Course = tuple[Sequence[float], Sequence[float]]  # steps, values


def pooled(bins: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Reliability bins of several seeds as those of all their samples together."""
    edges = [float(edge) for edge in bins[0]["edges"]]
    if any([float(edge) for edge in one["edges"]] != edges for one in bins):
        raise ValueError("the seeds have other bins")
    counts = [math.fsum(column) for column in zip(*(one["count"] for one in bins), strict=True)]
    found = {"count": counts, "edges": edges}
    for name in ("confidence", "accuracy"):
        sums = [0.0] * len(counts)
        for one in bins:
            for i, (count, value) in enumerate(zip(one["count"], one[name], strict=True)):
                sums[i] += count * value if count else 0.0  # the mean of an empty bin is NaN
        found[name] = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
    return found


def mean_map(maps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The mean over seeds of a value for each head of each layer."""
    return {
        layer: [math.fsum(values) / len(maps) for values in zip(*(one[layer] for one in maps), strict=True)]
        for layer in maps[0]
    }


def mean_course(courses: Sequence[Course]) -> Course:
    """The mean over seeds at the steps that all of them have and where all are finite."""
    by_step = [{float(s): float(v) for s, v in zip(*course, strict=True) if math.isfinite(v)} for course in courses]
    steps = sorted(set.intersection(*(set(one) for one in by_step)))
    return steps, [math.fsum(one[step] for one in by_step) / len(by_step) for step in steps]


def head_map(title: str, layers: Mapping[str, Sequence[float]], limits: tuple[float, float], unit: str) -> "Figure":
    """Layer × head, shaded by value; layers from the bottom up are numbered as they come.

    The shades are one blue, more and more opaque: nothing looks like the page behind it, whatever the page's colour.
    """
    from matplotlib.colors import ListedColormap, to_rgb
    from matplotlib.figure import Figure

    heads = max(map(len, layers.values()))
    grid = [[*values, *[math.nan] * (heads - len(values))] for values in layers.values()]
    figure = Figure(figsize=(3.6, min(6.0, 1.25 + 0.24 * len(grid))), layout="constrained")
    axis = figure.subplots()
    low, high = limits
    shades = ListedColormap([(*to_rgb(BLUE), (shade + 0.5) / SHADES) for shade in range(SHADES)])
    mesh = axis.pcolormesh(grid, cmap=shades, vmin=low, vmax=high, edgecolors="white", linewidth=0.8, clip_on=False)
    if heads <= MOST_ANNOTATED and len(grid) <= MOST_ANNOTATED:
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                colour = PALE if value - low > DENSE * (high - low) else "black"
                if math.isfinite(value):
                    axis.text(x + 0.5, y + 0.36, _short(value), ha="center", fontsize=5.5, color=colour)
    axis.set_xticks([x + 0.5 for x in _some(heads)], [str(x) for x in _some(heads)], fontsize=7)
    axis.set_yticks([y + 0.5 for y in _some(len(grid))], [str(y) for y in _some(len(grid))], fontsize=7)
    axis.set_xlabel("head", fontsize=8)
    axis.set_ylabel("layer", fontsize=8)
    axis.set_title(fitting(title), fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    key = figure.colorbar(mesh, ax=axis, fraction=0.06, pad=0.03)
    key.outline.set_visible(False)
    key.ax.tick_params(labelsize=7, length=0)
    key.ax.set_title(unit, fontsize=7)
    return figure


def curves(title: str, courses: Mapping[str, Course], styles: Mapping[str, tuple[str, str]]) -> "Figure":
    """A line for each name, over training steps; `styles` has its colour and dashes, in every panel the same."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6, 2.9), layout="constrained")
    axis = figure.subplots()
    for name, (steps, values) in courses.items():
        colour, dashes = styles[name]
        axis.plot(steps, values, color=colour, linestyle=dashes, linewidth=1.3, label=fitting(name))
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("step", fontsize=8)
    axis.tick_params(labelsize=7, length=2, color=GREY)
    axis.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set(color=GREY, linewidth=0.6)
    columns = max(1, min(3, LETTERS // (4 + max(len(name) for name in courses))))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=7, handlelength=1.4)
    return figure


def styles_of(methods: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Colour and dashes for each label: the frontier's colours by method, and dashes where a method has several."""
    found: dict[str, tuple[str, str]] = {}
    for label, method in methods.items():
        colour = GREY if method == SOFT else KINDS.get(method, ORANGE)
        known = sum(style[0] == colour for style in found.values())
        found[label] = colour, LINES[known % len(LINES)]
    return found


def fitting(label: str) -> str:
    """A label in lines that fit into a panel, cut where it would fill it."""
    label = label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"
    return "\n".join(textwrap.wrap(label, LETTERS)) or " "


def limits_of(maps: Sequence[Mapping[str, Sequence[float]]]) -> tuple[float, float]:
    """One scale for several maps."""
    values = [value for one in maps for row in one.values() for value in row if math.isfinite(value)]
    return (min(values), max(values)) if values else (0.0, 1.0)


def _some(count: int) -> list[int]:
    """Of many places those to number."""
    step = max(1, math.ceil(count / 12))
    return list(range(0, count, step))


def _short(value: float) -> str:
    """Two digits behind the point, no zero before it, and never minus zero."""
    text = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.0f}"
    if not float(text):
        return "0"
    return text.replace("-", "−").replace("0.", ".", 1) if abs(value) < 0.995 else text.replace("-", "−")
