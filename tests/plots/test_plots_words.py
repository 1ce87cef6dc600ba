"""Any text can be drawn: characters that the font lacks, widths, and where it is cut."""

import warnings

import pytest

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager, get_font

from alignattn.plots import words


@pytest.fixture(autouse=True)
def _fonts_anew():
    words._font_for.cache_clear()
    yield
    words._font_for.cache_clear()


def drawn_width(text: str, size: float) -> float:
    """In inches, as it is rendered."""
    figure = Figure(dpi=400)
    artist = figure.text(0, 0, text, fontsize=size, **words.plain(text))
    return artist.get_window_extent(FigureCanvasAgg(figure).get_renderer()).width / 400


@pytest.mark.parametrize("text", ["film", "WWWWWW", "iiiiii", "$x$", "a_b", "Ġthe", "▁film", "↵"])
def test_the_measured_width_is_the_drawn_one(text):
    assert words.width_of([text, ""], 7) == pytest.approx(drawn_width(text, 7), rel=0.05, abs=0.01)


def test_characters_that_no_font_has_are_squares_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = words.legible("ab\U0010fffdc")
        assert shown == "ab□c"
        drawn_width(shown, 8)


def test_an_installed_font_is_used_for_what_the_default_lacks(monkeypatch):
    lacking = next(e for e in fontManager.ttflist if e.name == "STIXGeneral" and e.style == "normal")
    have, miss = set(get_font(lacking.fname).get_charmap()), set(get_font(findfont(FontProperties())).get_charmap())
    character = chr(min(code for code in have - miss if chr(code).isprintable() and not chr(code).isspace()))
    monkeypatch.setattr(fontManager, "ttflist", [lacking, FontEntry(fname="gone.ttf", name="Gone")])
    assert words.legible(character) == character
    assert words.plain(character)["fontfamily"][-1] == "STIXGeneral"
    assert words.plain("a")["fontfamily"] == FontProperties().get_family()


def test_joiners_and_marks_of_direction_are_left_out_and_ends_of_lines_seen():
    assert words.legible("a\u200db\u202ec\ufe0f") == "abc"
    assert words.legible("a\nb\tc") == "a↵b⇥c"
    assert words.token_of("\n") == "↵" and words.token_of("  ") == "␣␣" and words.token_of("") == ""


@pytest.mark.parametrize("inches", [0.3, 1.0, 2.1])
@pytest.mark.parametrize("text", ["the quick brown fox", "M" * 400, "a " * 300, "W" * 30 + " b"])
def test_every_line_of_a_title_fits_and_a_cut_is_seen(text, inches):
    lines = words.title_of(text, inches).split("\n")
    assert len(lines) <= 3
    assert all(words.width_of([line], 10) <= inches for line in lines)
    whole = "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert whole != lines[-1].endswith("…")


def test_a_title_breaks_between_words():
    inches = words.width_of(["quick brown"], 10) + 0.01
    assert words.title_of("the quick  brown\nfox", inches) == "the quick\nbrown↵fox"
    assert words.title_of("", 2.0) == " "
