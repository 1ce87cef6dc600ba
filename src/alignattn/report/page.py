"""The page: sections, a table of contents, one style and one script, and a policy under which nothing else can run.

The policy names the style and the script by their SHA-256. Markup that slipped in with data would find every other
script, style attribute, request and form refused by the browser. Equal sections give equal bytes.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from alignattn import __version__
from alignattn.report.blocks import Section
from alignattn.report.html import Markup, element

HERE = Path(__file__).parent


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """A whole file."""
    style, script = (_inlined(name) for name in ("style.css", "page.js"))
    named = {f"section-{number}": section for number, section in enumerate(sections, 1)}
    head = element(
        "head",
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"alignattn {__version__}"),
        element("link", rel="icon", href="data:,"),  # else a browser may ask a server for one
        element("title", title),
        element("style", style),
    )
    body = element(
        "body",
        element("a", "To the content", href="#content", class_="skip"),
        element("header", element("h1", title), element("p", lead, class_="lead")),
        _contents(named) if len(named) > 1 else None,
        element("main", *(section.html(name) for name, section in named.items()), id="content"),
        element("footer", element("p", f"Written by alignattn {__version__}, from result files alone.")),
        element("script", script),
    )
    return "\n".join(["<!DOCTYPE html>", element("html", head, "\n", body, lang="en"), ""])


def _contents(named: dict[str, Section]) -> Markup:
    links = (element("li", element("a", section.title, href=f"#{name}")) for name, section in named.items())
    return element("nav", element("h2", "Contents"), element("ol", *links), aria_label="Contents")


def _inlined(name: str) -> Markup:
    """A file of this package as the text of a style or script element."""
    text = (HERE / name).read_text(encoding="utf-8")
    assert "</" not in text, f"{name} would end its own element"
    return Markup(text)


def _policy(style: str, script: str) -> str:
    allowed = {"style-src": _digest(style), "script-src": _digest(script), "img-src": "data:"}
    refused = ("default-src", "base-uri", "form-action")
    return "; ".join([*(f"{name} 'none'" for name in refused), *(f"{n} {source}" for n, source in allowed.items())])


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
