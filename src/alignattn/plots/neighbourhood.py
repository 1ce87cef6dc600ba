"""What a node of a graph attends to: its neighbours around it, each edge that comes in as broad as its weight."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from math import cos, pi, sin
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, ShapeError
from alignattn.plots.classes import classes_of, label_of, marks
from alignattn.plots.colours import DARK, GREY
from alignattn.plots.heat import LABEL, short
from alignattn.plots.panels import checked, entitle, explain, finite, label, matplotlib_for, owner_of, places
from alignattn.plots.words import plain, token_of, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

SIDE = 2.8  # inches of a panel
SMALLEST = 0.5  # inches, of the radius of the circle of neighbours
PAD = 0.13  # inches between a neighbour and what is written there
LINE = 0.115  # inches, of a line that is written
BROADEST = 8.0  # points, of the largest weight
FEW = 20  # neighbours that are drawn large
EVENLY = "shared evenly"
ITSELF = "itself"


def neighbourhood(
    panels: Mapping[str, Any],
    *,
    node: Hashable,
    neighbours: Sequence[Hashable],
    classes: Mapping[Any, Any] | None = None,
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw the attention of one node, a panel for each title: {title: weights [m]}, of one head or a mean of heads.

    `neighbours` are the m nodes it attends to, by number or name, in the order of the weights. They stand around it,
    clockwise from the top, at the same places in all panels, each with its weight; where the node is one of them, that
    is its self-loop, and is called so. One scale serves all panels: the legend shows how broad an edge would be if all
    had the same. `classes` tells those of nodes that are to be marked by it, {node: class}. Where neighbours are too
    many for their names, weights stand alone, and where these have no room, nothing is written.
    `alignattn.diagnosis.neighbours.neighbourhood_of` tells neighbours and weights of a model. `axes`, one for each
    panel, are drawn on if given.
    """
    matplotlib_for("neighbourhood()")
    names = _names(neighbours)
    weights = {
        title: _weights(title, value, len(names))
        for title, value in checked(panels, "neighbourhood()", "weights").items()
    }
    found = {one: classes[one] for one in (*names, node) if one in classes} if classes is not None else {}
    marked = marks(classes_of(list(found.values()), "neighbourhood()")) if found else {}
    labels = [EVENLY, *map(label_of, marked)]
    figure, drawn = places(
        list(weights), axes, size=(SIDE, SIDE), gap=0.15, left=0.1, below=0.3, above=0.35, labels=labels
    )
    highest = max(float(values.max()) for values in weights.values()) or 1.0
    styles = {one: marked[kind] for one, kind in found.items()}
    side = min(_inches(axis) for axis in drawn)
    texts = _legible_texts(node, names, list(weights.values()), side)
    for axis, (title, values), told in zip(drawn, weights.items(), texts, strict=True):
        _draw(axis, values, node, names, styles, scale=BROADEST / highest)
        _write(axis, told, side)
        for kind, style in marked.items():
            axis.scatter([], [], 40, linewidths=0, label=label(label_of(kind)), **style)
        whose = f"attention of {token_of(node)}"
        axis.set_xlabel(whose, fontsize=8, **plain(whose))
        entitle(axis, title)
    explain(figure, drawn, labels, own=axes is None)
    return drawn


