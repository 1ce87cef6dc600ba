"""Sinkhorn beside other libraries: the same problems, each with the fewest iterations that reach one marginal error.

A problem's marginal error is the largest relative error of any of its row and column sums. Where a library is not
installed the table says so.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from alignattn.bench.row import Row, measured
from alignattn.matching.transport import optimal_transport

EPSILON = 0.05  # the mean cost of these problems is about one
TARGET = 0.01  # median over problems
MATRIX = 2**31  # numbers in the matrices of all problems; peers that hold them are not tried beyond
SIZES = {"cuda": ((192, 512), (12, 8192), (384, 128)), "cpu": ((96, 128), (8, 512))}
WIDTH = 64
LONGEST = 3.0  # seconds: whoever is not precise enough by then is not waited for

Solve = Callable[[], object]
Error = Callable[[object], float]


def sinkhorn(device: torch.device, *, quick: bool, rounds: int) -> Iterator[list[Row]]:
    """Values of the regularised problem, without gradients."""
    for problems, tokens in ((8, 64),) if quick else SIZES["cpu" if device.type == "cpu" else "cuda"]:
        generator = torch.Generator("cpu").manual_seed(0)
        x, y = (torch.randn(problems, tokens, WIDTH, generator=generator).to(device) / WIDTH**0.5 for _ in range(2))
        calls: dict[str, Solve] = {}
        failed: dict[str, str] = {}
        details: dict[str, dict[str, float | int]] = {}
        for name, make in (("alignattn", _alignattn), ("geomloss", _geomloss), ("POT", _pot)):
            if name != "alignattn" and problems * tokens**2 > MATRIX:
                failed[name] = "matrices too large"
                continue
            try:
                calls[name], details[name] = _first_good(make(x, y))
            except ImportError:
                failed[name] = "not installed, or too old to solve many problems at once"
            except (torch.OutOfMemoryError, LookupError) as error:
                failed[name] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else str(error)
        case = f"{problems} problems of {tokens} × {WIDTH}, marginals within {TARGET:.0%}"
        yield measured("sinkhorn", case, calls, device, rounds=rounds, failed=failed, details=details)


def _first_good(settings: Iterator[tuple[float, Solve, Error]]) -> tuple[Solve, dict[str, float | int]]:
    """The first setting, from the cheapest on, that is precise enough."""
    error = float("inf")
    for setting, solve, error_of in settings:
        error, seconds = _tried(solve, error_of)
        if error <= TARGET:
            return solve, {"setting": setting, "marginal_error": error}
        if seconds > LONGEST:
            seconds = _tried(solve, error_of)[1]  # what is compiled on first use does not count
        if seconds > LONGEST:
            raise LookupError(f"takes {seconds:.0f} s, and marginals are still off by {error:.1%}")
    raise LookupError(f"marginals are off by {error:.1%} at best")


def _tried(solve: Solve, error_of: Error) -> tuple[float, float]:
    """The error, and the seconds it took."""
    begun = time.perf_counter()
    error = error_of(solve())  # a number: it has waited for the device
    return error, time.perf_counter() - begun


def _alignattn(x: Tensor, y: Tensor) -> Iterator[tuple[float, Solve, Error]]:
    for iterations in _powers(4, 4096):

        def solve(iterations: int = iterations) -> object:
            with torch.no_grad():
                return optimal_transport(
                    x[None],
                    y[None],
                    cost="half_sqeuclidean",
                    epsilon=EPSILON,
                    max_iterations=iterations,
                    tolerance=TARGET,
                )

        yield iterations, solve, lambda result: float(result.marginal_error.median())  # type: ignore[attr-defined]


def _geomloss(x: Tensor, y: Tensor) -> Iterator[tuple[float, Solve, Error]]:
    from geomloss import SamplesLoss

    for scaling in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995):
        loss = SamplesLoss(
            "sinkhorn", p=2, blur=EPSILON**0.5, scaling=scaling, debias=False, potentials=True, backend="tensorized"
        )

        def solve(loss: SamplesLoss = loss) -> object:
            with torch.no_grad():
                return loss(x, y)

        def error(potentials: object) -> float:
            f, g = (p.flatten(1).double() for p in potentials)  # type: ignore[attr-defined]
            return _median_error(torch.cat([_plan(x[i], y[i], f[i], g[i])[None] for i in range(len(x))]))

        yield scaling, solve, error


def _pot(x: Tensor, y: Tensor) -> Iterator[tuple[float, Solve, Error]]:
    from ot import batch

    for iterations in _powers(4, 4096):

        def solve(iterations: int = iterations) -> object:
            with torch.no_grad():
                cost = batch.dist_batch(x, y, metric="sqeuclidean") / 2
                return batch.solve_batch(
                    cost, EPSILON, max_iter=iterations, tol=0.0, method="log_sinkhorn", grad="detach"
                ).plan

        yield iterations, solve, lambda plan: _median_error(plan.double())  # type: ignore[attr-defined]


def _powers(first: int, last: int) -> Sequence[int]:
    """Each about a half more than the one before."""
    found = [first]
    while found[-1] < last:
        found.append(-(-found[-1] * 3 // 2))
    return found


def _plan(x: Tensor, y: Tensor, f: Tensor, g: Tensor) -> Tensor:
    cost = torch.cdist(x.double(), y.double()).square() / 2
    return torch.exp((f[:, None] + g[None, :] - cost) / EPSILON) / (len(x) * len(y))


def _median_error(plan: Tensor) -> float:
    errors = [(plan.sum(axis) * count - 1).abs().amax(-1) for axis, count in ((2, plan.shape[1]), (1, plan.shape[2]))]
    return float(torch.maximum(*errors).median())
