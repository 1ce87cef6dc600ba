"""A diagnosis in plain words: where keys and queries differ most, in what, and what to try.

What is advised is what this project's own results speak for: docs/method.md has the figures.
"""

import math
import statistics
from collections.abc import Sequence

from alignattn.diagnosis.result import HeadDiagnosis, Interval

CHANCE = 0.025  # of heads whose keys and queries do not differ, the share above the interval of noise
LONGER = 1.5  # queries than keys, or keys than queries: worth a word
EVEN, SINGLE = 0.95, 0.1  # entropies that are worth one
MOST = 0.75  # of the distance: in which layers it is


def words_of(heads: Sequence[HeadDiagnosis]) -> list[str]:
    """Sentences, the most important first."""
    told = [head for head in heads if head.samples]
    if not told:
        return ["No sample has two tokens or more on both sides: whether keys and queries differ cannot be told."]
    worst = max(told, key=lambda head: head.mmd)
    beyond = [head for head in told if head.beyond_noise]
    found = [_where(worst), _how_many(len(beyond), len(told))]
    if not differ(told):
        found.append(
            "There is nothing to align: on these samples keys and queries cannot be told apart. More samples would "
            "show smaller differences."
        )
        return found + _own_pairs(told) + _attention(told)
    return [*found, _kind(beyond), *_lengths(told), *_own_pairs(told), *_attention(told), *_advice(beyond, told)]


def differ(heads: Sequence[HeadDiagnosis]) -> bool:
    """Whether more heads are beyond noise than chance would put there once in twenty times."""
    count, beyond = len(heads), sum(head.beyond_noise for head in heads)
    as_many = (math.comb(count, i) * CHANCE**i * (1 - CHANCE) ** (count - i) for i in range(beyond, count + 1))
    return sum(as_many) < 0.05


def name_of(head: HeadDiagnosis) -> str:
    """As people say it."""
    return f"head {head.head} of {head.layer}"


def _where(worst: HeadDiagnosis) -> str:
    told = (
        f"Keys and queries differ most in {name_of(worst)}: MMD² {number(worst.mmd)}, where chance gives "
        f"{interval(worst.noise)}"
    )
    if math.isnan(worst.auc):
        return f"{told}."
    ends = interval(worst.auc_interval, 2)
    return f"{told}; a held-out classifier tells them apart with AUC {worst.auc:.2f} ({ends})."


def _how_many(beyond: int, heads: int) -> str:
    by_chance = CHANCE * heads
    return (
        f"In {beyond} of {heads} heads the difference is beyond noise; by chance it would be in about {by_chance:.2g}."
    )


def _kind(beyond: Sequence[HeadDiagnosis]) -> str:
    share = _share_of_means(beyond)
    means = statistics.median(head.mean_distance for head in beyond)
    covariances = statistics.median(head.covariance_distance for head in beyond)
    figures = f"(medians: means {means:.2f} deviations apart, covariances {covariances:.2f})"
    if share >= 0.5:
        return f"Mostly it is the means that differ {figures}: about {share:.0%} would go with a shift of all keys."
    return (
        f"Mostly it is spread and directions that differ, not the means {figures}: a shift of all keys would take "
        f"about {share:.0%} away."
    )


def _share_of_means(heads: Sequence[HeadDiagnosis]) -> float:
    weights = [max(head.mmd, 0.0) for head in heads]
    total = sum(weights)
    return sum(w * head.share_of_means for w, head in zip(weights, heads, strict=True)) / total if total else 0.0


def _lengths(heads: Sequence[HeadDiagnosis]) -> list[str]:
    ratios = [head.query_norm / head.key_norm for head in heads if head.query_norm > 0 and head.key_norm > 0]
    ratio = statistics.median(ratios) if ratios else 1.0
    if 1 / LONGER < ratio < LONGER:
        return []
    longer, shorter = ("Queries", "keys") if ratio > 1 else ("Keys", "queries")
    return [f"{longer} are {max(ratio, 1 / ratio):.1f} times as long as {shorter} in the median head."]


def _own_pairs(heads: Sequence[HeadDiagnosis]) -> list[str]:
    near = [head for head in heads if head.mmd < 0]
    if not near:
        return []
    told = (
        f"In {len(near)} of {len(heads)} heads MMD² is below zero: keys and queries have met there, and where a "
        "token's query goes on to its own key the task was seen to suffer. until_met, on by default, leaves them alone."
    )
    return [told]


def _attention(heads: Sequence[HeadDiagnosis]) -> list[str]:
    even, single = (sum(head.entropy > EVEN for head in heads), sum(head.entropy < SINGLE for head in heads))
    found = []
    if even:
        found.append(f"{even} of {len(heads)} heads look at all keys almost alike (entropy above {EVEN}).")
    if single:
        found.append(f"{single} of {len(heads)} heads look at almost one key (entropy below {SINGLE}).")
    return found


def _advice(beyond: Sequence[HeadDiagnosis], heads: Sequence[HeadDiagnosis]) -> list[str]:
    if _share_of_means(beyond) >= 0.5:
        first = (
            "Try alignattn.align(model) in training: it shifts keys to the queries every few updates (recentre), which "
            "softmax does not feel and which took three quarters of the distance on MRPC by itself."
        )
    else:
        first = (
            "Try alignattn.align(model) in training, by OT or MMD: they bring spread and directions together as well, "
            "which a shift of the keys does not."
        )
    second = (
        "Without training: alignattn.rebase(model, batches) gives keys and queries one mean and covariance where "
        "nothing rotates or normalises them behind their projections, and no output changes: that part of the distance "
        "says nothing about the model."
    )
    found = [first, second]
    layers = _most_of_it(beyond)
    every = {head.layer.partition("#")[0] for head in heads}
    if len(layers) <= len(every) / 2:
        found.append(
            f"{MOST:.0%} of the difference is in {len(layers)} of {len(every)} layers; to align those alone: "
            f"layers={layers!r}."
        )
    return found


def _most_of_it(beyond: Sequence[HeadDiagnosis]) -> list[str]:
    """The fewest layers that hold most of the difference, in their order."""
    sums: dict[str, float] = {}
    for head in beyond:
        name = head.layer.partition("#")[0]
        sums[name] = sums.get(name, 0.0) + max(head.mmd, 0.0)
    chosen: list[str] = []
    for name in sorted(sums, key=lambda name: -sums[name]):
        if sum(sums[other] for other in chosen) >= MOST * sum(sums.values()):
            break
        chosen.append(name)
    return [name for name in sums if name in chosen]


def number(value: float, digits: int = 4) -> str:
    """A dash for NaN, and never minus zero."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    rounded = f"{value:.{digits}f}"
    return rounded.replace("-", "−") if float(rounded) else f"{0:.{digits}f}"


def interval(ends: Interval, digits: int = 4) -> str:
    """`low to high`."""
    return f"{number(ends[0], digits)} to {number(ends[1], digits)}"
