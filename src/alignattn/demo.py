"""What alignment does, in two minutes and without a download: a small vision transformer on handwritten digits.

Soft attention and the four methods start from the same weights and see the same batches. The digits come with
scikit-learn.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from alignattn.alignment import align
from alignattn.capture import QueryKey, Tap
from alignattn.config import METHODS
from alignattn.functional import mmd
from alignattn.models.vision import VisionTransformer

BATCH = 64


@dataclass(frozen=True)
class Outcome:
    """One training run."""

    method: str
    accuracy: float  # percent, held-out digits
    noisy_accuracy: float  # percent, the same with Gaussian noise
    discrepancy: float  # unbiased squared MMD of keys and queries, median bandwidth, mean over heads and layers
    seconds: float  # of training


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images in [0, 1] and labels, for training and for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("The demo needs scikit-learn: pip install 'alignattn[demo]'") from error
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).view(-1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return x[:1297], y[:1297], x[1297:], y[1297:]


def train(method: str, *, seed: int, steps: int) -> Outcome:
    """Train one model, soft attention or aligned, and measure it."""
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(seed)
    model = VisionTransformer()
    alignment = None if method == "soft" else align(model, method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = _batches(len(labels), seed)
    start = time.perf_counter()
    for _ in range(steps):
        batch = next(batches)
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        if alignment is not None:
            loss = loss + alignment.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    if alignment is not None:
        alignment.detach()
    model.eval()
    noise = torch.randn(test_images.shape, generator=torch.Generator().manual_seed(1)) * 0.3
    return Outcome(
        method=method,
        accuracy=_accuracy(model, test_images, test_labels),
        noisy_accuracy=_accuracy(model, test_images + noise, test_labels),
        discrepancy=discrepancy(model, test_images),
        seconds=seconds,
    )


@torch.no_grad()
def discrepancy(model: torch.nn.Module, images: Tensor) -> float:
    """How far apart keys and queries are."""
    values: list[Tensor] = []

    def measure(record: QueryKey) -> None:
        values.append(mmd(record.query, record.key, query_mask=record.query_mask, key_mask=record.key_mask).mean())

    tap = Tap(model, watch=measure, always=True)
    try:
        model(images)
    finally:
        tap.remove()
    return float(torch.stack(values).mean())


def run(*, seeds: int = 3, steps: int = 150) -> str:
    """Train all methods and return a table of means over seeds."""
    torch.set_num_threads(1)  # products this small only wait for a second thread
    methods = ["soft", *METHODS]
    outcomes: dict[str, list[Outcome]] = {method: [] for method in methods}
    with tqdm(total=len(methods) * seeds, unit="run") as bar:
        for seed in range(seeds):
            for method in methods:
                bar.set_description(method)
                outcomes[method].append(train(method, seed=seed, steps=steps))
                bar.update()
    lines = [
        f"{'attention':<10}{'accuracy %':>14}{'noisy digits %':>16}{'MMD² of keys, queries':>24}{'time / soft':>13}"
    ]
    soft_seconds = sum(o.seconds for o in outcomes["soft"])
    for method, runs in outcomes.items():
        clean, noisy = _spread([o.accuracy for o in runs]), _spread([o.noisy_accuracy for o in runs])
        gap = sum(o.discrepancy for o in runs) / len(runs)
        slower = sum(o.seconds for o in runs) / soft_seconds
        lines.append(f"{method:<10}{clean:>14}{noisy:>16}{gap:>24.4f}{slower:>13.2f}")
    note = (
        f"{seeds} seeds, {steps} steps of {BATCH}; mean ± deviation; the MMD is unbiased and zero for one distribution"
    )
    return "\n".join([*lines, note])


def _batches(count: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(BATCH)[:-1]


@torch.no_grad()
def _accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    return 100 * float((model(images).argmax(-1) == labels).float().mean())


def _spread(values: list[float]) -> str:
    tensor = torch.tensor(values)
    return f"{tensor.mean():.1f} ± {tensor.std(correction=1) if len(values) > 1 else 0.0:.1f}"
