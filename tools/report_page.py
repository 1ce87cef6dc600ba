"""Writes docs/report-minilm.html: what `alignattn report` makes of the MiniLM runs and two diagnosed checkpoints.

python tools/report_page.py
"""

from pathlib import Path

from alignattn.report.build import report

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "report-minilm.html"
TITLE = "Alignment attention: MiniLM on four data sets"


def page() -> str:
    results = ROOT / "results"
    diagnoses = [results / "diagnosis" / f"minilm-sst2-{name}.json" for name in ("soft", "ot")]  # before, after
    return report([*sorted(results.glob("minilm-*")), *diagnoses], TITLE)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
