"""The page in a real browser: quiet, whole at two widths and in both schemes, sorted by hand, and deaf to its data."""

import itertools
import json

import pytest
from made_results import diagnosis, fill, result

from alignattn.errors import AlignmentWarning
from alignattn.report.blocks import Section, Table
from alignattn.report.build import report
from alignattn.report.page import page as written
from alignattn.results import write

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")

PHONE, DESK = 390, 1280
VIEWS = list(itertools.product((PHONE, DESK), (False, True)))
UNFOLD = "document.querySelectorAll('details').forEach(details => details.open = true)"

# Relative luminance and contrast as WCAG 2 defines them, of every text that can be seen.
CONTRAST = """
(() => {
  const rgba = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = rgba(getComputedStyle(one).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const under = (text, ground) => {  // the shapes of a drawing that lie below a text, one over another
    text.scrollIntoView({ block: "center", inline: "center" });
    const box = text.getBoundingClientRect();
    const stack = document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    for (const shape of stack.reverse().filter((one) => one instanceof SVGGeometryElement)) {
      const style = getComputedStyle(shape), share = Number(style.fillOpacity);
      if (style.fill.startsWith("rgb")) ground = rgba(style.fill).map((c, i) => share * c + (1 - share) * ground[i]);
    }
    return ground;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || element.closest("script, style") || !element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element), inside = element.closest("svg");
    const ground = inside ? under(element, behind(inside)) : behind(element);
    const [a, b] = [luminance(rgba(inside ? style.fill : style.color)), luminance(ground)];
    found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), text.slice(0, 40)]);
  }
  return found;
})()
"""

