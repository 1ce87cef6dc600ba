"""A matplotlib figure as SVG that can stand in a page, several of them, in a light and in a dark scheme.

What matplotlib writes is a document of its own. Here it loses what a page has already or its policy refuses: the
metadata, the style element, style attributes (each declaration becomes an attribute of the same name), and the family
of its fonts. Names get a salt, for a page has one namespace of them. Black and dark grey are the ink of a drawing and
become the text's colour, white is its paper and becomes the background's, and pale grey is darkened with it. All other
colours, those of data, stay as they are.
"""

import io
import itertools
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from alignattn.errors import AlignmentError
from alignattn.report.html import Markup, element, escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = frozenset({"#000000", "#404040", "#333333", "black"})
PAPER = frozenset({"#ffffff", "white"})
SHADE = frozenset({"#dddddd"})  # of what lies behind: a broad line, an empty cell
POINT = 4 / 3  # pixels
# text.parse_math: a dollar in a name is a dollar. Text stays text, in the page's own font.
PLAIN: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False}
_DROPPED = frozenset({"metadata", "style", "title"})
_FONT = re.compile(r"(?:(?P<style>italic|oblique)\s+)?(?:(?P<weight>bold|\d00)\s+)?(?P<size>[\d.]+)px\b.*")
_REFERENCE = re.compile(r"#([\w.-]+)")
_DECIMALS = re.compile(r"(\d+)\.(\d{2})\d*")
_BLANKS = re.compile(r"\s*([A-Za-z])\s*")
_NO_TURN = re.compile(r"rotate\(-?0 [^)]*\)")
_HATCHED = re.compile(r"fill:\s*url\(#([\w.-]+)\)")
_OPACITY = re.compile(r"fill-opacity:\s*([\d.]+);?")
_SHARED = ("clip-path", "fill", "stroke", "stroke-width", "stroke-linejoin", "font-size", "text-anchor", "class")

Shape = tuple[str, dict[str, str], str]  # tag, attributes, what is inside


