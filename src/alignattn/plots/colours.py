"""The colours of all pictures: Okabe and Ito's, told apart by every kind of colour vision."""

from collections.abc import Iterable

BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"
GREY, LIGHT, DARK = "#999999", "#DDDDDD", "#404040"
# A kind of attention has one colour in every picture; keys, queries and bars of one kind are blue and orange.
KINDS = {"soft": DARK, "gan": VERMILION, "ot": BLUE, "ct": GREEN, "mmd": PURPLE}
OTHERS = (ORANGE, SKY, BLUE, GREEN, VERMILION, PURPLE)
# Upon a colour of a map. Not black and white, which are a page's ink and paper and change places in a dark scheme.
ON_PALE, ON_DEEP = "#010101", "#FEFEFE"
WEIGHTS, DISTANCES = "Blues", "Oranges"  # from white: the paper's own, where there is nothing


def by_kind(titles: Iterable[str]) -> dict[str, str]:
    """A colour for each title: that of the kind of attention it begins with, or one of those left over."""
    titles = list(titles)
    found = {title: KINDS[kind] for title in titles if (kind := kind_of(title)) in KINDS}
    free = [colour for colour in OTHERS if colour not in found.values()] or list(OTHERS)
    others = [title for title in titles if title not in found]
    return found | {title: free[index % len(free)] for index, title in enumerate(others)}


def kind_of(title: str) -> str:
    """The first word of a title, such as "mmd" of "MMD, weight 0.1"."""
    words = str(title).lower().replace(",", " ").replace(":", " ").split()
    return words[0] if words else ""
