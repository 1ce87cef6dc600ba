"""Every block of code in the guide runs as it stands, the blocks of a page one after another."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_code_of_the_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_there_is_a_page_for_each_way_to_train_of_diagnosis_and_of_pictures():
    ways = {"trainer", "loop", "lightning", "processes", "lora", "own_attention", "graphs"}
    assert {page.stem for page in PAGES} == ways | {"diagnose", "pictures"}


def test_pictures_that_pages_show_exist_and_are_small():
    pages = [*PAGES, *GUIDE.parent.glob("*.md")]
    shown = {
        (page.parent / name).resolve() for page in pages for name in re.findall(r"!\[.*?\]\((.*?)\)", page.read_text())
    }
    assert len(shown) >= 6
    for picture in shown:
        assert picture.exists(), picture
        assert picture.stat().st_size < 250_000, picture
