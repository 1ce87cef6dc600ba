"""Two diagnoses of one kind of model beside each other: before and after training, or two checkpoints.

A change of MMD² is beyond noise where |after - before| > 1.96 √(error² + error²), the errors being those between
samples. On the same samples both rise and fall together: the test is then on the careful side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from alignattn.diagnosis.result import Diagnosis, HeadDiagnosis, Interval
from alignattn.diagnosis.separation import WIDTH
from alignattn.diagnosis.words import differ, interval, name_of, number
from alignattn.errors import DataError


@dataclass(frozen=True)
class HeadChange:
    """One head, twice."""

    before: HeadDiagnosis
    after: HeadDiagnosis

    @property
    def mmd(self) -> float:
        """By how much it has grown."""
        return self.after.mmd - self.before.mmd

    @property
    def interval(self) -> Interval:
        """95 % of that."""
        margin = WIDTH * math.hypot(self.before.mmd_error, self.after.mmd_error)
        return self.mmd - margin, self.mmd + margin

    @property
    def verdict(self) -> str:
        """`closer`, `farther` or `cannot tell`."""
        low, high = self.interval
        return "closer" if high < 0 else "farther" if low > 0 else "cannot tell"


@dataclass(frozen=True)
class SideBySide:
    """Two diagnoses, and what changed from one to the other."""

    before: Diagnosis
    after: Diagnosis
    heads: list[HeadChange]
    words: list[str]


def compare_diagnoses(before: Diagnosis, after: Diagnosis) -> SideBySide:
    """Head by head; both must have the same layers and heads."""
    first, second = ({(head.layer, head.head): head for head in d.heads} for d in (before, after))
    if missing := [key for key in first | second if key not in first or key not in second]:
        layer, head = missing[0]
        has, lacks = (before, after) if missing[0] in first else (after, before)
        raise DataError(
            f"{before.name} and {after.name} cannot be set side by side: {has.name} has head {head} of {layer}, and "
            f"{lacks.name} has not."
        )
    heads = [HeadChange(one, second[key]) for key, one in first.items()]
    return SideBySide(before, after, heads, _words(before, after, heads))


def _words(before: Diagnosis, after: Diagnosis, heads: Sequence[HeadChange]) -> list[str]:
    verdicts = [head.verdict for head in heads]
    measured = [head for head in heads if not math.isnan(head.mmd)]  # in both
    totals = [sum(head.before.mmd for head in measured), sum(head.after.mmd for head in measured)]
    found = []
    if any((h.before.samples, h.before.tokens) != (h.after.samples, h.after.tokens) for h in heads):
        found.append("They were measured on different samples: part of the difference may be theirs.")
    found.append(
        f"MMD², summed over heads and layers: {number(totals[0], 3)} in {before.name}, {number(totals[1], 3)} in "
        f"{after.name}."
    )
    told = {word: verdicts.count(word) for word in ("closer", "farther", "cannot tell")}
    found.append(
        f"Keys and queries are closer in {told['closer']} of {len(heads)} heads and farther apart in "
        f"{told['farther']}, beyond the noise between samples; in {told['cannot tell']} the change cannot be told from "
        f"it. By chance about {0.05 * len(heads):.2g} would change."
    )
    most = max(heads, key=lambda head: abs(head.mmd) if head.verdict != "cannot tell" else -1.0)
    if most.verdict != "cannot tell":
        found.append(
            f"The most changed is {name_of(most.after)}: MMD² {number(most.before.mmd)} before, "
            f"{number(most.after.mmd)} after (change {interval(most.interval)})."
        )
    states = [differ(diagnosis.heads) for diagnosis in (before, after)]
    if states[0] and not states[1]:
        found.append(f"In {after.name} keys and queries can no longer be told apart: there is nothing left to align.")
    elif states[1]:
        left = sum(head.after.beyond_noise for head in heads)
        found.append(f"In {after.name} {left} of {len(heads)} heads still differ by more than chance.")
    return found
