"""What the page says is what the files say."""

import base64
import hashlib
import html.parser
import json
import re
from xml.etree import ElementTree as ET

import pytest
from made_results import diagnosis, result

from alignattn import cli
from alignattn.errors import AlignmentWarning, DataError
from alignattn.experiments.compare import compare
from alignattn.experiments.frontier import of_several_weights
from alignattn.experiments.tables import as_json, differences, summary
from alignattn.report.build import report
from alignattn.report.comparison import representative
from alignattn.results import read_all, write

pytest.importorskip("matplotlib", reason="pip install 'alignattn[plot]'")


class Tables(html.parser.HTMLParser):
    """The text of every cell of every table, by caption."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._caption = self._into = ""
        self._hidden = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            self._into = "cell"
        elif tag == "caption":
            self._into = "caption"
        elif tag == "span":
            self._hidden = ("aria-hidden", "true") in attrs

    def handle_endtag(self, tag):
        if tag == "table":
            self.found[self._caption] = self._rows
        if tag in ("th", "td", "caption"):
            self._into = ""
        if tag == "span":
            self._hidden = False

    def handle_data(self, data):
        if self._into == "caption":
            self._caption += data
        elif self._into == "cell" and not self._hidden:
            self._rows[-1][-1] += data


def test_the_tables_are_those_that_compare_prints(runs, page):
    with pytest.warns(AlignmentWarning, match="unknown fields"):  # the diagnoses, which compare does not know
        (comparison,) = compare(read_all([runs]))
    found = Tables(page).found
    assert found["tiny: mean ± deviation over seeds"] == summary(comparison)
    assert found["tiny: differences to soft attention"] == differences(comparison)


def test_every_run_has_a_line_with_its_file_and_a_failed_one_its_reason(page):
    head, *rows = Tables(page).found["tiny: every run"]
    assert [row[-1] for row in rows] == [
        *(f"soft-{s}.json" for s in range(3)),
        *(f"ot-{s}.json" for s in range(3)),
        "ct-0.json",
        *(f"mmd-{s}.json" for s in range(3)),
    ]
    for row in rows[:6]:
        method, seed = row[-1].removesuffix(".json").split("-")
        assert row[head.index("accuracy %")] == f"{result(method, int(seed)).metrics['accuracy']:.2f}"
    (failed,) = [row for row in rows if row[-1] == "ct-0.json"]
    assert failed[head.index("state")] == "failed: OutOfMemory: no room" and failed[head.index("accuracy %")] == "–"
    assert "1 run failed:" in page and "10 runs, 1 of them failed, 2 diagnoses." in page


def test_what_was_run_is_told(page):
    for text in (
        "alignattn run tiny --seeds 3",
        "torch 2.9.0",
        "0123456789abcdef",
        "processor a processor",
        "2026-01-02T03:04:00+00:00 to 2026-01-02T03:04:02+00:00",
        "train.steps",
        "alignattn diagnose MODEL",
        "fedcba",
    ):
        assert text in page, text


def test_every_head_of_a_diagnosis_is_told(page):
    found = Tables(page).found
    for name in ("before", "after"):
        head, *rows = found[f"{name}: every head"]
        heads = diagnosis(name)["heads"]
        assert [row[:2] for row in rows] == [[h["layer"], str(h["head"])] for h in heads]
        assert [row[head.index("MMD²")] for row in rows] == [f"{h['mmd']:.4f}" for h in heads]
        assert {row[head.index("noise, 95 %")] for row in rows} == {"−0.0020 to 0.0030"}


def test_two_diagnoses_are_compared_head_by_head(tmp_path):
    """after - before, 0.4 - 0.1 and so on, ± 1.96 √(0.01² + 0.01²) = 0.0277."""
    mmds = {"before": [0.1, 0.5, 0.2, 0.3], "after": [0.4, 0.1, 0.21, "NaN"]}
    paths = []
    for name, values in mmds.items():
        heads = [head | {"mmd": mmd} for head, mmd in zip(diagnosis()["heads"], values, strict=False)]
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(diagnosis(name, heads=heads)))
    page = report(paths)
    head, *rows = Tables(page).found["Diagnoses: every head beside each other"]
    names = ["MMD², before", "MMD², after", "change", "95 %", "verdict", "AUC, before", "AUC, after"]
    assert head == ["layer", "head", *names]
    assert [row[2:7] for row in rows] == [
        ["0.1000", "0.4000", "0.3000", "0.2723 to 0.3277", "farther"],
        ["0.5000", "0.1000", "−0.4000", "−0.4277 to −0.3723", "closer"],
        ["0.2000", "0.2100", "0.0100", "−0.0177 to 0.0377", "cannot tell"],
        ["0.3000", "–", "–", "–", "cannot tell"],
    ]
    assert "closer in 1 of 4 heads and farther apart in 1" in page
    assert "A change is that from before to after" in page


@pytest.mark.parametrize("count", [2, 3])
def test_diagnoses_of_other_layers_or_more_than_two_stand_beside_each_other_without_a_verdict(count, tmp_path):
    for number in range(count):
        heads = [one | {"layer": f"layer.{number}"} for one in diagnosis()["heads"][:2]] if number < 2 else None
        found = diagnosis(f"d{number}") | ({"heads": heads} if heads else {})
        (tmp_path / f"{number}.json").write_text(json.dumps(found))
    head, first, *rows = Tables(report([tmp_path])).found["Diagnoses: every head beside each other"]
    titles = [f"{measure}, d{number}" for measure in ("MMD²", "AUC") for number in range(count)]
    assert head == ["layer", "head", *titles]
    assert first[2] == f"{diagnosis()['heads'][0]['mmd']:.4f}" and first[3] == "–"
    assert len(rows) + 1 == 4 + (12 if count == 3 else 0)


def _fills(group, inside):
    """The colour of an element, its own or its group's."""
    return [one.get("fill") for one in (group, inside)]


