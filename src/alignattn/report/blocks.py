"""What a page is made of: each block knows its data and how it looks in HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from alignattn.report.html import Markup, element, joined
from alignattn.report.sorting import in_script, is_missing, is_numeric, sort_key

TALL = 16  # rows of a table from which on it scrolls by itself, under its heads
VERDICTS = {"▲": "better", "▼": "worse", "◆": "differs"}  # marks of the tables, and the classes that colour them


class Block(Protocol):
    """Something that can be shown."""

    def html(self) -> Markup:
        """As HTML."""
        ...


@dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    text: str
    role: str | None = None  # a class of style.css: "lead", "alarm"

    def html(self) -> Markup:
        return element("p", self.text, class_=self.role)


@dataclass(frozen=True)
class Listing:
    """Short texts, one under another; of commands, as they are typed."""

    items: Sequence[str]
    code: bool = False
    role: str = "notes"  # a class of style.css: "words" are to be read first

    def html(self) -> Markup:
        if self.code:
            return element("pre", element("code", "\n".join(self.items)), tabindex="0")
        return element("ul", *(element("li", item) for item in self.items), class_=self.role)


@dataclass(frozen=True)
class Facts:
    """Names with values."""

    pairs: Sequence[tuple[str, str]]

    def html(self) -> Markup:
        rows = (element("div", element("dt", name), element("dd", value)) for name, value in self.pairs)
        return element("dl", *rows)


@dataclass(frozen=True)
class Table:
    """A table that sorts; the first column names the rows. Columns of numbers are found by what stands in them."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self) -> Markup:
        numeric = [is_numeric(list(column)) for column in zip(*self.rows, strict=True)] if self.rows else []
        numeric = numeric or [False] * len(self.head)
        kinds = ["number" if number else "text" for number in numeric]
        marked = [any(text[-1:] in VERDICTS for text in column) for column in zip(*self.rows, strict=True)]
        head = (element("th", name, scope="col", data_kind=kind) for name, kind in zip(self.head, kinds, strict=True))
        rows = (
            element("tr", *(_cell(i, text, numeric[i], marked[i]) for i, text in enumerate(row))) for row in self.rows
        )
        table = element(
            "table",
            element("caption", self.caption),
            element("thead", element("tr", *head)),
            element("tbody", *rows),
        )
        # A region that scrolls must be reachable by the keyboard, and then it needs a name.
        tall = " tall" if len(self.rows) >= TALL else ""
        return element("div", table, class_=f"table{tall}", role="region", aria_label=self.caption, tabindex="0")


def _cell(index: int, text: str, number: bool, marked: bool) -> Markup:
    shown = _marked(text) if marked else text
    if index == 0:
        return element("th", shown, scope="row")
    if not number:
        return element("td", shown, class_="text")
    key = None if is_missing(text) else sort_key(text)
    plain = key is not None and text == f"{key:g}"  # the script reads those itself
    return element("td", shown, data_sort=None if key is None or plain else in_script(key))


def _marked(text: str) -> Markup:
    """The mark of a verdict in its colour, and its room where there is none: numbers stand under each other."""
    mark = text[-1:] if text[-1:] in VERDICTS else ""
    if mark:
        return joined(text.removesuffix(mark), element("span", mark, class_=VERDICTS[mark]))
    return joined(text, element("span", " ▲", class_="unmarked", aria_hidden="true"))


@dataclass(frozen=True)
class Picture:
    """One drawing: inline SVG, which alignattn.report.svg has made."""

    svg: Markup


@dataclass(frozen=True)
class Figure:
    """Pictures that belong together, with what they show in words."""

    caption: str
    pictures: Sequence[Picture]
    wide: bool = False  # a picture that a phone would shrink past reading: it scrolls there
    large: bool = False  # pictures with small print in them: fewer in a row

    def html(self) -> Markup:
        drawn = joined(*(picture.svg for picture in self.pictures))
        if self.wide:
            panels = element("div", drawn, class_="wide", role="region", aria_label=self.caption, tabindex="0")
        else:
            panels = element("div", drawn, class_="panels large" if self.large else "panels")
        return element("figure", panels, element("figcaption", self.caption))


@dataclass(frozen=True)
class Folded:
    """Blocks that open on demand."""

    summary: str
    blocks: Sequence[Block]
    paper: bool = True  # whether they are printed although nobody has opened them

    def html(self) -> Markup:
        name = element("summary", self.summary)
        return element("details", name, *(b.html() for b in self.blocks), class_="paper" if self.paper else None)


@dataclass(frozen=True)
class Section:
    """Blocks under a heading that the table of contents names."""

    title: str
    blocks: Sequence[Block]
    subtitle: str = ""

    def html(self, name: str) -> Markup:
        """As HTML; `name` is what links to it."""
        heading = element("h2", self.title, id=f"{name}-title")
        under = element("p", self.subtitle, class_="subtitle") if self.subtitle else None
        return element(
            "section",
            heading,
            under,
            *(block.html() for block in self.blocks),
            id=name,
            aria_labelledby=f"{name}-title",
        )
