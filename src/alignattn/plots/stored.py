"""What result files hold, as the pictures take it: results of one kind of attention put together, seed by seed."""

from collections.abc import Iterable, Mapping, Sequence
from math import fsum, isfinite, nan
from typing import Any

from alignattn.errors import DataError
from alignattn.plots.reliability import FIELDS
from alignattn.results import Result
from alignattn.weights import write_weight

LOSSES = ("task_loss", "alignment_loss")
Course = tuple[Sequence[float], Sequence[float]]  # steps, values


def stored_curves(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """The losses while training, for `curves`, one run a seed, at the steps where all runs of a kind have a number."""
    found: dict[str, dict[str, Any]] = {}
    for title, runs in _kinds(results).items():
        looked = [run.details.get("curve") or [] for run in runs]
        if not looked[0]:
            raise DataError(f"The results of {title!r} hold no curve.")
        names = LOSSES if runs[0].weight is not None else LOSSES[:1]  # soft attention's is no loss, but zeros
        steps, values = common_steps(
            [
                ([look[0] for look in looks], [look[place] for look in looks])
                for place, _ in enumerate(names, 1)
                for looks in looked
            ]
        )
        if not steps:
            raise DataError(f"The runs of {title!r} were looked at after other steps: they share no curve.")
        found[title] = {"step": steps}
        for place, name in enumerate(names):
            found[title][name] = values[place * len(runs) : (place + 1) * len(runs)]
    return found


def stored_distances(results: Iterable[Result], *, on: str = "") -> dict[str, dict[str, list[float]]]:
    """The MMD² of each head, for `distance_map`: the mean over seeds. `on` names other data, such as "test"."""
    return {
        title: mean_distances([_detail(run, "mmd", on) for run in runs], title)
        for title, runs in _kinds(results).items()
    }


def stored_bins(results: Iterable[Result], *, on: str = "") -> dict[str, dict[str, list[float]]]:
    """The reliability bins, for `reliability`: the samples of all seeds in one set of bins."""
    return {
        title: pooled_bins([_detail(run, "reliability", on) for run in runs], title)
        for title, runs in _kinds(results).items()
    }


def common_steps(runs: Sequence[Course]) -> tuple[list[float], list[list[float]]]:
    """The steps at which every run has a finite value, rising, and those values, run by run."""
    known = [{step: value for step, value in zip(*run, strict=True) if isfinite(value)} for run in runs]
    steps = sorted(set.intersection(*(set(one) for one in known)))
    return steps, [[one[step] for step in steps] for one in known]


def mean_distances(tables: Sequence[Mapping[str, Sequence[float]]], whose: str) -> dict[str, list[float]]:
    """The mean over runs of a value for each head of each layer."""
    if any({k: len(v) for k, v in table.items()} != {k: len(v) for k, v in tables[0].items()} for table in tables):
        raise DataError(f"The runs of {whose!r} have other layers or heads.")
    return {
        layer: [fsum(values) / len(values) for values in zip(*(table[layer] for table in tables), strict=True)]
        for layer in tables[0]
    }


def pooled_bins(groups: Sequence[Mapping[str, Sequence[float]]], whose: str) -> dict[str, list[float]]:
    """Reliability bins of several runs as those of all their samples together."""
    edges = list(groups[0]["edges"])
    if any(list(group["edges"]) != edges for group in groups):
        raise DataError(f"The runs of {whose!r} have other bins.")
    columns = {name: list(zip(*(group[name] for group in groups), strict=True)) for name in FIELDS[:3]}
    count = [fsum(counts) for counts in columns["count"]]
    found = {"count": count, "edges": edges}
    for name in FIELDS[1:3]:
        weighed = zip(columns["count"], columns[name], count, strict=True)
        found[name] = [
            # The mean of an empty bin is NaN.
            fsum(n * value for n, value in zip(counts, values, strict=True) if n) / total if total else nan
            for counts, values, total in weighed
        ]
    return found


def _kinds(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Finished results by kind of attention and weight, soft attention first; a seed counts once."""
    kinds: dict[str, dict[int, Result]] = {}
    names = set()
    for result in sorted(results, key=lambda one: one.weight is not None):
        if result.failed:
            continue
        names.add(result.name)
        title = result.method if result.weight is None else f"{result.method} {write_weight(result.weight)}"
        if result.seed in kinds.setdefault(title, {}):
            raise DataError(
                f"There are two results of {title!r} with seed {result.seed}: they differ in an option. Leave out one."
            )
        kinds[title][result.seed] = result
    if not kinds:
        raise DataError("There are no finished results to draw.")
    if len(names) > 1:
        raise DataError(f"These are results of several recipes, {', '.join(sorted(names))}: draw one at a time.")
    return {title: list(runs.values()) for title, runs in kinds.items()}


def _detail(result: Result, name: str, on: str) -> Any:
    name = f"{name}@{on}" if on else name
    if name not in result.details:
        has = ", ".join(result.details) or "none"
        raise DataError(f"The result of {result.method!r}, seed {result.seed}, holds no {name!r}. Its details: {has}.")
    return result.details[name]