def test_heads_within_noise_are_marked_in_the_table_and_on_the_map(tmp_path):
    mmds = [0.5, 0.003, -0.002, -0.1, "NaN"]  # the noise: -0.002 to 0.003
    heads = [
        head | {"mmd": mmd, "layer": "a", "head": i}
        for i, (head, mmd) in enumerate(zip(diagnosis()["heads"], mmds, strict=False))
    ]
    (tmp_path / "d.json").write_text(json.dumps(diagnosis("d", heads=heads)))
    page = report([tmp_path])
    head, *rows = Tables(page).found["d: every head"]
    assert [row[head.index("against noise")] for row in rows] == ["beyond", "within", "within", "below", "–"]
    (picture,) = re.findall(r'<svg [^>]*aria-label="MMD² of d .*?</svg>', page)
    dots = [use for group in ET.fromstring(picture).iter() for use in group if "#010101" in _fills(group, use)]
    assert [use.tag for use in dots if use.tag == "use"] == ["use"] * 3  # two heads, and the legend
    assert ">within noise</text>" in picture


def test_equal_files_give_equal_bytes_wherever_they_lie(runs, page, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in sorted(runs.iterdir(), reverse=True):
        (moved / file.name).write_bytes(file.read_bytes())
    assert report([moved]) == page


@pytest.mark.parametrize("seeds", [1, 3])  # of one there is no deviation, and no test
def test_a_comparison_in_json_gives_the_same_tables(seeds, tmp_path):
    comparisons = compare([result(m, s) for m in ("soft", "ot", "mmd") for s in range(seeds)])
    (tmp_path / "compared.json").write_text(as_json(comparisons))
    found = Tables(report([tmp_path / "compared.json"])).found
    assert found["tiny: mean ± deviation over seeds"] == summary(comparisons[0])
    assert found["tiny: differences to soft attention"] == differences(comparisons[0])


def test_the_policy_names_the_one_style_and_the_one_script(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"<[^>]* (?:style|on\w+)=", page)
    assert not re.search(r' (?:src|href|action)="(?!#|data:)', page), "something outside of the page"


def test_every_figure_has_a_name_and_a_caption(page):
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) == 4 + 1 + 2  # frontier, reliability, map and curves; both diagnoses, and each
    assert all(re.search(r"<figcaption>[^<]{20,}</figcaption>", figure) for figure in figures)
    drawn = re.findall(r"<svg [^>]*>", page)
    assert len(drawn) == 1 + 3 + 3 + 2 + 2 + 2
    assert all('role="img"' in one and re.search(r'aria-label="[^"]+"', one) for one in drawn)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_malformed_details_cost_a_picture_and_no_table(tmp_path):
    write(result("soft", 0, details={"reliability": "none", "mmd": [1], "curve": {"a": 1}}), tmp_path / "a.json")
    page = report([tmp_path])
    assert Tables(page).found["tiny: mean ± deviation over seeds"][1][0] == "soft"
    assert page.count("cannot be drawn") == 3


def test_of_many_kinds_each_method_shows_the_one_with_most_seeds():
    many = [result("soft", s) for s in range(3)]
    for weight, seeds in ((0.1, 2), (0.2, 3), (0.3, 1), (0.4, 3), (0.5, 1), (0.6, 1)):
        many += [result("ot", s, weight=weight, alignment={"method": "ot", "weight": weight}) for s in range(seeds)]
    (comparison,) = compare(many)
    kinds = [(row, [result()] * len(row.seeds)) for row in comparison.rows]
    assert [row.label for row, _ in representative(kinds)] == ["soft", "ot 0.2"]
    assert len(representative(kinds[:6])) == 6