def _draw(
    axis: "Axes",
    weights: "Array",
    node: Hashable,
    names: Sequence[Hashable],
    styles: Mapping[Any, Mapping[str, Any]],
    *,
    scale: float,
) -> None:
    nobody: dict[str, Any] = {"color": DARK, "marker": "o"}
    for (x, y), name, weight in zip(_circle(len(names)), names, weights, strict=True):
        axis.plot([x, 0], [y, 0], color=GREY, linewidth=scale * weight, solid_capstyle="butt", zorder=1)
        axis.scatter([x], [y], 70 if len(names) <= FEW else 15, linewidths=0, zorder=3, **styles.get(name, nobody))
    axis.scatter([0], [0], 130, linewidths=1.2, edgecolors=DARK, zorder=3, **styles.get(node, nobody))
    axis.plot([], [], color=GREY, linewidth=scale / len(names), label=label(EVENLY))
    axis.set(aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set(color=GREY, linewidth=0.6)


def _circle(count: int) -> list[tuple[float, float]]:
    """Clockwise from the top."""
    return [(sin(2 * pi * place / count), cos(2 * pi * place / count)) for place in range(count)]


def _write(axis: "Axes", texts: Sequence[str], side: float) -> None:
    """What stands at each neighbour, and a frame that holds it."""
    radius = _radius(texts, side)
    reach = side / 2 / radius
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
    for text, (x, y, *_) in zip(texts, _boxes(texts, radius), strict=True):
        if text:
            axis.text(x / radius, y / radius, text, ha="center", va="center", fontsize=LABEL, **plain(text))


def _legible_texts(
    node: Hashable, names: Sequence[Hashable], weights: "Sequence[Array]", side: float
) -> list[list[str]]:
    """What is written at the neighbours, panel by panel: as much as keeps apart and within the panel."""
    shown = [ITSELF if name == node else token_of(name) for name in names]
    numbers = [[short(float(weight)) for weight in values] for values in weights]
    named = [[f"{name}\n{number}" for name, number in zip(shown, row, strict=True)] for row in numbers]
    for texts in (named, numbers):
        if all(_fit(row, side) for row in texts):
            return texts
    return [[""] * len(names) for _ in weights]


def _fit(texts: Sequence[str], side: float) -> bool:
    boxes = _boxes(texts, _radius(texts, side))
    if any(max(abs(x) + width / 2, abs(y) + height / 2) > side / 2 for x, y, width, height in boxes):
        return False
    return not any(
        abs(x - u) < (width + other) / 2 + 0.02 and abs(y - v) < (height + tall) / 2
        for (x, y, width, height), (u, v, other, tall) in combinations(boxes, 2)
    )


def _boxes(texts: Sequence[str], radius: float) -> list[tuple[float, float, float, float]]:
    """Middle, width and height of each text, in inches from the node; they touch their neighbours from outside."""
    boxes = []
    for (x, y), text in zip(_circle(len(texts)), texts, strict=True):
        width, height = width_of(text.split("\n"), LABEL), LINE * len(text.split("\n"))
        boxes.append((x * (radius + PAD + width / 2), y * (radius + PAD + height / 2), width, height))
    return boxes


def _radius(texts: Sequence[str], side: float) -> float:
    """Of the circle of neighbours, in inches: what the texts around it leave."""
    widest = max(width_of(text.split("\n"), LABEL) for text in texts)
    return max(side / 2 - 2 * PAD - max(widest, 2 * LINE), min(SMALLEST, side / 4))


def _inches(axis: "Axes") -> float:
    """The shorter side of a panel."""
    extent = axis.get_window_extent()
    return float(min(extent.width, extent.height)) / owner_of(axis).dpi


def _names(neighbours: Any) -> list[Any]:
    names = neighbours.tolist() if hasattr(neighbours, "tolist") else neighbours
    if isinstance(names, str) or not isinstance(names, Sequence) or not len(names):
        raise ConfigError(f"neighbourhood() needs neighbours, a list of nodes, one or more; got {names!r:.40}.")
    if len(set(names)) < len(names):
        raise ConfigError(
            "neighbourhood() was given a neighbour twice: add up the weights of edges from the same node."
        )
    return list(names)


def _weights(title: str, value: Any, count: int) -> "Array":
    weights = finite(value, f"The weights of {title!r}", "Leave those neighbours out.")
    if weights.shape != (count,):
        raise ShapeError(
            f"The weights of {title!r} must be [{count}], one for each neighbour, of one head or a mean of heads; got "
            f"shape {weights.shape}."
        )
    if (weights < 0).any():
        raise ConfigError(f"The weights of {title!r} go down to {weights.min():.3g}: these are no attention weights.")
    return weights
