"""Generated pages are what the code says today."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_option_page_is_current():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import option_table
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs" / "options.md").read_text() == option_table.page(), "run: make docs"
