"""Classes in a picture: a colour and a shape each, so that they are told apart without colours too."""

from collections.abc import Iterable, Sequence
from typing import Any

from alignattn.errors import ConfigError
from alignattn.plots.colours import BLUE, DARK, GREEN, ORANGE, PURPLE, SKY, VERMILION

COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, DARK)
SHAPES = ("o", "D", "^", "s", "v", "P", "X")


def classes_of(values: Any, who: str) -> list[Any]:
    """One of each node, as numbers or names that can be told apart; tensors of whole numbers too."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
        raise ConfigError(f"{who} needs classes, a list with one for each node; got {values!r:.40}.")
    nested = next((value for value in values if isinstance(value, list | dict | set)), None)
    if nested is not None:
        raise ConfigError(f"{who} needs classes that are numbers or names, one for each node; got {nested!r:.40}.")
    return list(values)


def marks(classes: Iterable[Any]) -> dict[Any, dict[str, Any]]:
    """How each class is drawn, in the order of numbers or of the alphabet.

    A number from 0 on has the same mark in every picture, whichever others are there.
    """
    kinds = set(classes)
    most = len(COLOURS) * len(SHAPES)
    if len(kinds) > most:
        raise ConfigError(f"Colours and shapes tell {most} classes apart, and there are {len(kinds)}.")
    named = any(isinstance(kind, str) for kind in kinds)
    ordered = sorted(kinds, key=str if named else None)
    numbered = all(isinstance(kind, int) and 0 <= kind < most for kind in ordered)
    count = len(COLOURS)
    return {
        # The second seven have the colours again, each with the shape of its neighbour.
        kind: {"color": COLOURS[place % count], "marker": SHAPES[(place + place // count) % len(SHAPES)]}
        for place, kind in (zip(ordered, ordered, strict=True) if numbered else enumerate(ordered))
    }


def label_of(kind: Any) -> str:
    """A class in a legend: a name as it stands, a number with what it is."""
    return kind if isinstance(kind, str) else f"class {kind}"
