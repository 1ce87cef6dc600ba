"""HTML as a value: what is text is escaped, what is markup is made here and nowhere else.

A `Markup` is HTML already. Everything else that comes into an element, as a child or as the value of an attribute, is
text, whatever it looks like: `<script>` in a file name is eight characters to be read.
"""

import html
import re

VOID = frozenset({"br", "hr", "link", "meta"})
# What HTML cannot carry, or what ends a file's encoding: control characters and halves of surrogate pairs.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9:-]*")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def clean(text: str) -> str:
    """The text with a mark for each character that no page can show."""
    return _UNSHOWABLE.sub("\ufffd", text)


def escaped(value: object) -> Markup:
    """Text as HTML; markup as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(clean(str(value)), quote=True))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """`<tag name="value">children</tag>`.

    An attribute that is None or False is left out, one that is True has no value. Names may end in an underscore
    (`class_`), and have underscores for dashes (`aria_label`). Children that are None are left out.
    """
    head = tag + "".join(_attribute(name, value) for name, value in attributes.items())
    if tag in VOID:
        return Markup(f"<{head}>")
    return Markup(f"<{head}>{joined(*children)}</{tag}>")


def joined(*parts: object) -> Markup:
    """Parts one after another."""
    return Markup("".join(escaped(part) for part in parts if part is not None))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an attribute")
    return f" {name}" if value is True else f' {name}="{escaped(value)}"'
