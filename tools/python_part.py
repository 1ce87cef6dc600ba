"""What alignment has Python do in a training step, with no accelerator: recorded matchings that nobody plays.

python tools/python_part.py > results/bench/python-part.txt

A BERT of twelve layers that are so narrow, of so few tokens, that computing them takes next to nothing. Calls are put
together and recorded as on an accelerator, and a record that is played does nothing. On an accelerator itself
`alignattn bench --parts python` measures all of it.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from alignattn import align, objective, provenance
from alignattn.balance import EVERY
from alignattn.bench.workload import Shape, make_batch, make_model, training_step
from alignattn.capture import QueryKey
from alignattn.config import METHODS
from alignattn.errors import AlignmentWarning
from alignattn.matching.matcher import Matcher

SHAPE = Shape("narrow", 12, 48, 12, 2, 16, "fp32", vocabulary=100)
ROUNDS = 40
WARMUP = 4 * EVERY  # steps: all that is recorded is by then


def all_in_one(records: Sequence[QueryKey], matcher: Matcher) -> list[list[int]]:
    """Which calls are matched together on an accelerator, where they are small."""
    assert matcher.is_replayable()
    return [list(range(len(records)))]


def nothing(work: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """A record that is played in no time, and what it put out once."""
    return (lambda: None), work()


def main() -> None:
    """Steps of each method in turns behind those of soft attention."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", AlignmentWarning)  # gradients of records that nobody plays are not this step's
    objective.together = all_in_one
    device, steps = torch.device("cpu"), {}
    for name in ("soft", *METHODS):
        model = make_model(SHAPE, device)
        if name != "soft":
            align(model, name).objective.recorder = nothing
        steps[name] = training_step(model, make_batch(SHAPE, device), SHAPE.precision)
        for _ in range(WARMUP):
            steps[name]()
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begun = time.perf_counter()
            for _ in range(EVERY):  # in one of which alignment looks at its health
                step()
            took[name].append(1e3 * (time.perf_counter() - begun) / EVERY)
    print(
        "What alignment has Python do in a step: a BERT of twelve layers, milliseconds, medians of", ROUNDS, "rounds of"
    )
    print(EVERY, "steps in turns, with quartiles; and the median of the rounds' ratios to soft attention.")
    print("python tools/python_part.py, commit", str(provenance.commit())[:9], "torch", torch.__version__, "\n")
    for name, some in took.items():
        low, median, high = statistics.quantiles(some, n=4)
        ratio = statistics.median(one / soft for one, soft in zip(some, took["soft"], strict=True))
        print(f"{name:5s} {median:6.2f}  {low:6.2f} to {high:6.2f}  {ratio:.3f}")


if __name__ == "__main__":
    main()
