"""The number by which a cell of a table is sorted, read off its text.

77.2 ± 0.3 ▲ → 77.2      −1.5 to +2.0 → −1.5      < 0.001 → just below 0.001      5 (1 failed) → 5      – → nothing
"""

import math
import re

MISSING = frozenset({"", "–", "—", "-", "NaN", "nan"})
# A number that the text begins with, and that ends where a word would: not the year of a date, nor the 3 of "3d".
_LEADING = re.compile(r"([<>≤≥~]?)\s*([+−-]?)(∞|inf|\d[\d,]*(?:\.\d+)?(?:[eE][+−-]?\d+)?)(?=$|[\s%×)])")


def sort_key(text: str) -> float | None:
    """The number that the text begins with; None where there is none."""
    found = _LEADING.match(text.strip())
    if found is None:
        return None
    bound, sign, digits = found.groups()
    number = math.inf if digits in ("∞", "inf") else float(digits.replace(",", "").replace("−", "-"))
    number = -number if sign in ("−", "-") and sign else number
    if bound == "<":
        return math.nextafter(number, -math.inf)
    return math.nextafter(number, math.inf) if bound == ">" else number


def is_missing(text: str) -> bool:
    """Whether a cell says that there is nothing."""
    return text.strip() in MISSING


def is_numeric(column: list[str]) -> bool:
    """Whether every cell that says something begins with a number, and one does."""
    said = [text for text in column if not is_missing(text)]
    return bool(said) and all(sort_key(text) is not None for text in said)


def in_script(key: float) -> str:
    """A key as a script reads it."""
    return repr(key).replace("inf", "Infinity")
