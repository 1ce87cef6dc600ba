"""Attention as heat maps, the tokens on both axes: rows are queries, columns the keys they attend to."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, ShapeError
from alignattn.plots.colours import WEIGHTS
from alignattn.plots.heat import draw_map, label_columns, label_rows, room_for, side
from alignattn.plots.panels import (
    checked,
    colour_bar,
    entitle,
    finite,
    is_leftmost,
    matplotlib_for,
    places,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Array, Given


def attention(
    panels: Mapping[str, Any],
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw attention weights [n, m], a panel for each title: {title: weights}, all of the same tokens.

    `queries` and `keys` are the tokens; keys are those of the queries unless given, and both are numbered where neither
    is. One scale of colours serves all panels, by the square root of a weight: from no attention, white, to the largest
    weight. `alignattn.diagnosis.attention.attention_of` tells the weights of a model. `axes`, one for each panel, are
    drawn on if given.
    """
    matplotlib_for("attention()")
    from matplotlib.colors import PowerNorm

    weights = {title: _weights(title, matrix) for title, matrix in checked(panels, "attention()", "weights").items()}
    n, m = _common_shape(weights)
    keys = queries if keys is None else keys
    rows, columns = _tokens(queries, n, "queries"), _tokens(keys, m, "keys")
    figure, drawn = places(
        list(weights),
        axes,
        size=(side(m, n), side(n, m)),
        gap=0.2,
        left=room_for(rows) + 0.25,
        below=room_for(columns) + 0.25,
        above=0.35,
        right=0.75,
    )
    # By the root: few weights are large, and most of what can be seen is small beside them.
    scale = PowerNorm(0.5, 0.0, max(float(matrix.max()) for matrix in weights.values()) or 1.0)
    for axis, (title, matrix) in zip(drawn, weights.items(), strict=True):
        image = draw_map(axis, matrix, colours=WEIGHTS, scale=scale)
        label_columns(axis, columns)
        axis.set_xlabel("keys", fontsize=8)
        label_rows(axis, rows if is_leftmost(axis, drawn) else None)
        if is_leftmost(axis, drawn):
            axis.set_ylabel("queries", fontsize=8)
        entitle(axis, title)
    colour_bar(figure, drawn, image, own=axes is None, name="attention")
    return drawn


def _weights(title: str, matrix: Any) -> "Array":
    weights = finite(matrix, f"The weights of {title!r}", "A row without any key is a row of zeros.")
    if weights.ndim != 2 or not weights.size:
        raise ShapeError(
            f"The weights of {title!r} must be [queries, keys], those of one head or a mean of heads; got shape "
            f"{weights.shape}."
        )
    if (weights < 0).any():
        raise ConfigError(f"The weights of {title!r} go down to {weights.min():.3g}: these are no attention weights.")
    return weights


def _common_shape(weights: "Mapping[str, Array]") -> tuple[int, int]:
    shapes = {title: matrix.shape for title, matrix in weights.items()}
    if len(set(shapes.values())) > 1:
        raise ShapeError(f"All panels of one picture have the same tokens; got shapes {shapes}.")
    n, m = next(iter(shapes.values()))
    return n, m


def _tokens(tokens: Sequence[str] | None, count: int, what: str) -> list[str]:
    if tokens is None:
        return [str(place) for place in range(count)]
    if isinstance(tokens, str) or len(tokens) != count:
        got = repr(tokens)[:40] if isinstance(tokens, str) else len(tokens)
        raise ShapeError(f"The {what} of these weights are {count} tokens, a list of texts; got {got}.")
    return [str(token) for token in tokens]
