"""What was run, with which command, versions and machine: read off the results, each distinct value once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alignattn.report.blocks import Block, Facts, Folded, Listing
from alignattn.results import Result

SHOWN = ("task", "data", "model", "train")  # tables of a recipe that all results of a comparison share


def what_was_run(results: Sequence[Result], commands: Iterable[str] = ()) -> Folded:
    """Commands, seeds, versions, commits, machines and settings behind a table."""
    typed = distinct([*commands, *(result.command for result in results)])
    pairs = [
        ("seeds", ", ".join(map(str, sorted({result.seed for result in results})))),
        ("finished", _span([result.finished for result in results if result.finished])),
        ("time of training", _hours(sum(result.times.get("train", 0.0) for result in results))),
        *origin([r.versions for r in results], [r.commit for r in results], [r.machine for r in results]),
        *(("SHA-256 of " + name, ", ".join(sums)) for name, sums in _inputs(results).items()),
    ]
    blocks: list[Block] = [Listing(typed, code=True)] if typed else []
    blocks.append(Facts([(name, value) for name, value in pairs if value]))
    if settings := _settings(results):
        blocks.append(Folded("Settings", [Facts(settings)]))
    return Folded("What was run", blocks)


def origin(
    versions: Iterable[Mapping[str, str]], commits: Iterable[str | None], machines: Iterable[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Facts of where results come from."""
    found: dict[str, list[str]] = {}
    for one in versions:
        for package, version in one.items():
            if str(version) not in found.setdefault(str(package), []):
                found[str(package)].append(str(version))
    told = "; ".join(f"{package} {', '.join(sorted(those))}" for package, those in found.items())
    hardware = distinct(", ".join(f"{name} {value}" for name, value in machine.items()) for machine in machines)
    return [
        ("versions", told),
        ("commit", ", ".join(distinct(str(commit) for commit in commits if commit))),
        ("machine", "; ".join(hardware)),
    ]


def flat(values: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested settings as names with dots, in their order."""
    pairs: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{before}{name}.")
        elif value is not None:
            pairs.append((f"{before}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return pairs


def distinct(texts: Iterable[str]) -> list[str]:
    """Each once, in the order of their first, without empty ones."""
    return [text for text in dict.fromkeys(texts) if text]


def _settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    if not results:
        return []
    newest = max(results, key=lambda result: result.finished)
    return flat({name: newest.recipe[name] for name in SHOWN if name in newest.recipe})


def _inputs(results: Sequence[Result]) -> dict[str, list[str]]:
    names = distinct(name for result in results for name in result.inputs)
    return {name: distinct(f"{str(r.inputs[name])[:16]}…" for r in results if name in r.inputs) for name in names}


def _span(times: Sequence[str]) -> str:
    if not times:
        return ""
    first, last = min(times), max(times)
    return first if first == last else f"{first} to {last}"


def _hours(seconds: float) -> str:
    if not seconds > 0:
        return ""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
