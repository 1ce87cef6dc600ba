"""Pictures of a report: each panel an SVG of its own, so that a phone shows them below each other."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from alignattn import plots
from alignattn.plots.curves import NAMES
from alignattn.plots.stored import Course, common_steps
from alignattn.report import svg
from alignattn.report.blocks import Picture

Distances = Mapping[str, Sequence[float]]  # by layer, one a head


def reliability(panels: Mapping[str, Mapping[str, Any]], salt: str) -> list[Picture]:
    """Accuracy by confidence: {title: bins}."""
    return [
        _picture(plots.reliability, {title: bins}, f"Reliability of {title}", f"{salt}-{number}")
        for number, (title, bins) in enumerate(panels.items(), 1)
    ]


def highest_of(tables: Iterable[Distances]) -> float | None:
    """The top of one scale for several maps; None where nothing is apart."""
    largest = max((value for table in tables for row in table.values() for value in row if value > 0), default=0.0)
    return largest or None


def distance_map(
    title: str, table: Distances, salt: str, *, highest: float | None, noise: Distances | None = None
) -> Picture:
    """MMD² by layer and head."""
    limits = None if noise is None else {title: noise}
    draw = partial(plots.distance_map, noise=limits, highest=highest, numbers=True)
    return _picture(draw, {title: table}, f"MMD² of {title} by layer and head", salt)


def curves(panels: Mapping[str, Mapping[str, Sequence[Course]]], salt: str) -> list[Picture]:
    """What was logged while training, a picture for each name: {name: {title: runs}}."""
    drawn: list[Picture] = []
    for name, kinds in panels.items():
        found = {title: common_steps(runs) for title, runs in kinds.items()}
        lines = {title: {"step": steps, name: values} for title, (steps, values) in found.items() if steps}
        if lines:
            told = NAMES.get(name, name)
            drawn.append(_picture(plots.curves, lines, f"{told} by step", f"{salt}-{len(drawn) + 1}"))
    return drawn


def _picture(draw: Any, panel: Mapping[str, Any], label: str, salt: str) -> Picture:
    return Picture(svg.inline(partial(draw, panel), label, salt))
