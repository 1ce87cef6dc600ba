"""The measurements as a table for people, and as JSON for the pages that are made of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch

from alignattn import provenance
from alignattn.bench.parts import PARTS
from alignattn.bench.row import Row
from alignattn.files import write_whole

SCHEMA = 1


def write(path: Path, rows: Sequence[Row], device: torch.device, command: str) -> None:
    """Everything as JSON, with where it comes from."""
    content = {
        "schema": SCHEMA,
        "command": command,
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "machine": provenance.machine(device),
        "rows": [asdict(row) for row in rows],
    }
    write_whole(path, json.dumps(content, indent=1) + "\n")


def text(rows: Iterable[Row]) -> str:
    """One table a case."""
    blocks = []
    for (part, case), some in groupby(rows, key=lambda row: (row.part, row.case)):
        lines = [["", "ratio", "ms", "quartiles", "MiB", "memory", ""], *map(_cells, some)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        ]
        blocks.append("\n".join([f"{PARTS[part]}: {case}", *table]))
    return "\n\n".join(blocks) + "\n"


def _cells(row: Row) -> list[str]:
    details = ", ".join(f"{name} {value:.4g}" for name, value in row.details.items() if isinstance(value, float))
    if row.timing is None:
        return [row.name, "–", row.failed or "–", "", "", "", details]
    t = row.timing
    return [
        row.name,
        f"{t.ratio:.2f}",
        f"{1e3 * t.median:.2f}",
        f"{1e3 * t.low:.2f} to {1e3 * t.high:.2f}",
        "" if row.memory is None else f"{row.memory / 2**20:.1f}",
        "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}",
        details,
    ]
