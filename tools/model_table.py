"""Writes docs/models.md: for each family of tests/zoo.py, what alignattn does with a tiny model of it.

    python tools/model_table.py            # look at all families and write the table
    python tools/model_table.py --check    # look at all families, compare, and write nothing

Fails if a family that the table has as attached is so no more, or if anything is silently wrong: eval outputs that
differ by one bit, calls or heads or masks that are missed, gradients that do not arrive, what is captured not being
what is multiplied.
"""

import argparse
import importlib.metadata
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from model_facts import Facts, look_at  # noqa: E402
from zoo import FAMILIES, Family  # noqa: E402

TABLE = ROOT / "docs" / "models.md"
COLUMNS = (
    "family",
    "example class",
    "how",
    "attention modules",
    "heads",
    "calls",
    'generator="projections"',
    "implementations",
    "note",
)


HEADINGS = {
    "text encoder": "Text encoders",
    "text decoder": "Text decoders",
    "encoder-decoder": "Encoder-decoders",
    "vision": "Vision",
    "speech": "Speech",
    "multi-modal": "Text with images or layout",
}
HEADER = """\
# Models

Made by `python tools/model_table.py` with {versions}: {counts}.
Don't edit it: add a family to `tests/zoo.py` and run that command again.

Each row was tried on a tiny model of random weights. *Attached* means that, with each implementation named, eval
outputs are the plain model's to the last bit, attached and after `detach()`; that the outputs in training mode are too;
that every self-attention call is captured but for what a note tells, queries and keys are those that the layer
multiplies, and the masks those of the padding; and that the gradient of the loss reaches the query and key projections
of every layer.

*How*: through transformers' attention interface; in attention that is written out in the module, where queries and keys
are multiplied; in `nn.MultiheadAttention`. Modules, heads and calls are those of the tiny model: self-attention modules
that were captured, the heads they have, and their calls in one forward pass. Cross-attention is left alone unless asked
for with `cross=True`. A refusal is an `UnsupportedModelError`, when the model is attached or in its first training
forward. Where only some layers are at fault, `layers=` attaches the others."""


@dataclass(frozen=True)
class Row:
    """What the table says of one family."""

    family: str
    example: str
    how: str
    modules: str = ""
    heads: str = ""
    calls: str = ""
    projections: str = ""
    implementations: str = ""
    note: str = ""

    @property
    def attached(self) -> bool:
        return not self.how.startswith("refused")

    def line(self) -> str:
        return "| " + " | ".join(vars(self).values()) + " |"


def row_of(looks: list[Facts]) -> Row:
    """One row from what was found with each implementation of the family."""
    first, family = looks[0], looks[0].family
    if not first.attached:
        return Row(family.name, family.model, f"refused when {first.refused_when}", note=family.refused)
    return Row(
        family=family.name,
        example=family.model,
        how=" and ".join(first.kinds),
        modules=str(first.modules),
        heads=" and ".join(map(str, first.heads)),
        calls=f"{first.calls}" + (f", and {first.cross_calls} cross" if first.cross_calls else ""),
        projections="yes" if first.projections is None else "no",
        implementations=", ".join(facts.implementation for facts in looks),
        note=family.note,
    )


def problems_of(looks: list[Facts]) -> list[str]:
    """What is silently wrong, or not as the registry says."""
    found = []
    for facts in looks:
        who = f"{facts.family.name} ({facts.implementation})"
        found += [f"{who}: {problem}" for problem in facts.problems]
        if facts.attached and facts.family.refused:
            found.append(f"{who}: is attached, and the registry says it cannot be: {facts.family.refused}")
        if not facts.attached and not facts.family.refused:
            found.append(f"{who}: is refused: {facts.refusal}")
    return found


def read_table(path: Path = TABLE) -> dict[str, Row]:
    """The rows of the table as it stands in the file, by family."""
    if not path.exists():
        return {}
    cells = (re.split(r" ?\| ?", line)[1:-1] for line in path.read_text().splitlines() if line.startswith("| "))
    rows = (Row(*cell) for cell in cells if len(cell) == len(COLUMNS) and cell[0] not in (COLUMNS[0], "---"))
    return {row.family: row for row in rows}


def written(rows: list[tuple[Family, Row]]) -> str:
    """The whole file."""
    attached = sum(row.attached for _, row in rows)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    counts = f"{len(rows)} families of transformers, {attached} attached and {len(rows) - attached} refused"
    lines = [HEADER.format(versions=versions, counts=counts)]
    for group in dict.fromkeys(family.group for family, _ in rows):
        lines += ["", f"## {HEADINGS[group]}"]
        lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
        lines += [row.line() for family, row in rows if family.group == group]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    parser.add_argument("families", nargs="*", help="look at these only, and write nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before, problems, rows = read_table(), [], []
    for family in FAMILIES:
        if options.families and family.name not in options.families:
            continue
        looks = [look_at(family, implementation) for implementation in family.implementations]
        row = row_of(looks)
        rows.append((family, row))
        problems += problems_of(looks)
        if family.name in before and before[family.name].attached and not row.attached:
            problems.append(f"{family.name}: was attached, and is refused: {looks[0].refusal}")
        print(row.line())
    counted = Counter(row.how for _, row in rows)
    print("\n" + "\n".join(f"{count:4} {how}" for how, count in counted.most_common()))
    if options.check and {row.family: row for _, row in rows} != before:
        problems.append(f"{TABLE.relative_to(ROOT)} is not what this gives: run python tools/model_table.py")
    if not (options.check or options.families or problems):
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(written(rows))
    for problem in problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
