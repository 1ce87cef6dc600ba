"""A report: what the paths hold, as one page."""

from collections.abc import Iterable
from pathlib import Path

from alignattn.experiments.compare import behind, compare
from alignattn.report import comparison, diagnosis
from alignattn.report.blocks import Section, Table
from alignattn.report.inputs import Inputs, read
from alignattn.report.page import page

TITLE = "Alignment attention: report"


def report(paths: Iterable[Path], title: str = TITLE) -> str:
    """The page, a whole HTML file; equal files give equal bytes, whatever the order of the paths within a folder."""
    inputs = read(paths)
    return page(title, _lead(inputs), _sections(inputs))


def _sections(inputs: Inputs) -> list[Section]:
    made = compare(inputs.results) if inputs.results else []
    pairs = [*zip(made, behind(inputs.results), strict=True)]
    pairs += [(one, [[] for _ in one.rows]) for one in inputs.comparisons]
    sections = [
        comparison.section(one, results, inputs.file_of, f"c{number}") for number, (one, results) in enumerate(pairs, 1)
    ]
    if inputs.diagnoses:
        sections += diagnosis.sections(inputs.diagnoses, "d")
    if inputs.left_out:
        sections.append(
            Section("Files left out", [Table("Files that could not be read", ["file", "why"], inputs.left_out)])
        )
    return sections


def _lead(inputs: Inputs) -> str:
    failed = sum(result.failed for result in inputs.results)
    counts = (
        (len(inputs.results), "run", "runs"),
        (failed, "of them failed", "of them failed"),
        (len(inputs.comparisons), "comparison", "comparisons"),
        (len(inputs.diagnoses), "diagnosis", "diagnoses"),
        (len(inputs.left_out), "file left out", "files left out"),
    )
    told = [f"{count} {one if count == 1 else many}" for count, one, many in counts if count]
    return f"{', '.join(told)}."
