"""How far apart keys and queries are in each head: maps of the squared MMD, rows are layers, columns heads."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, NonFiniteError, ShapeError
from alignattn.plots.colours import DISTANCES, ON_DEEP, ON_PALE
from alignattn.plots.heat import draw_map, label_columns, label_rows, room_for, side, write_numbers
from alignattn.plots.panels import (
    array,
    checked,
    colour_bar,
    entitle,
    explain,
    finite,
    is_leftmost,
    label,
    matplotlib_for,
    places,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given
LABELS = ("within noise",)
ASIDE = 0.33  # of a cell: to its upper right


def distance_map(
    panels: Mapping[str, Mapping[str, Any]],
    *,
    noise: float | Mapping[str, Mapping[str, Any]] | None = None,
    highest: float | None = None,
    numbers: bool = False,
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw MMD² by layer and head, a panel for each title: {title: {layer: one value a head}}, all of the same layers.

    That is what `alignattn.diagnosis.mmd.discrepancy` returns and a result file holds. One scale of colours serves all
    panels, from zero, white: an unbiased estimate may lie a little below, and is drawn as zero. `highest` is the top of
    the scale, for pictures that are to share one; the largest distance if not given. `noise`, one number or the same
    mapping again, marks the heads whose keys and queries cannot be told apart: |MMD²| <= noise. `numbers` writes
    distances into the cells that have room. NaN, of a head that could not be measured, leaves its cell empty, and so do
    layers with fewer heads than others. Titles tell the sum. `axes`, one for each panel, are drawn on if given.
    """
    matplotlib_for("distance_map()")
    import numpy as np
    from matplotlib.colors import Normalize

    tables = _tables(checked(panels, "distance_map()", "distances"))
    layers = _common_layers(tables)
    heads = max(len(row) for table in tables.values() for row in table.values())
    names = short_names(layers)
    limits = _limits(noise, tables)
    figure, drawn = places(
        list(tables),
        axes,
        size=(side(heads, len(layers)), side(len(layers), heads)),
        gap=0.2,
        left=room_for(names) + 0.25,
        below=0.4,
        above=0.55,
        right=0.75,
        labels=LABELS if limits else (),
    )
    scale = Normalize(0.0, _top(highest, tables))
    for axis, (title, table) in zip(drawn, tables.items(), strict=True):
        values = _filled(table, heads)
        image = draw_map(axis, values, colours=DISTANCES, scale=scale)
        if limits is not None:
            _mark(axis, values, _filled(limits[title], heads), aside=numbers)
        if numbers:
            write_numbers(axis, values, image)
        label_columns(axis, [str(head) for head in range(heads)], rotation=0)
        axis.set_xlabel("head", fontsize=8)
        label_rows(axis, names if is_leftmost(axis, drawn) else None)
        if is_leftmost(axis, drawn):
            axis.set_ylabel("layer", fontsize=8)
        entitle(axis, title, f"sum {np.nansum(values):.3g}")
    colour_bar(figure, drawn, image, own=axes is None, name="MMD²")
    if limits is not None:
        explain(figure, drawn, LABELS, own=axes is None)
    return drawn


def short_names(layers: Sequence[str]) -> list[str]:
    """What tells layers apart: "encoder.layer.0.self" and "encoder.layer.1.self" are 0 and 1."""
    parts = [str(layer).split(".") for layer in layers]
    fewest = min(map(len, parts))
    if len(parts) == 1:
        return [next((part for part in parts[0] if part.isdigit()), parts[0][-1])]
    first = next((i for i in range(fewest) if len({one[i] for one in parts}) > 1), fewest - 1)
    last = next((i for i in range(1, fewest - first) if len({one[-i] for one in parts}) > 1), fewest - first)
    return [".".join(one[first : len(one) - last + 1]) for one in parts]


def _mark(axis: "Axes", values: "Array", limits: "Array", *, aside: bool) -> None:
    """A dot in the middle of a cell, or in its corner where a number stands in the middle; a rim keeps it in sight."""
    import numpy as np

    layer, head = np.nonzero(abs(values) <= limits)
    style: dict[str, Any] = {"marker": "o", "facecolor": ON_PALE, "edgecolor": ON_DEEP, "linewidths": 0.5}
    shift = ASIDE if aside else 0.0
    axis.scatter(head + shift, layer - shift, 4 if aside else 9, label=label(*LABELS), zorder=3, **style)


def _filled(table: "Mapping[str, Array]", heads: int) -> "Array":
    import numpy as np

    values = np.full((len(table), heads), np.nan)
    for place, row in enumerate(table.values()):
        values[place, : len(row)] = row
    return values


def _tables(panels: Mapping[str, Any]) -> "dict[str, dict[str, Array]]":
    import numpy as np

    tables = {title: _table(f"distances of {title!r}", rows) for title, rows in panels.items()}
    for title, table in tables.items():
        if all(np.isnan(row).all() for row in table.values()):
            raise NonFiniteError(
                f"The distances of {title!r} are all NaN. No sample had two valid tokens on both sides, or the model "
                "diverged."
            )
    return tables


def _table(what: str, rows: Any) -> "dict[str, Array]":
    import numpy as np

    if not isinstance(rows, Mapping) or not rows:
        raise ConfigError(f"The {what} must be a mapping {{layer: one value a head}}, got {rows!r:.60}.")
    table = {}
    for layer, row in rows.items():
        values = array(row, f"The {what} in layer {layer!r}")
        if values.ndim != 1 or not values.size:
            raise ShapeError(f"The {what} in layer {layer!r} must be one value a head; got shape {values.shape}.")
        if np.isinf(values).any():
            raise NonFiniteError(f"The {what} in layer {layer!r} hold infinity. The model diverged.")
        table[str(layer)] = values
    return table


def _top(highest: float | None, tables: "Mapping[str, Mapping[str, Array]]") -> float:
    import numpy as np

    if highest is None:
        largest = float(np.nanmax([*(value for table in tables.values() for row in table.values() for value in row)]))
        return largest if largest > 0 else 1.0
    if not 0 < highest < float("inf"):
        raise ConfigError(f"highest is the top of the scale, a number > 0; got {highest}.")
    return float(highest)


def _common_layers(tables: "Mapping[str, Mapping[str, Array]]") -> list[str]:
    (first, table), *others = tables.items()
    heads = {layer: len(row) for layer, row in table.items()}
    for title, other in others:
        if {layer: len(row) for layer, row in other.items()} != heads:
            raise ShapeError(
                f"All panels of one picture have the same layers and heads; {title!r} and {first!r} differ."
            )
    return list(table)


def _limits(noise: Any, tables: "Mapping[str, Mapping[str, Array]]") -> "dict[str, dict[str, Array]] | None":
    if noise is None:
        return None
    if not isinstance(noise, Mapping):
        limit = finite(noise, "The noise", "It is a number.")
        if limit.ndim or limit < 0:
            raise ConfigError(f"noise is a number >= 0, or one for each head as the distances are; got {noise!r:.60}.")
        return {title: {layer: 0 * row + limit for layer, row in table.items()} for title, table in tables.items()}
    limits = {title: _table(f"noise of {title!r}", noise.get(title)) for title in tables}
    for title, table in tables.items():
        if {layer: len(row) for layer, row in limits[title].items()} != {
            layer: len(row) for layer, row in table.items()
        }:
            raise ShapeError(f"The noise of {title!r} must have the layers and heads of its distances.")
    return limits