def test_the_command_writes_a_page(runs, tmp_path, capsys):
    out = tmp_path / "deep" / "page.html"
    assert cli.main(["report", str(runs), "--out", str(out), "--title", "Mine & <yours>"]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    assert "<h1>Mine &amp; &lt;yours&gt;</h1>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", None, r"nothing to report in .*empty: no result file, comparison or diagnosis"),
        ("none.json", None, r"There is no file or folder .*none\.json"),
        ("broken.json", "{", r"broken\.json cannot be reported: it is no JSON \(line 1"),
        ("binary.json", b"\xff\xfe\x00", r"binary\.json cannot be reported: it is no text\."),
        ("other.json", '{"a": 1}', r"it is neither a result file, nor a comparison, nor a diagnosis\."),
        ("deep.json", "[" * 100_000, r"it is nested too deeply"),
        ("newer.json", json.dumps({"schema": 9}), r"its schema is 9 and this alignattn reads up to 1"),
        ("newer-d.json", json.dumps(diagnosis(schema=2)), r"its schema is 2 and this alignattn reads up to 1: install"),
        ("no-d.json", json.dumps(diagnosis(schema="x")), r"its schema is 'x', which is no version"),
        ("heads.json", json.dumps(diagnosis(heads=[])), r"it has no heads"),
        ("lacks.json", json.dumps({"kind": "diagnosis", "schema": 1, "name": "x"}), r"it lacks 'heads'"),
        ("words.json", json.dumps(diagnosis(words=[1])), r"it has 1 among its words"),
        ("text.json", json.dumps(diagnosis(heads=[diagnosis()["heads"][0] | {"mmd": "far"}])), r"'far' for 'mmd'"),
        (
            "cells.json",
            json.dumps([{"name": "a", "metrics": ["accuracy"], "rows": [{}]}]),
            r"that cannot be read",
        ),
        ("metric.json", json.dumps([{"name": "a", "metrics": ["speed"], "rows": []}]), r"Unknown metric 'speed'"),
    ],
)
def test_what_cannot_be_reported_is_told_in_a_sentence(name, content, message, tmp_path):
    path = tmp_path / name
    if name == "empty":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        report([path])


def test_in_a_folder_what_cannot_be_read_is_left_out_and_named(runs):
    (runs / "broken.json").write_text("{")
    (runs / "config.json").write_text('{"hidden_size": 32}')  # of somebody else
    with pytest.warns(AlignmentWarning, match=r"Left out of the report: .*broken\.json: it is no JSON"):
        page = report([runs])
    assert [row[0] for row in Tables(page).found["Files that could not be read"][1:]] == ["broken.json"]
    assert "config.json" not in page


def test_a_folder_is_no_place_to_write_to(runs, capsys):
    assert cli.main(["report", str(runs), "--out", str(runs)]) == 1
    assert "is a folder. Name a file" in capsys.readouterr().err


def test_numbers_that_are_none_are_told_as_missing(tmp_path):
    strange = {"mmd": "NaN", "auc": "NaN", "noise": ["NaN", "NaN"], "entropy": "Infinity"}
    first, second, *_ = diagnosis()["heads"]
    (tmp_path / "d.json").write_text(json.dumps(diagnosis("d", heads=[first | strange, second])))
    head, first, _ = Tables(report([tmp_path])).found["d: every head"]
    told = dict(zip(head, first, strict=True))
    assert (told["MMD²"], told["AUC"], told["noise, 95 %"], told["entropy"]) == ("–", "–", "–", "∞")


def test_where_no_head_could_be_measured_there_is_no_map(tmp_path):
    heads = [head | {"mmd": "NaN", "noise": ["NaN", "NaN"]} for head in diagnosis()["heads"]]
    (tmp_path / "d.json").write_text(json.dumps(diagnosis("d", heads=heads)))
    page = report([tmp_path])
    assert "<svg" not in page and len(Tables(page).found["d: every head"]) == 13


def test_a_frontier_of_many_kinds_leaves_out_those_of_one_weight():
    def aligned(weight, **options):
        return [
            result("ot", s, weight=weight, alignment={"method": "ot", "weight": weight, **options}) for s in range(2)
        ]

    soft = [result("soft", s) for s in range(2)]
    curve = aligned(0.1) + aligned(0.2)
    (few,) = compare(soft + curve + aligned(0.1, epsilon=0.5))
    assert of_several_weights(few) is few
    singles = [run for i in range(9) for run in aligned(0.1, epsilon=0.2 + 0.1 * i)]
    (many,) = compare(soft + curve + singles)
    assert len(many.rows) == 12
    assert [row.label for row in of_several_weights(many).rows] == ["soft", "ot 0.1", "ot 0.2"]
    (alone,) = compare(soft + singles)
    assert of_several_weights(alone) is alone
