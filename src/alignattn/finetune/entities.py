"""Entities in a row of tags: IOB1, IOB2 and IOBES, read as conlleval reads them.

An entity begins at B and S, and at I or E that no entity of the same kind comes before; it ends before the next that
begins, before O, and after E and S.
"""

import re
from collections.abc import Sequence

_TAG = re.compile(r"([BIES])-(.+)")
Entity = tuple[str, int, int]  # its kind, its first token, and the one behind its last


def are_iob(names: Sequence[str]) -> bool:
    """Whether all labels are such tags."""
    return any(_TAG.fullmatch(name) for name in names) and all(name == "O" or _TAG.fullmatch(name) for name in names)


def entities(tags: Sequence[str]) -> set[Entity]:
    """All entities in a row of tags."""
    found: set[Entity] = set()
    kind, start = "", 0  # of the entity that is open; "" for none
    for i, tag in enumerate([*tags, "O"]):
        match = _TAG.fullmatch(tag)
        position, here = (match[1], match[2]) if match else ("O", "")
        if kind and (position in {"O", "B", "S"} or here != kind):
            found.add((kind, start, i))
            kind = ""
        if here and not kind:
            kind, start = here, i
        if kind and position in {"E", "S"}:
            found.add((kind, start, i + 1))
            kind = ""
    return found
