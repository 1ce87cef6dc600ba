"""Panels: axes side by side, of one size each and measured in inches, or those that a caller gave."""

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from alignattn.errors import AlignmentError, ConfigError, NonFiniteError, ShapeError
from alignattn.plots.words import LONGEST, cut_to, legible, plain, title_of, width_of

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    Given = Axes | Iterable[Axes] | None

COLUMNS = 5  # panels in a row: soft attention and four methods
WIDEST = 12.2  # inches: five reliability diagrams
LEGEND = 9  # points
HANDLE = 0.6  # inches of a legend's entry beside its text
SHADES = 48  # of a scale's bar: of 50 on matplotlib would make an image of it, which no vector format keeps sharp
NAMED = "\u2060"  # a word joiner before each label: one that begins with "_" would be left out


def matplotlib_for(who: str) -> Any:
    """The library, or an error that says how to install it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise AlignmentError(f"{who} needs matplotlib: pip install 'alignattn[plot]'") from error
    return mpl


def checked(panels: Any, who: str, what: str) -> Mapping[str, Any]:
    """What a picture was given, a mapping with something in it."""
    if not isinstance(panels, Mapping):
        raise ConfigError(f"{who} takes a mapping {{title: {what}}}, got {type(panels).__name__}.")
    if not panels:
        raise ConfigError(f"{who} got no panels. Give it a mapping {{title: {what}}} with one entry or more.")
    return panels


def array(value: Any, what: str) -> "Array":
    """Numbers of any kind, tensors too."""
    import numpy as np

    if hasattr(value, "detach"):  # a tensor, maybe of a graph, on another device, or in a precision numpy lacks
        value = value.detach().cpu().double()
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{what} must be an array of numbers: {error}") from error


def finite(value: Any, what: str, advice: str) -> "Array":
    """Numbers, none of them NaN or infinite."""
    import numpy as np

    numbers = array(value, what)
    if not np.isfinite(numbers).all():
        raise NonFiniteError(f"{what} hold NaN or infinity. {advice}")
    return numbers


def places(
    titles: Sequence[str],
    axes: "Given",
    *,
    size: tuple[float, float],
    gap: float,
    left: float,
    below: float,
    above: float,
    right: float = 0.1,
    labels: Sequence[str] = (),
    columns: int = COLUMNS,
) -> "tuple[Figure, list[Axes]]":
    """Axes of one size, width and height in inches, one for each title; or those that were given.

    `above` and `below` belong to each row, `left` and `right` to the picture; `labels` are those of the legend at its
    foot.
    """
    from matplotlib.figure import Figure

    if axes is not None:
        found = given(axes, len(titles))
        return owner_of(found[0]), found
    columns = max(1, min(columns, int((WIDEST - left - right + gap) / (size[0] + gap) + 1e-6)))
    rows = ceil(len(titles) / columns)
    columns = ceil(len(titles) / rows)
    above += 0.17 * max(title_of(title, size[0]).count("\n") for title in titles)
    width = left + columns * size[0] + (columns - 1) * gap + right
    legend = foot(labels, width)
    row_height = above + size[1] + below
    height = rows * row_height + legend
    figure = Figure(figsize=(width, height))
    made = []
    for index in range(len(titles)):
        row, column = divmod(index, columns)
        x, y = left + column * (size[0] + gap), legend + (rows - row - 1) * row_height + below
        made.append(figure.add_axes((x / width, y / height, size[0] / width, size[1] / height)))
    return figure, made


def given(axes: Any, count: int) -> "list[Axes]":
    """The axes of a caller, one for each panel."""
    import numpy as np
    from matplotlib.axes import Axes

    found = [axes] if isinstance(axes, Axes) else list(np.ravel(list(axes)))
    if len(found) != count:
        raise ConfigError(f"Each panel needs its axes: got {len(found)} axes for {count} panels.")
    return found


def owner_of(part: Any) -> "Figure":
    """The figure that axes, or a subfigure, are part of in the end."""
    from matplotlib.figure import Figure

    while not isinstance(part, Figure):
        part = part.figure
    return part


def is_leftmost(axis: "Axes", among: "Sequence[Axes]") -> bool:
    """Whether this panel begins a row: the others have its scale."""
    return bool(axis.get_position(original=True).x0 <= min(one.get_position(original=True).x0 for one in among) + 1e-6)


def entitle(axis: "Axes", title: object, *lines: str, **style: Any) -> None:
    """Write a title above a panel, and lines of our own below it."""
    inches = axis.get_window_extent().width / owner_of(axis).dpi
    text = "\n".join([title_of(title, inches), *lines])
    axis.set_title(text, fontsize=10, **plain(text), **style)


def label(text: object) -> str:
    """What an artist is to be called in the legend, whatever it begins with."""
    return f"{NAMED}{text}"


def foot(labels: Sequence[str], width: float) -> float:
    """The height of the legend of these labels in a picture of this width, in inches."""
    return 0.05 + 0.19 * ceil(len(labels) / _legend_columns(labels, width)) + 0.08 * bool(labels)


def explain(figure: "Figure", places: "Sequence[Axes]", labels: Sequence[str], *, own: bool) -> None:
    """A legend of what is labelled so: at the foot of a picture of our own, else within the first panel."""
    named = {name: handle for axis in places for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    handles = [named[label(text)] for text in labels]
    style: dict[str, Any] = {"handletextpad": 0.5, "handlelength": 2.0, "fontsize": LEGEND, "markerscale": 1.5}
    width = figure.get_size_inches()[0] if own else 3.0
    if own:
        style |= {
            "loc": "lower center",
            "ncols": _legend_columns(labels, width),
            "frameon": False,
            "borderaxespad": 0.2,
        }
    legend = (figure if own else places[0]).legend(handles, list(map(label, labels)), **style)
    for text, name in zip(legend.get_texts(), labels, strict=True):
        shown = cut_to(legible(str(name)[:LONGEST]), 0.9 * width - HANDLE, LEGEND)
        text.set(text=shown, **plain(shown))


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """As many as fit beside each other; letters in pixels are a little wider than those measured."""
    import numpy as np

    entries = [width_of([legible(str(name)[:LONGEST])], LEGEND) + HANDLE for name in labels]
    for columns in range(len(entries), 1, -1):
        if sum(max(column) for column in np.array_split(entries, columns)) <= 0.95 * width:  # as a legend splits them
            return columns
    return 1


def colour_bar(figure: "Figure", places: "Sequence[Axes]", image: Any, *, own: bool, name: str) -> None:
    """The one scale of all panels, to the right of the first row."""
    from matplotlib.cm import ScalarMappable

    bar: Any
    scale = ScalarMappable(image.norm, image.cmap.resampled(SHADES))
    if own:
        box = places[0].get_position(original=True)
        edge = max(axis.get_position(original=True).x1 for axis in places)
        width, height = figure.get_size_inches()
        long = min(box.height, 2.2 / height)
        place = (edge + 0.12 / width, box.y0 + (box.height - long) / 2, 0.1 / width, long)
        bar = figure.colorbar(scale, cax=figure.add_axes(place))
    else:
        bar = figure.colorbar(scale, ax=list(places))
    bar.solids.set_edgecolor("face")  # else what is behind shows through where two shades meet
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.set_label(name, fontsize=8)
    bar.set_ticks(_ticks(image.norm))


def _ticks(scale: Any) -> list[float]:
    """Round numbers that keep apart on the scale: at equal steps if it is linear, else those of fewest digits first."""
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    highest = float(scale.vmax)
    if type(scale) is Normalize:
        ticks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(0.0, highest)
        return [float(tick) for tick in ticks if tick <= highest]
    decades = [10.0**k for k in range(-6, 7)]
    chosen = [0.0]
    for tick in (digit * decade for digit in (1, 5, 2) for decade in reversed(decades)):
        if tick <= highest and all(abs(scale(tick) - scale(other)) >= 0.15 for other in chosen):
            chosen.append(tick)
    return sorted(chosen)
