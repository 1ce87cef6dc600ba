"""Generated pages are what the code says today."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_option_page_is_current():
    import option_table

    assert (ROOT / "docs" / "options.md").read_text() == option_table.page(), "run: make docs"


def test_recipe_page_is_current():
    import recipe_table

    assert (ROOT / "docs" / "recipes.md").read_text() == recipe_table.page(), "run: make docs"


def test_the_page_of_costs_is_what_the_benchmarks_say():
    import performance_page

    assert performance_page.PAGE.read_text() == performance_page.page(), "make tables"


def test_result_tables_are_what_the_result_files_say():
    import result_tables

    for path, text in result_tables.written().items():
        assert path.read_text() == text, "run: make tables"


def test_the_report_of_the_minilm_runs_is_what_their_files_say():
    import report_page

    def told(page: str) -> str:
        return re.sub(r"<svg .*?</svg>", "", page, flags=re.DOTALL)  # another matplotlib draws other lines

    committed = report_page.PAGE.read_text(encoding="utf-8")
    assert len(committed) < 1_700_000 and committed.count("<svg ") > 40
    assert told(committed) == told(report_page.page()), "run: make tables"


def test_committed_results_are_whole_and_name_no_place():
    from alignattn.diagnosis import result as diagnosis
    from alignattn.results import read_all

    others = {"bench", "diagnosis", "pictures", "shares"}
    folders = [folder for folder in sorted((ROOT / "results").iterdir()) if folder.name not in others]
    files = [file for folder in folders for file in folder.rglob("*.json")]
    assert len(read_all(folders)) == len(files) > 100
    assert all(diagnosis.read(file).heads for file in (ROOT / "results" / "diagnosis").glob("*.json"))
    for file in (ROOT / "results").rglob("*.json"):
        assert "/tmp" not in file.read_text() and "/home" not in file.read_text() and "/work" not in file.read_text()


def test_the_recipe_in_the_guide_is_one(tmp_path):
    from alignattn.experiments.recipe import load

    text = (ROOT / "docs" / "experiments.md").read_text()
    (tmp_path / "mine.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    recipe = load(str(tmp_path / "mine.toml"))
    assert recipe.train.steps == 500 and len(recipe.runs()) == 5 * (1 + 2 * 2)
    assert recipe.align.config("ot", None).matcher.epsilon == 0.1


def test_the_diagnosis_in_the_guide_is_what_its_files_say():
    from alignattn.diagnosis import result
    from alignattn.diagnosis.side_by_side import compare_diagnoses

    page = " ".join((ROOT / "docs" / "guide" / "diagnose.md").read_text().split())
    soft, aligned = (
        result.read(ROOT / "results" / "diagnosis" / f"minilm-sst2-{name}.json") for name in ("soft", "ot")
    )
    assert all(words in page for words in soft.words[:3])
    told = " ".join(compare_diagnoses(soft, aligned).words)
    for figure in ("26.351", "2.574", "72 of 72", "68 of 72"):
        assert figure in told and figure.split(" of")[0] in page
