"""Figures inside a page: what matplotlib wrote, without what the page's policy refuses."""

import re
import warnings

import pytest

from alignattn.report import svg

mpl = pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

from matplotlib.figure import Figure  # noqa: E402


def drawn(title: str = "a title") -> Figure:
    figure = Figure(figsize=(3, 2))
    axis = figure.subplots()
    axis.plot([1, 2, 3], [1, 4, 2], color="#0072B2", label=title)
    axis.bar([1, 2], [1, 3], hatch="//", facecolor=("#E69F00", 0.3), edgecolor="#E69F00")
    axis.set_title(title)
    return figure


def test_nothing_is_left_that_the_policy_refuses():
    text = svg.inline(drawn, "label", "s")
    assert "style" not in text and "<metadata" not in text and "http" not in text and "font-family" not in text
    assert text.startswith("<svg ") and text.endswith("</svg>")


def test_every_reference_is_within_the_picture_and_no_two_pictures_share_a_name():
    first, second = svg.inline(drawn, "a", "one"), svg.inline(drawn, "b", "two")
    names = []
    for text in (first, second):
        own = re.findall(r' id="([^"]+)"', text)
        used = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
        assert used and used == set(own) and len(own) == len(set(own))
        names += own
    assert len(names) == len(set(names))


def test_equal_figures_give_equal_bytes():
    assert svg.inline(drawn, "a", "s") == svg.inline(drawn, "a", "s")


@pytest.mark.parametrize("title", ["<script>alert(1)</script>", "a & b", "cost $x$ and $\\frac$", "数学 ∂"])
def test_a_title_is_its_own_text(title):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = svg.inline(lambda: drawn(title), title, "s")
    shown = title.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f">{shown}</text>" in text
    assert f'aria-label="{shown}"' in text and 'role="img"' in text


def test_ink_follows_the_text_and_paper_the_background():
    text = svg.inline(drawn, "a", "s")
    assert "#000000" not in text and "#ffffff" not in text
    assert "currentColor" in text and "paper-fill" in text and "#0072b2" in text


def test_what_lies_behind_is_shaded_by_the_scheme_and_data_keep_their_colours():
    def both() -> Figure:
        figure = Figure()
        axis = figure.subplots()
        axis.plot([1, 2], [1, 2], color="#DDDDDD")
        axis.text(1, 1, "in a cell", color="#010101", bbox={"facecolor": "#fff5eb"})
        return figure

    text = svg.inline(both, "a", "s")
    assert "shade-stroke" in text and "#dddddd" not in text
    assert "#010101" in text and "#fff5eb" in text


def test_lengths_are_those_of_the_figure():
    text = svg.inline(drawn, "a", "s")  # 3 × 2 inches of 72 points, or of 96 pixels
    assert 'viewBox="0 0 216 144" width="288" height="192"' in text


def test_what_several_elements_share_is_said_once_and_nothing_is_lost():
    shapes = [("path", {"d": f"M{i} 0", "fill": "red", "class": "x"}, "") for i in range(3)]
    assert svg._written(shapes) == '<g fill="red" class="x"><path d="M0 0"/><path d="M1 0"/><path d="M2 0"/></g>'
    assert svg._written(shapes[:2]) == "".join(f'<path d="M{i} 0" fill="red" class="x"/>' for i in range(2))
    turned = [("path", {"clip-path": "url(#a)", "transform": "scale(2)"}, "")] * 3
    assert svg._written(turned) == '<path clip-path="url(#a)" transform="scale(2)"/>' * 3


def test_a_list_of_axes_stands_for_its_figure():
    figure = drawn()
    assert svg.figure_of(figure) is figure
    assert svg.figure_of(list(figure.axes)) is figure
    outer = Figure()
    inner = outer.subfigures(1, 2)[0]
    assert svg.figure_of([inner.subplots()]) is outer


def test_a_pale_hatched_area_keeps_strong_lines():
    text = svg.inline(drawn, "a", "s")
    (pattern,) = re.findall(r"<pattern.*?</pattern>", text)
    assert re.search(r'<rect[^>]*fill-opacity="0.3"', pattern)
    assert re.search(r'fill="url\(#[^"]*"', text) and not re.search(r'fill="url\([^>]*fill-opacity', text)
