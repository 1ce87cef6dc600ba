"""A folder of result files, the page of it, and a browser to open it in."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, executable
from made_results import fill

HINT = "no Chromium is installed: apt-get install chromium, or any Chrome on the PATH"


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    if executable() is None:
        if os.environ.get("ALIGNATTN_BROWSER") == "required":
            pytest.fail(HINT)
        pytest.skip(HINT)
    with Chromium() as started:
        yield started


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of result files."""
    return fill(tmp_path / "runs")


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of such a folder."""
    from alignattn.report.build import report

    return report([fill(tmp_path_factory.mktemp("report"))])
