"""Writes docs/report-minilm.html, what `alignattn report results/minilm-*` makes of the MiniLM runs.

python tools/report_page.py
"""

from pathlib import Path

from alignattn.report.build import report

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "report-minilm.html"
TITLE = "Alignment attention: MiniLM on four data sets"


def page() -> str:
    return report(sorted((ROOT / "results").glob("minilm-*")), TITLE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