def inline(draw: Callable[[], Any], label: str, salt: str) -> Markup:
    """What `draw` returns, a figure or a list of its axes, as an element; `label` is for those who cannot see it."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise AlignmentError("A report's pictures need matplotlib: pip install 'alignattn[plot]'") from error
    text = io.StringIO()
    with mpl.rc_context(PLAIN), warnings.catch_warnings():
        # Of a character that matplotlib's font lacks, and the page's may have, or a title that leaves no room.
        warnings.simplefilter("ignore", UserWarning)
        figure_of(draw()).savefig(text, format="svg", metadata={"Date": None})
    return adapted(text.getvalue(), label, salt)


def figure_of(drawn: Any) -> "Figure":
    """The figure, or that of the axes."""
    from matplotlib.figure import Figure

    if isinstance(drawn, list | tuple):
        drawn = drawn[0]
    while not isinstance(drawn, Figure):  # a subfigure belongs to another
        drawn = drawn.figure
    return drawn


def adapted(document: str, label: str, salt: str) -> Markup:
    """The text of an SVG document as an element for a page."""
    root = ET.fromstring(document)
    _thin_hatches(root)
    used = {name for node in root.iter() for value in node.attrib.values() for name in _REFERENCE.findall(value)}
    declared = [node.get("id") for node in root.iter() if node.get("id") in used]
    names = {name: f"{salt}-{number}" for number, name in enumerate(dict.fromkeys(declared), 1) if name}
    children = Markup(_written([shape for child in root for shape in _shapes(child, names)]))
    width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    return element(
        "svg",
        children,
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width * POINT:.0f}",
        height=f"{height * POINT:.0f}",
        role="img",
        aria_label=label,
        stroke_linejoin="round",
        stroke_linecap="butt",
        fill="currentColor",  # text without a colour of its own
    )


def _shapes(node: ET.Element, names: dict[str, str]) -> list[Shape]:
    """The element; of a group that says nothing, what is in it; nothing, of what a page has no use for."""
    tag = _local(node.tag)
    if tag in _DROPPED:
        return []
    inside = [shape for child in node for shape in _shapes(child, names)]
    attributes = _attributes(node, names)
    if tag in ("g", "defs") and not (inside and (attributes or tag == "defs")):
        return inside
    text = escaped((node.text or "").strip("\n")) if tag in ("text", "tspan") else ""
    return [(tag, attributes, text + _written(inside))]


def _written(shapes: list[Shape]) -> str:
    """The elements; what several in a row have in common is said once."""
    parts = []
    for common, alike in itertools.groupby(shapes, key=_shareable):
        run = list(alike)
        shared = common if len(run) > 2 else {}
        inside = "".join(_tag(tag, {n: v for n, v in own.items() if n not in shared}, text) for tag, own, text in run)
        parts.append(_tag("g", shared, inside) if shared else inside)
    return "".join(parts)


def _shareable(shape: Shape) -> dict[str, str]:
    attributes = shape[1]
    if "transform" in attributes:
        return {}  # an area that clips is meant in the coordinates of the element that names it
    return {name: attributes[name] for name in _SHARED if name in attributes}


def _tag(tag: str, attributes: dict[str, str], inside: str) -> str:
    if tag == "g" and not attributes:
        return inside
    written = "".join(f' {name}="{escaped(value)}"' for name, value in attributes.items())
    return f"<{tag}{written}>{inside}</{tag}>" if inside else f"<{tag}{written}/>"


def _attributes(node: ET.Element, names: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in node.attrib.items():
        name = _local(name)
        if name == "style":
            found |= _declarations(value)
        elif name == "d":
            found["d"] = _BLANKS.sub(r"\1", _rounded(value)).strip()
        elif name == "transform" and _NO_TURN.fullmatch(value.strip()):
            continue
        elif name != "id":
            found[name] = _rounded(value)
        elif value in names:
            found["id"] = names[value]
    renamed = {name: _REFERENCE.sub(lambda m: f"#{names.get(m[1], m[1])}", value) for name, value in found.items()}
    return _coloured(renamed)


def _thin_hatches(root: ET.Element) -> None:
    """Where a hatched area is pale, its ground is to be so and its lines not: matplotlib pales both."""
    pale: dict[str, str] = {}
    for node in root.iter():
        style = node.get("style", "")
        if (hatch := _HATCHED.search(style)) and (opacity := _OPACITY.search(style)):
            pale[hatch[1]] = opacity[1]
            node.set("style", _OPACITY.sub("", style))
    for node in root.iter():
        if _local(node.tag) == "pattern" and node.get("id") in pale:
            for ground in node:
                if _local(ground.tag) == "rect":
                    ground.set("fill-opacity", pale[node.attrib["id"]])


def _declarations(style: str) -> dict[str, str]:
    """A style attribute as presentation attributes; `font` has none and becomes those of its parts."""
    found: dict[str, str] = {}
    for declaration in style.split(";"):
        name, colon, value = (part.strip() for part in declaration.partition(":"))
        if not colon:
            continue
        if name == "font":
            parts = _FONT.fullmatch(value)
            found |= {f"font-{k}": v for k, v in (parts.groupdict() if parts else {}).items() if v}
        elif name != "font-family":
            found[name] = value
    return found


def _rounded(value: str) -> str:
    """Lengths to a hundredth of a point, which is below what any screen shows."""
    return _DECIMALS.sub(lambda m: f"{m[1]}.{m[2]}".rstrip("0").rstrip("."), value)


def _coloured(attributes: dict[str, str]) -> dict[str, str]:
    classes = []
    for name in ("fill", "stroke"):
        colour = attributes.get(name, "").lower()
        if colour in INK:
            attributes[name] = "currentColor"
        elif colour in PAPER | SHADE:
            del attributes[name]
            classes.append(f"{'paper' if colour in PAPER else 'shade'}-{name}")
    return attributes | ({"class": " ".join(classes)} if classes else {})


def _local(name: str) -> str:
    """Without its namespace: HTML knows the elements of SVG, and `href` does for `xlink:href`."""
    return name.rpartition("}")[2]
