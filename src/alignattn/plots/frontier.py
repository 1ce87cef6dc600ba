"""The frontier: how far apart keys and queries are against how good the model is, weight by weight.

A point is on the front if none has both a smaller distance and a better value: distance_i <= distance_j and
value_i >= value_j for no i, one of the two strictly. An unbiased distance may lie below zero, so its axis is linear
near zero and logarithmic beyond.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, isinf
from typing import TYPE_CHECKING, Any

from alignattn.errors import ConfigError, NonFiniteError
from alignattn.plots.colours import DARK, GREY, LIGHT, by_kind
from alignattn.plots.panels import checked, entitle, explain, label, matplotlib_for, owner_of, places
from alignattn.plots.words import legible, plain, width_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alignattn.plots.panels import Given

LINES, MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D")
COLUMNS = 3
SMALL = 6  # points, of a weight
# Those that matter most first.
TICKS = (0.0, *(sign * n * 10.0**k for n in (1, 2, 5) for sign in (1, -1) for k in range(-6, 7)))
CORNERS = ((1, 1), (1, -1), (-1, 1), (-1, -1))  # of a point, where its weight may stand
DIRECTION = {True: "better →", False: "← better", None: ""}  # along the axis of values, upwards
SOFT, FRONT = "soft", "best trade-off"


@dataclass(frozen=True)
class Point:
    """One kind of attention in one panel."""

    weight: str  # or its share, where it is chosen while training
    distance: float
    value: float
    error: float = float("nan")  # one standard error of the value, or of its difference to soft attention; NaN: unknown


def frontier(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    *,
    soft: Mapping[str, Point] | None = None,
    higher_is_better: bool | Mapping[str, bool | None] | None = True,
    distance: str = "MMD²",
    axes: "Given" = None,
) -> "list[Axes]":
    """Draw values against distances, a panel for each metric: {title: {curve: points}}.

    The points of a curve are joined in their order, have its colour and marker, and tell their weight where there is
    room. A curve has the colour of the kind of attention it is named after: gan, ot, ct or mmd. `soft` has a point for
    each title: a star, with a line for its value. The broad light line is the front, for metrics of which it is known
    whether higher is better. `axes`, one for each panel, are drawn on if given.
    """
    matplotlib_for("frontier()")
    found = {title: _curves(title, one) for title, one in checked(panels, "frontier()", "{curve: points}").items()}
    stars = {title: _star(title, soft) for title in found}
    names = list(dict.fromkeys(name for one in found.values() for name in one))
    better = {t: higher_is_better.get(t) if isinstance(higher_is_better, Mapping) else higher_is_better for t in found}
    labels = [SOFT] * any(map(stars.get, found)) + names + [FRONT] * any(one is not None for one in better.values())
    figure, drawn = places(
        list(found), axes, size=(2.9, 2.2), gap=0.65, left=0.65, below=0.5, above=0.3, labels=labels, columns=COLUMNS
    )
    styles = _styles(names)
    for axis, (title, one) in zip(drawn, found.items(), strict=True):
        _draw(axis, one, stars[title], better[title], styles)
        axis.set_xlabel(distance, fontsize=8, **plain(distance))
        axis.set_ylabel(DIRECTION[better[title]], fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        entitle(axis, title)
    explain(figure, drawn, labels, own=axes is None)
    return drawn


def front(points: Iterable[Point], *, higher_is_better: bool) -> list[Point]:
    """The points that no other is better than in both respects, by distance."""
    sign = 1 if higher_is_better else -1
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.distance, -sign * p.value)):
        if not best or sign * point.value > sign * best[-1].value:
            best.append(point)
    return best


def _draw(
    axis: "Axes",
    curves: Mapping[str, Sequence[Point]],
    star: Point | None,
    better: bool | None,
    styles: Mapping[str, Any],
) -> None:
    every = [point for points in curves.values() for point in points] + ([star] if star else [])
    if better is not None:
        best = front(every, higher_is_better=better)
        x = [*(p.distance for p in best), max(p.distance for p in every)]
        y = [*(p.value for p in best), best[-1].value]
        broad: dict[str, Any] = {"color": LIGHT, "linewidth": 6, "solid_capstyle": "round", "drawstyle": "steps-post"}
        axis.plot(x, y, zorder=-1, label=label(FRONT), **broad)
    if star:
        axis.axhline(star.value, color=GREY, linewidth=0.8, zorder=0)
        axis.plot([star.distance], [star.value], "*", color=DARK, markersize=9, linestyle="none", label=label(SOFT))
    for name, points in curves.items():
        _draw_curve(axis, name, points, styles[name])
    axis.margins(x=0.1)
    _scale(axis, max(abs(point.distance) for point in every))
    _write_weights(axis, [point for points in curves.values() for point in points])


def _draw_curve(axis: "Axes", name: str, points: Sequence[Point], style: Mapping[str, Any]) -> None:
    x, y = [p.distance for p in points], [p.value for p in points]
    bars = [p.error for p in points]  # none is drawn where there is none
    axis.errorbar(x, y, bars, label=label(name), linewidth=1, markersize=4, elinewidth=0.7, **style)


def _write_weights(axis: "Axes", points: Sequence[Point]) -> None:
    """Each weight at the first corner of its point that is free; none where all are taken."""
    from matplotlib.transforms import Bbox

    dot = owner_of(axis).dpi / 72  # pixels of a typographic point
    places = axis.transData.transform([(p.distance, p.value) for p in points])
    taken = [Bbox.from_bounds(x - 2 * dot, y - 2 * dot, 4 * dot, 4 * dot) for x, y in places]
    for point, (x, y) in zip(points, places, strict=True):
        weight = legible(point.weight)
        width, height = 72 * dot * width_of([weight], SMALL), SMALL * dot
        for right, above in CORNERS:
            left, bottom = x + 3 * dot * right - width * (right < 0), y + 2 * dot * above - height * (above < 0)
            box = Bbox.from_bounds(left, bottom, width, height)
            if box.count_overlaps(taken):
                continue
            taken.append(box)
            text: dict[str, Any] = {"ha": "left" if right > 0 else "right", "va": "bottom" if above > 0 else "top"}
            text |= {"fontsize": SMALL, "color": DARK, "xytext": (3 * right, 2 * above), **plain(weight)}
            axis.annotate(weight, (point.distance, point.value), textcoords="offset points", **text)
            break


def _scale(axis: "Axes", largest: float) -> None:
    """Linear up to a twentieth of the largest, logarithmic beyond; zero and powers of ten have ticks first."""
    axis.set_xscale("symlog", linthresh=largest / 20 or 1.0)
    low, high = axis.get_xlim()
    positions = axis.transScale.transform([(tick, 1.0) for tick in (low, high, *TICKS)])[:, 0]
    room = 0.11 * (positions[1] - positions[0])
    ticks: dict[float, float] = {}
    for tick, position in zip(TICKS, positions[2:], strict=True):
        if low <= tick <= high and all(abs(position - other) >= room for other in ticks.values()):
            ticks[tick] = position
    axis.set_xticks(sorted(ticks), [f"{tick:g}".replace("-", "\u2212") for tick in sorted(ticks)])
    axis.set_xticks([], minor=True)


def _star(title: str, soft: Mapping[str, Point] | None) -> Point | None:
    star = (soft or {}).get(title)
    return None if star is None else _curves(title, {"soft": [star]})["soft"][0]


def _curves(title: str, given: Any) -> dict[str, list[Point]]:
    if not isinstance(given, Mapping) or not any(given.values()):
        raise ConfigError(f"The panel {title!r} must be a mapping {{curve: points}} with a point or more.")
    curves = {str(name): list(points) for name, points in given.items() if points}
    for name, points in curves.items():
        for point in points:
            if not isinstance(point, Point):
                raise ConfigError(f"{name!r} of {title!r} must hold plots.Point, got {type(point).__name__}.")
            if not (isfinite(point.distance) and isfinite(point.value)) or isinf(point.error):
                raise NonFiniteError(f"{name!r} of {title!r} has {point}, which has no place. Leave it out.")
    return curves


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour a method; lines and markers tell its options apart."""
    colours = by_kind(names)
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        nth = sum(style["color"] == colours[name] for style in styles.values())
        styles[name] = {
            "color": colours[name],
            "linestyle": LINES[nth % len(LINES)],
            "marker": MARKERS[nth % len(MARKERS)],
        }
    return styles
