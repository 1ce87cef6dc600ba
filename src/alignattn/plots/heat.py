"""Maps of numbers by rows and columns, with a label at each row and column that has room for one."""

from collections.abc import Sequence
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from alignattn.plots.colours import GREY, LIGHT, ON_DEEP, ON_PALE
from alignattn.plots.words import plain, token_of, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

    from alignattn.plots.panels import Array

CELL, LARGEST, SMALLEST = 0.21, 4.2, 1.1  # inches: a cell, and the sides of a map
LABEL = 7  # points
ROOM = 0.13  # inches that a label needs
NUMBER, NUMBERED = 5, 16  # points of a number in a cell, and rows or columns whose cells have room for one
GRIDDED = 48  # rows or columns that are kept apart by lines; more would be all lines


def side(count: int, other: int) -> float:
    """The side of a map with so many cells, in inches; cells are squares unless a map would be a sliver."""
    cell = min(CELL, LARGEST / max(count, other))
    return max(count * cell, SMALLEST)


def room_for(labels: Sequence[str]) -> float:
    """The inches that labels take beside a map."""
    return width_of(map(token_of, labels), LABEL) + 0.1


def draw_map(axis: "Axes", values: "Array", *, colours: str, scale: "Normalize") -> Any:
    """Rows downwards, columns to the right, centres at whole numbers; cells without a number stay empty."""
    import numpy as np

    rows, columns = values.shape
    if max(values.shape) <= GRIDDED:  # a shape each: sharp in a vector format, however large it is shown
        edges = (np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5)
        drawn: Any = axis.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=colours, norm=scale)
        axis.set(aspect="auto", xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    else:  # an image: no cell is lost where several share a pixel
        style: dict[str, Any] = {"aspect": "auto", "interpolation": "antialiased", "origin": "upper"}
        drawn = axis.imshow(values, cmap=colours, norm=scale, **style)
    axis.set_facecolor(LIGHT)  # seen where there is no number
    axis.spines[:].set(color=GREY, linewidth=0.6)
    for lines, count in ((axis.axhline, rows), (axis.axvline, columns)):
        for edge in range(1, count) if max(values.shape) <= GRIDDED else ():
            lines(edge - 0.5, color="white", linewidth=0.6)
    return drawn


def write_numbers(axis: "Axes", values: "Array", drawn: Any) -> None:
    """Write each number into its cell; none where cells have no room."""
    if max(values.shape) > NUMBERED:
        return
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if isfinite(value):
                style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": NUMBER}
                axis.text(column, row, short(value), color=_upon(drawn.to_rgba(value)), **style)


def short(value: float) -> str:
    """Two digits behind the point, no zero before it, and never minus zero."""
    text = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.0f}"
    if not float(text):
        return "0"
    return text.replace("-", "\u2212").replace("0.", ".", 1) if abs(value) < 0.995 else text.replace("-", "\u2212")


def _upon(colour: Sequence[float]) -> str:
    """What is read better upon a colour, by the contrast of WCAG 2: (lighter + 0.05) / (darker + 0.05)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3])
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return ON_PALE if (luminance + 0.05) ** 2 > 1.05 * 0.05 else ON_DEEP


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
