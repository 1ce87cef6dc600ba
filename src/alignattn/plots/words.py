r"""Titles and tokens as they are drawn: any text at all, `$`, `<script>`, line ends and emoji included.

Nothing is mathematics: `$x$` stays `$x$`. A character that the font lacks is drawn in an installed one that has it, and
as an empty square where none has.
"""

import unicodedata
from bisect import bisect
from collections.abc import Iterable
from functools import cache
from typing import Any

TITLE = 10  # points
TOKEN = 14  # characters of a token, the last of a longer one an ellipsis
LINES = 3  # of a title
LONGEST = 500  # characters of a text that are looked at
SHOWN_AS = {"\n": "↵", "\r": "↵", "\t": "⇥"}
MISSING = "□"
NO_LETTERS = ("LastResort", "Last Resort")  # fonts that have a frame for every character


def plain(*texts: str) -> dict[str, Any]:
    """Properties of a Text that shows these as they stand."""
    return {"parse_math": False, "usetex": False, "fontfamily": _families(frozenset("".join(texts)))}


def title_of(text: object, inches: float) -> str:
    """A title in lines that fit above a panel of this width; a space where it is empty, so that its place is kept."""
    lines, current = [], ""
    for word in legible(str(text)[:LONGEST]).split():
        if width_of([f"{current} {word}"], TITLE) <= inches:
            current = f"{current} {word}".strip()
            continue
        lines.append(current)
        current = word
        while (head := _fitting(current, inches, TITLE)) != current:
            lines.append(head)
            current = current[len(head) :]
    lines = [line for line in [*lines, current] if line]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], cut_to(f"{lines[LINES - 1]} {lines[LINES]}", inches, TITLE)]
    return "\n".join(lines) or " "


def cut_to(text: str, inches: float, size: float) -> str:
    """A text, its end an ellipsis where it is wider than this."""
    if width_of([text], size) <= inches:
        return text
    return _fitting(text, inches - width_of(["…"], size), size) + "…"


def _fitting(text: str, inches: float, size: float) -> str:
    """As much of a text as fits, one character at least."""
    fits = bisect(range(1, len(text)), inches, key=lambda end: width_of([text[: end + 1]], size))
    return text[: fits + 1]


def token_of(text: object) -> str:
    """A token that fits beside its row."""
    word = str(text)[:LONGEST]
    word = legible("␣" * len(word) if word and not word.strip(" ") else word)
    return word if len(word) <= TOKEN else word[: TOKEN - 1] + "…"


def legible(text: str) -> str:
    """Each character by something that can be drawn; joiners and selectors of variants are left out."""
    kept = []
    for character in text:
        shown = SHOWN_AS.get(character, character)
        if unicodedata.category(shown) == "Cf" or "\ufe00" <= shown <= "\ufe0f":
            continue
        kept.append(shown if shown.isspace() or _font_for(shown, _default()) is not None else MISSING)
    return "".join(" " if character.isspace() else character for character in kept)


def width_of(texts: Iterable[str], size: float) -> float:
    """The width of the widest of these, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    widest = 0.0
    for text in texts:
        properties = FontProperties(family=_families(frozenset(text)), size=size)
        widest = max(widest, float(text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0]))
    return widest / 72


def _families(characters: frozenset[str]) -> list[str]:
    """The font that is set, and those that have what it lacks."""
    from matplotlib.font_manager import FontProperties

    default = _default()
    fonts = (_font_for(character, default) for character in sorted(characters) if not character.isspace())
    return list(dict.fromkeys([*FontProperties().get_family(), *(font for font in fonts if font)]))


def _default() -> str:
    """The file of the font that is set."""
    from matplotlib.font_manager import FontProperties, findfont

    return str(findfont(FontProperties()))


@cache
def _font_for(character: str, default: str) -> str | None:
    """The name of a font that has a character: "" for the one that is set, None for none."""
    from matplotlib.font_manager import fontManager

    if ord(character) in _characters(default):
        return ""
    others = sorted((font.name, str(font.fname)) for font in fontManager.ttflist if font.style == "normal")
    for name, file in others:
        if not name.startswith(NO_LETTERS) and ord(character) in _characters(file):
            return name
    return None


@cache
def _characters(file: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(file).get_charmap())
    except (OSError, RuntimeError):  # a font that was removed, or cannot be read
        return frozenset()
