"""Writes docs/options.md from the config classes and presets: each option is described once, in the code.

python tools/option_table.py
"""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from alignattn.config import METHODS, PRESETS, AlignmentConfig
from alignattn.matching.matcher import MatcherConfig, NetworkConfig

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
TITLES = {
    "gan": "a discriminator tells queries from keys",
    "ot": "entropic optimal transport",
    "ct": "bidirectional conditional transport",
    "mmd": "maximum mean discrepancy",
}


def described(cls: type) -> dict[str, str]:
    """The comment behind each field that the class itself declares."""
    found = re.findall(r"^    (\w+): [^#\n]*#\s*(.*)$", inspect.getsource(cls), re.MULTILINE)
    return {name: text for name, text in found if name != "choices"}


def default(cls: type, name: str) -> str:
    """The default of a field, as one would write it."""
    field: Any = next(f for f in fields(cls) if f.name == name)
    return "" if field.default is MISSING else f"`{field.default!r}`"


def table(cls: type, names: dict[str, str]) -> list[str]:
    """One row an option."""
    bar = r"\|"  # |q-k| would end the cell
    rows = [f"| `{name}` | {default(cls, name)} | {text.replace('|', bar)} |" for name, text in names.items()]
    return ["| option | default | |", "|---|---|---|", *rows, ""]


def plain(names: list[str], cls: type) -> dict[str, str]:
    """Options whose name says it all have no comment."""
    texts = described(cls)
    return {name: texts.get(name, "") for name in names}


def own_fields(cls: type, *, beside: set[str]) -> list[str]:
    """The fields of a config class that its base does not have."""
    return [f.name for f in fields(cls) if f.name not in beside]


def page() -> str:
    """The whole page."""
    general = own_fields(AlignmentConfig, beside={"method", "preset", "matcher"})
    base = own_fields(MatcherConfig, beside=set())
    networks = own_fields(NetworkConfig, beside=set(base))
    lines = [
        "# Options",
        "",
        "`alignattn.align(model, method, weight, preset, *, layers=None, **options)`. Options come from the defaults,",
        "then from the preset, then from the call; an unknown one is refused with the nearest known name. This page is",
        "written by `make docs` from the code.",
        "",
        "## All methods",
        "",
        *table(AlignmentConfig, plain(general, AlignmentConfig)),
        *table(MatcherConfig, plain(base, MatcherConfig)),
    ]
    for method, (_, config) in METHODS.items():
        learns = issubclass(config, NetworkConfig)
        names = own_fields(config, beside={*base, *networks})
        texts = plain(names, config) | (plain(networks, NetworkConfig) if learns else {})
        lines += [f'## `"{method}"`: {TITLES[method]}', "", *table(config, texts)]
    lines += [
        "## Presets",
        "",
        "What each sets beside the defaults above.",
        "",
        "| preset | method | sets |",
        "|---|---|---|",
    ]
    for preset, parts in PRESETS.items():
        for method, values in parts.items():
            lines.append(f"| `{preset}` | {method} | {', '.join(f'`{k}={v!r}`' for k, v in values.items())} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