FIGURES = """
Array.from(document.querySelectorAll("svg"), (svg) => {
  const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
  const uses = Array.from(svg.querySelectorAll("use"), (use) => use.getAttribute("href").slice(1));
  const urls = Array.from(svg.querySelectorAll("[clip-path], [fill^=url]"), (one) =>
    (one.getAttribute("clip-path") ?? one.getAttribute("fill")).match(/#([^)]+)/)[1]);
  return { width: box.width, height: box.height, drawn: drawn.width * drawn.height, seen: svg.checkVisibility(),
           lost: [...uses, ...urls].filter((name) => !svg.querySelector("#" + CSS.escape(name))) };
})
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(report([fill(folder / "runs")]), encoding="utf-8")
    return folder / "page.html"


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_it_opens_without_a_word_and_asks_for_nothing(browser, path, width, dark):
    tab = browser.open(path, width=width, dark=dark)
    tab.evaluate(UNFOLD)
    assert tab.complaints() == []
    assert tab.requests() == [path.as_uri()]


def test_the_browser_would_tell_of_a_complaint(browser, tmp_path):
    """What the test above listens for is heard: an exception, a message, a refused style and script, a request."""
    (tmp_path / "loud.html").write_text(
        "<meta http-equiv=Content-Security-Policy content=\"script-src 'nonce-a'; style-src 'none'\">"
        "<p style='color: red'>x</p><script>alert(1)</script><img src='http://127.0.0.1:9/x.png'>"
        "<script nonce=a>console.log('hello'); throw new Error('thrown')</script>"
    )
    tab = browser.open(tmp_path / "loud.html")
    told = " ".join(tab.complaints())
    for sign in ("exception:", "hello", "inline style", "inline script"):
        assert sign in told, sign
    assert "http://127.0.0.1:9/x.png" in tab.requests()


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_every_figure_is_seen(browser, path, width, dark):
    tab = browser.open(path, width=width, dark=dark)
    figures = tab.evaluate(FIGURES)
    assert len(figures) == path.read_text(encoding="utf-8").count("<svg ") > 10
    for figure in figures:
        assert figure["seen"] and figure["width"] > 200 and figure["height"] > 100 and figure["drawn"] > 0
        assert figure["lost"] == []
    captions = tab.evaluate(
        "Array.from(document.querySelectorAll('figcaption'), c => c.getBoundingClientRect().height)"
    )
    assert len(captions) == tab.evaluate("document.querySelectorAll('figure').length") and min(captions) > 0


@pytest.mark.parametrize("width", [320, PHONE, 768, DESK])
def test_the_page_never_scrolls_sideways(browser, path, width):
    tab = browser.open(path, width=width)
    tab.evaluate(UNFOLD)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = tab.evaluate("Array.from(document.querySelectorAll('.table'), t => t.scrollWidth > t.clientWidth)")
    assert width > PHONE or any(wide), "no table was wide enough to tell"


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_all_text_stands_out(browser, path, width, dark):
    tab = browser.open(path, width=width, dark=dark)
    tab.evaluate(UNFOLD)
    found = tab.evaluate(CONTRAST)
    assert len(found) > 300
    assert min(found)[0] >= 4.5, min(found)


def test_the_schemes_differ_and_paper_is_light(browser, path):
    background = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('svg text')).fill"
    light, dark = (browser.open(path, dark=dark) for dark in (False, True))
    assert light.evaluate(background) == "rgb(251, 251, 249)" and dark.evaluate(background) == "rgb(19, 21, 24)"
    assert light.evaluate(ink) != dark.evaluate(ink)
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    dark.call("Emulation.setEmulatedMedia", media="print", features=[scheme])
    assert dark.evaluate(background) == "rgb(255, 255, 255)" and dark.evaluate(ink) == "rgb(0, 0, 0)"


def test_it_prints_with_what_was_run_unfolded(browser, path):
    tab = browser.open(path, dark=True)
    tab.evaluate(
        "addEventListener('beforeprint', () => window.open_then = document.querySelectorAll('details[open]').length)"
    )
    assert tab.evaluate("document.querySelectorAll('details[open]').length") == 0
    printed = tab.pdf()
    assert printed.startswith(b"%PDF") and printed.count(b"/Type /Page\n") > 1
    assert tab.evaluate("window.open_then") == tab.evaluate("document.querySelectorAll('details.paper').length") > 0
    assert tab.evaluate("document.querySelectorAll('details[open]').length") == 0
    assert tab.complaints() == []


# Sorting


ROWS = [
    ["gan 0.1", "77.2 ± 0.3 ▲", "−1.5 to +2.0", "< 0.001", "b"],
    ["gan 0.01", "–", "−10.0 to −2.0", "0.5", "a"],
    ["soft", "9.85 ± 1.0", "–", "0.001", "–"],
    ["ct 2", "−3.1", "+0.5 to +0.7", "–", "C"],
    ["ct 10", "100.0 ± 9.9 ▼", "+0.25 to +0.7", "0.0004", "d"],
]
# By column, the names in rising and in falling order; what is missing is last in both.
ORDERS = {
    0: (["ct 2", "ct 10", "gan 0.01", "gan 0.1", "soft"], ["soft", "gan 0.1", "gan 0.01", "ct 10", "ct 2"]),
    1: (["ct 2", "soft", "gan 0.1", "ct 10", "gan 0.01"], ["ct 10", "gan 0.1", "soft", "ct 2", "gan 0.01"]),
    2: (["gan 0.01", "gan 0.1", "ct 10", "ct 2", "soft"], ["ct 2", "ct 10", "gan 0.1", "gan 0.01", "soft"]),
    3: (["ct 10", "gan 0.1", "soft", "gan 0.01", "ct 2"], ["gan 0.01", "soft", "gan 0.1", "ct 10", "ct 2"]),
    4: (["gan 0.01", "gan 0.1", "ct 2", "ct 10", "soft"], ["ct 10", "ct 2", "gan 0.1", "gan 0.01", "soft"]),
}
NAMES = "Array.from(document.querySelectorAll('tbody th'), cell => cell.textContent)"
SORTED = "Array.from(document.querySelectorAll('thead th'), head => head.getAttribute('aria-sort'))"


@pytest.fixture
def table(tmp_path):
    found = tmp_path / "table.html"
    block = Table("rows", ["attention", "accuracy", "interval", "p", "word"], ROWS)
    found.write_text(written("Sorting", "", [Section("A table", [block])]), encoding="utf-8")
    return found


@pytest.mark.parametrize("column", ORDERS)
def test_a_click_sorts_and_another_reverses(browser, table, column):
    tab = browser.open(table, width=PHONE)
    assert tab.evaluate(NAMES) == [row[0] for row in ROWS] and tab.evaluate(SORTED) == [None] * 5
    for order, word in zip(ORDERS[column], ("ascending", "descending"), strict=True):
        x, y = tab.evaluate(
            f"(() => {{ const head = document.querySelectorAll('thead button')[{column}];"
            "head.scrollIntoView({ inline: 'end' }); const box = head.getBoundingClientRect();"
            "return [box.x + box.width - 12, box.y + box.height / 2]; })()"
        )
        tab.click(x, y)
        assert tab.evaluate(NAMES) == order
        assert tab.evaluate(SORTED) == [word if i == column else None for i in range(5)]
    assert tab.complaints() == []


def test_the_keyboard_sorts_too(browser, table):
    tab = browser.open(table)
    for _ in range(5):  # to the content, the region of the table, and three heads
        tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "interval"
    tab.press("Enter", "\r")
    assert tab.evaluate(NAMES) == ORDERS[2][0]
    tab.press(" ", " ")
    assert tab.evaluate(NAMES) == ORDERS[2][1]


def test_rows_move_whole(browser, table):
    tab = browser.open(table)
    tab.evaluate("document.querySelectorAll('thead button')[1].click()")
    rows = tab.evaluate(
        "Array.from(document.querySelectorAll('tbody tr'), row => Array.from(row.cells, cell => "
        "Array.from(cell.childNodes).filter(n => !n.ariaHidden).map(n => n.textContent).join('')))"
    )
    assert sorted(rows) == sorted(ROWS)


def test_the_heads_stay_in_sight(browser, tmp_path):
    many = [[f"row {i}", str(i)] for i in range(200)]
    (tmp_path / "long.html").write_text(written("Long", "", [Section("s", [Table("t", ["name", "n"], many)])]))
    tab = browser.open(tmp_path / "long.html")
    tab.evaluate("document.querySelector('.table').scrollTop = 3000")
    head, region = (
        tab.evaluate(f"document.querySelector('{one}').getBoundingClientRect().top") for one in ("thead th", ".table")
    )
    assert abs(head - region) < 3


def test_without_scripts_everything_is_there(browser, path):
    tab = browser.open(path, script=False)
    root = tab.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
    count = {
        name: len(tab.call("DOM.querySelectorAll", nodeId=root, selector=name)["nodeIds"])
        for name in ("svg", "tbody tr", "button", "summary")
    }
    assert count["svg"] > 10 and count["tbody tr"] > 30 and count["summary"] > 5
    assert count["button"] == 0, "a button that does nothing"


# Data that would rather be code

HOSTILE = [
    "<script>window.hacked = 1; alert(1)</script>",
    "<img src=x onerror='window.hacked = 1'>",
    '" onmouseover="window.hacked = 1" autofocus onfocus="window.hacked = 1',
    "</td></tr></table></svg></style></script><svg onload='window.hacked = 1'>",
    "<a href=javascript:window.hacked=1>javascript:alert(1)</a>",
    "<style>body { display: none }</style><link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<meta http-equiv=refresh content='0; url=http://127.0.0.1:9/'>",
    "]]><![CDATA[ --> <!-- $x$ \\frac $$ {{7*7}} ${7*7}",
]


@pytest.mark.parametrize("payload", HOSTILE)
def test_data_are_shown_and_never_run(browser, tmp_path, payload):
    folder = tmp_path / "runs"
    recipe = dict(result().recipe) | {"description": payload, "model": {"name": payload}, "data": {payload: payload}}
    known = {
        "name": payload,
        "recipe": recipe,
        "command": payload,
        "commit": payload,
        "versions": {payload: payload},
        "machine": {payload: payload},
        "inputs": {payload: payload},
        "finished": payload,
    }
    layers = {payload: [0.1, 0.2], "b": [0.3, 0.1]}
    for method, seed in itertools.product(("soft", payload), range(3)):
        details = dict(result(method, seed).details) | {"mmd": layers}
        alignment = None if method == "soft" else {payload: payload}
        changes = known | {"details": details, "alignment": alignment}
        write(result(method, seed, **changes), folder / f"{seed}-{method.replace('/', '')[:60]}.json")
    write(result("ct", 0, **known, metrics={}, details={}, error=payload), folder / "failed.json")
    (folder / f"{payload.replace('/', '')}.json").write_text("{")
    heads = [head | {"layer": payload} for head in diagnosis()["heads"]]
    told = {"name": payload, "words": [payload], "settings": {payload: payload}, "command": payload, "heads": heads}
    for name in ("a", "b"):
        (folder / f"diagnosis-{name}.json").write_text(json.dumps(diagnosis(**told)))
    out = tmp_path / "page.html"
    with pytest.warns(AlignmentWarning, match="Left out of the report"):
        out.write_text(report([folder], title=payload), encoding="utf-8")

    tab = browser.open(out)
    tab.evaluate(UNFOLD)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        for x, y in ((640, 40), (640, 200), (640, 400), (100, 200)):
            tab.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    assert tab.complaints() == [] and tab.requests() == [out.as_uri()]
    assert tab.evaluate("window.hacked") is None
    assert tab.evaluate("document.title") == " ".join(payload.split())
    for selector in ("h1", "h2", "nav a", "tbody th", "td", ".subtitle", "pre code", "dd", "dt", "li", "svg text"):
        shown = tab.evaluate(f"Array.from(document.querySelectorAll('{selector}'), e => e.textContent).join('\\n')")
        assert payload[:24] in shown, selector  # a picture has no room for all of it
    assert payload in tab.evaluate("document.body.innerText.replaceAll('\\u00a0', ' ')")
    names = "Array.from(document.querySelectorAll('svg'), svg => svg.getAttribute('aria-label')).join()"
    assert payload in tab.evaluate(names)
    strangers = "document.querySelectorAll('img, iframe, object, embed, form, base, main a, main script, main style')"
    assert tab.evaluate(f"{strangers}.length") == 0
    assert tab.evaluate("document.querySelectorAll('script').length + document.querySelectorAll('style').length") == 2


def test_what_slips_in_all_the_same_is_refused_by_the_policy(browser, path):
    tab = browser.open(path)
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', \"<img src=x onerror='window.hacked = 1'>"
        "<svg onload='window.hacked = 1'></svg><p id=styled style='color: rgb(1, 2, 3)'>x</p>"
        "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>\");"
        "const script = document.createElement('script'); script.textContent = 'window.hacked = 1';"
        "document.body.append(script)"
    )
    assert len(tab.complaints()) >= 3
    assert tab.evaluate("window.hacked") is None
    assert tab.evaluate("getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"
