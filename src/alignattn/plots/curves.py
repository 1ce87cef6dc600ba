"""How training went: the task's loss and the alignment's over the steps, each kind of attention a line."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, ShapeError
from alignattn.plots.colours import by_kind
from alignattn.plots.panels import checked, entitle, explain, finite, label, matplotlib_for, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given

STEPS = "step"
NAMES = {
    "task_loss": "loss of the task",
    "alignment_loss": "loss of the alignment, weighted",
    "alignment_mmd": "MMD², mean of a head",
}
LINES = ("-", "--", ":", "-.")


def curves(
    kinds: Mapping[str, Mapping[str, Any]], *, steps: Sequence[int] | None = None, axes: "Given" = None
) -> "list[Axes]":
    """Draw what was logged while training: {title: {"task_loss": values, "alignment_loss": values}}.

    Values are [looks] or [runs, looks]; of several runs the mean is drawn, in a band of one standard error.
    Each name has a panel, whatever it is called; a kind of attention without it, as soft attention has no alignment
    loss, has no line there. `steps` says when the looks were; one kind's own stand under "step" beside its values.
    Without either they are numbered from one. `axes`, one for each name, are drawn on if given.
    """
    matplotlib_for("curves()")
    lines = {title: _lines(title, one, steps) for title, one in checked(kinds, "curves()", "curves").items()}
    names = list(dict.fromkeys(name for _, values in lines.values() for name in values))
    if not names:
        raise ConfigError('curves() got no values to draw. Give each title "task_loss", "alignment_loss" or both.')
    shown = [NAMES.get(name, name.replace("_", " ")) for name in names]
    labels = [title for title, (_, values) in lines.items() if values]
    figure, drawn = places(shown, axes, size=(3.2, 2.1), gap=0.55, left=0.55, below=0.45, above=0.3, labels=labels)
    colours, styles = by_kind(lines), _styles(lines)
    for axis, name, heading in zip(drawn, names, shown, strict=True):
        for title, (at, values) in lines.items():
            if name not in values:
                continue
            runs = values[name]  # (runs, looks)
            style: dict[str, Any] = {"color": colours[title], "linewidth": 1.2, "linestyle": styles[title]}
            mean = runs.mean(0)
            if len(runs) > 1:
                error = runs.std(0, ddof=1) / len(runs) ** 0.5
                axis.fill_between(at, mean - error, mean + error, color=colours[title], alpha=0.15, linewidth=0)
            marker = "o" if runs.shape[1] == 1 else None  # a line of one point is not seen
            axis.plot(at, mean, label=label(title), marker=marker, markersize=3, **style)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02)
        entitle(axis, heading)
    explain(figure, drawn, labels, own=axes is None)
    return drawn


def _styles(titles: Mapping[str, Any]) -> dict[str, str]:
    """Solid, but where titles share a colour."""
    colours = by_kind(titles)
    seen: list[str] = []
    styles = {}
    for title in titles:
        styles[title] = LINES[seen.count(colours[title]) % len(LINES)]
        seen.append(colours[title])
    return styles


def _lines(title: str, given: Any, steps: Sequence[int] | None) -> "tuple[Array, dict[str, Array]]":
    import numpy as np

    if not isinstance(given, Mapping):
        raise ConfigError(f"Curves of {title!r} must be a mapping {{name: values}}, got {type(given).__name__}.")
    values = {}
    for name, numbers in given.items():
        if name == STEPS:
            continue
        what = f"The values of {name!r} of {title!r}"
        runs = np.atleast_2d(finite(numbers, what, "Cut the curve where training failed."))
        if runs.ndim != 2 or not runs.size:
            raise ShapeError(f"{what} must be [looks] or [runs, looks], one or more; got shape {runs.shape}.")
        values[str(name)] = runs
    lengths = {name: runs.shape[1] for name, runs in values.items()}
    length = max(lengths.values(), default=0)
    at = given.get(STEPS, steps)
    place = np.arange(1.0, length + 1) if at is None else finite(at, f"The steps of {title!r}", "They are numbers.")
    if set(lengths.values()) - {length} or (values and place.shape != (length,)):
        raise ShapeError(f"{title!r} needs one step for each look: got {place.shape} steps, and values {lengths}.")
    if (np.diff(place) <= 0).any():
        raise ConfigError(f"The steps of {title!r} must rise.")
    return place, values
