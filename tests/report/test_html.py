"""What is text stays text: read back by Python's own parser of HTML."""

import html.parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignattn.report.html import Markup, clean, element, joined

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)",
    "</td></table><svg onload=alert(1)>",
    "javascript:alert(1)",
    "&lt;b&gt; &amp;amp; &#60;",
    "<!-- --><![CDATA[ ]]>",
]


class Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_read_back_as_it_was(text):
    found = read(element("p", text, title=text))
    assert found.tags == [("p", {"title": text})]
    assert found.text == text


@given(st.text())
def test_any_text_is_read_back_as_it_was(text):
    found = read(element("td", text, data_sort=text))
    shown = clean(text)
    assert found.tags == [("td", {"data-sort": shown})]
    assert found.text == shown
    element("td", text).encode("utf-8")  # halves of surrogate pairs would end this


def test_markup_is_not_escaped_twice():
    assert element("p", element("b", "a < b"), " & c") == "<p><b>a &lt; b</b> &amp; c</p>"
    assert isinstance(joined("a", Markup("<br>")), Markup)
    assert joined("<", Markup("<br>"), None) == "&lt;<br>"


def test_attributes_that_are_off_are_left_out():
    assert element("meta", charset="utf-8", hidden=None, open=False) == '<meta charset="utf-8">'
    assert element("details", open=True, class_="paper", aria_label="x") == (
        '<details open class="paper" aria-label="x"></details>'
    )


def test_the_name_of_an_attribute_cannot_carry_markup():
    with pytest.raises(ValueError, match="is no name of an attribute"):
        element("p", **{'x onload="alert(1)"': "1"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\x00b", "a\ufffdb"), ("\ud800", "\ufffd"), ("\x1b[31m", "\ufffd[31m"), ("line\nend\ttab", "line\nend\ttab")],
)
def test_what_no_page_can_show_is_marked(text, shown):
    assert clean(text) == shown
