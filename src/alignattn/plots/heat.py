"""Maps of numbers by rows and columns, with a label at each row and column that has room for one."""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from alignattn.plots.colours import GREY, LIGHT
from alignattn.plots.words import plain, token_of, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

    from alignattn.plots.panels import Array

CELL, LARGEST, SMALLEST = 0.21, 4.2, 1.1  # inches: a cell, and the sides of a map
LABEL = 7  # points
ROOM = 0.13  # inches that a label needs
GRIDDED = 48  # rows or columns that are kept apart by lines; more would be all lines


def side(count: int, other: int) -> float:
    """The side of a map with so many cells, in inches; cells are squares unless a map would be a sliver."""
    cell = min(CELL, LARGEST / max(count, other))
    return max(count * cell, SMALLEST)


def room_for(labels: Sequence[str]) -> float:
    """The inches that labels take beside a map."""
    return width_of(map(token_of, labels), LABEL) + 0.1


def draw_map(axis: "Axes", values: "Array", *, colours: str, scale: "Normalize") -> Any:
    """Rows downwards, columns to the right; cells without a number stay empty. Returns the image."""
    # Cells have sharp edges where there is room for them, and none is lost where there is not.
    style: dict[str, Any] = {"aspect": "auto", "interpolation": "antialiased", "origin": "upper"}
    image = axis.imshow(values, cmap=colours, norm=scale, **style)
    axis.set_facecolor(LIGHT)  # seen where there is no number
    axis.spines[:].set(color=GREY, linewidth=0.6)
    for lines, count in ((axis.axhline, values.shape[0]), (axis.axvline, values.shape[1])):
        for edge in range(1, count) if max(values.shape) <= GRIDDED else ():
            lines(edge - 0.5, color="white", linewidth=0.6)
    return image


def label_rows(axis: "Axes", labels: Sequence[str] | None) -> None:
    """Write what stands in each row to the left of it; None for a map whose neighbour says it."""
    _label(axis, "y", labels, 0)


def label_columns(axis: "Axes", labels: Sequence[str], *, rotation: int = 90) -> None:
    """Write what stands in each column below it."""
    _label(axis, "x", labels, rotation)


def _label(axis: "Axes", which: str, labels: Sequence[str] | None, rotation: int) -> None:
    extent = axis.get_window_extent()  # in pixels
    length = (extent.height if which == "y" else extent.width) / axis.figure.dpi
    # As many as have room, at equal steps from the first.
    step = ceil(ROOM * len(labels) / length) if labels is not None and len(labels) else 1
    shown = {place: token_of(labels[place]) for place in range(0, len(labels), step)} if labels is not None else {}
    axis.tick_params(axis=which, length=2, width=0.6, color=GREY, pad=2)  # type: ignore[arg-type]
    ticks = {"fontsize": LABEL, "rotation": rotation, **plain(*shown.values())}
    set_ticks = axis.set_yticks if which == "y" else axis.set_xticks
    set_ticks(list(shown), list(shown.values()), **ticks)
