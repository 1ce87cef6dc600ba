"""What commands are given, read and checked: for the `type` of an argument of argparse."""

import argparse

from alignattn.errors import ConfigError
from alignattn.weights import read_weight


def at_least_one(text: str) -> int:
    """A whole number above zero."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def seeds(text: str) -> int | list[int]:
    """`5`: five seeds from 0 on; `3,4` and `3-5`: those."""
    try:
        if "," not in text and "-" not in text:
            return at_least_one(text)
        seeds: list[int] = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number such as 5, or a list such as 3,4,5 or 3-5; got {text!r}") from None
    if not seeds:
        raise argparse.ArgumentTypeError(f"names no seed: {text!r}")
    return seeds


def names(text: str) -> list[str]:
    """`soft,mmd`: those two."""
    return [name.strip() for name in text.split(",") if name.strip()]


def weights(text: str) -> list[float | str]:
    """`0.1,1,auto:0.03`: as weights.py has them, in words where they change while training."""
    try:
        read = [read_weight(part.strip()) for part in text.split(",") if part.strip()]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return [weight if isinstance(weight, float) else str(weight) for weight in read]
