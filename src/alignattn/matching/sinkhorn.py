"""Plans of many transport problems at once, by Sinkhorn's iterations (scores.py): what they cost, and its gradient.

Problems are taken in chunks whose matrices fit a fixed budget, and a problem larger than the budget in tiles whose
products are computed anew; kernels hold no matrix, or one no larger than a few times the tokens. Memory is linear in
the number of tokens.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alignattn.matching import kernels
from alignattn.matching.opaque import opaque
from alignattn.matching.scores import ExponentialScores, MatrixScores, Problems, Scores, Solved
from alignattn.matching.tokens import MATRIX_ELEMENTS, chunks_of

if TYPE_CHECKING:
    from alignattn.matching.kernels.sinkhorn import StreamedScores

LOOK_EVERY = 10  # iterations, whether all problems are done: to look costs an accelerator its queue


def _scored(problems: Problems, *, carried: bool = True) -> Iterator[tuple[Problems, Scores]]:
    """In parts whose matrices fit the budget, or all at once where kernels hold none, with their scores.

    `carried`: their plans will carry something.
    """
    if not kernels.serve(problems.x):
        for part in _chunks(problems):
            yield part, _by_torch(part)
        return
    from alignattn.matching.kernels.sinkhorn import StreamedScores
    from alignattn.matching.kernels.stored_scores import StoredScores

    if not are_stored(problems.x.shape[1], problems.y.shape[1], problems.x):
        yield problems, StreamedScores(problems.x, problems.y, problems.epsilon, problems.products)
        return
    for part in _chunks(problems):
        yield part, StoredScores(part.x, part.y, part.epsilon, part.products, carried=carried)


def _by_torch(problems: Problems) -> Scores:
    size = problems.x.shape[1] * problems.y.shape[1] * len(problems.x)
    in_cache = problems.x.device.type == "cpu" and size <= MATRIX_ELEMENTS["cpu"]
    return ExponentialScores(problems) if in_cache and not torch.compiler.is_compiling() else MatrixScores(problems)


def are_stored(queries: int, keys: int, like: Tensor) -> bool:
    """Whether kernels hold the scores of problems of so many tokens, like these."""
    from alignattn.matching.kernels.stored_scores import pay

    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # what is recorded costs Python nothing, of however many launches
    return pay(queries, keys, like.shape[-1])


def _sinkhorn(problems: Problems, scores: Scores, max_iterations: int, tolerance: float) -> Solved:
    """Potentials f and g, and the number of iterations each problem took."""
    look_every = 1 if problems.x.device.type == "cpu" else LOOK_EVERY
    g = torch.addcdiv(problems.log_b, problems.beta, problems.epsilon[:, None], value=-1)  # potential zero
    return scores.solve(problems.log_a, problems.log_b, g, max_iterations, tolerance, look_every)


def with_fixed_plan(problems: Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost with the plan as a constant: the gradient is that of the regularised value, by the envelope theorem."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in problems.tensors())
    if not differentiated and kernels.serve(problems.x):
        return _values(problems, max_iterations, tolerance)
    rows, columns, to_keys, to_queries, entropy, error, iterations = _plans(
        *problems.detached().tensors(), max_iterations, tolerance, problems.products
    )
    # sum_ij x_i·y_j pi_ij is both sum_i x_i·to_keys_i and sum_j y_j·to_queries_j; each carries its own gradient.
    of_queries = (problems.x * to_keys).sum((1, 2))
    of_keys = (problems.y * to_queries).sum((1, 2))
    product = of_queries + of_keys - of_keys.detach()
    cost = (rows * problems.alpha).sum(-1) + (columns * problems.beta).sum(-1) - product
    return cost, cost + problems.epsilon * entropy, error, iterations


def _values(problems: Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """The same by kernels, without anything to differentiate: nothing is carried."""
    parts = []
    for part, scores in _scored(problems, carried=False):
        f, g, iterations = _sinkhorn(part, scores, max_iterations, tolerance)
        parts.append((*cast("StreamedScores", scores).value(f, g, part), iterations))
    return _joined(parts)


def _chunks(problems: Problems) -> list[Problems]:
    """In parts whose matrices fit the budget."""
    count, elements = len(problems.x), problems.x.shape[1] * problems.y.shape[1]
    step = chunks_of(count, elements, problems.x.device)
    return [problems[start : start + step] for start in range(0, count, step)]


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(t) for t in zip(*parts, strict=True))


Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _like_plans(*given: Any) -> Statistics:
    x, y, _, _, log_a, log_b, epsilon, *_ = given
    rows, columns, to_keys, to_queries, entropy, error = map(torch.empty_like, (log_a, log_b, x, y, epsilon, epsilon))
    return rows, columns, to_keys, to_queries, entropy, error, torch.empty_like(epsilon, dtype=torch.int64)


@opaque("plans", like=_like_plans)
def _plans(
    x: Tensor,
    y: Tensor,
    alpha: Tensor,
    beta: Tensor,
    log_a: Tensor,
    log_b: Tensor,
    epsilon: Tensor,
    max_iterations: int,
    tolerance: float,
    products: str = kernels.EXACT,
) -> Statistics:
    """What `_plan_statistics` tells, of all problems."""
    problems = Problems(x, y, alpha, beta, log_a, log_b, epsilon, products=products)
    return _joined([_plan_statistics(*part, max_iterations, tolerance) for part in _scored(problems)])  # type: ignore[return-value]


def _plan_statistics(problems: Problems, scores: Scores, max_iterations: int, tolerance: float) -> Statistics:
    """Row and column sums of the plan, what it carries to either side, sum pi log pi, and how it was reached."""
    f, g, iterations = _sinkhorn(problems, scores, max_iterations, tolerance)
    (rows, to_keys), (columns, to_queries), entropy = scores.carry(f, g)
    error = _marginal_error(rows, columns, problems)
    return rows, columns, to_keys, to_queries, entropy, error, iterations


def _marginal_error(rows: Float[Tensor, "p n"], columns: Float[Tensor, "p m"], problems: Problems) -> Tensor:
    errors = []
    for sums, log_marginal in ((rows, problems.log_a), (columns, problems.log_b)):
        off = (sums / log_marginal.exp() - 1).abs()
        errors.append(off.where(log_marginal > -torch.inf, 0.0).amax(-1))
    return torch.maximum(errors[0], errors[1])


def unrolled(problems: Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost differentiated through the iterations. Holds n×m numbers for each of them, for one chunk at a time."""

    def solve(*tensors: Tensor) -> tuple[Tensor, ...]:
        part = Problems(*tensors)
        scores = MatrixScores(part)
        f, g, iterations = _sinkhorn(part, scores, max_iterations, tolerance)
        product = torch.cat([scores.tile(tile) for tile in scores.tiles()], 1)  # (p, n, m)
        log_plan = product + f[..., None] + g[:, None, :]
        plan = log_plan.exp()
        costs = part.alpha[..., None] + part.beta[:, None, :] - product * part.epsilon[:, None, None]
        entropy = (plan * log_plan.masked_fill(log_plan.isinf(), 0.0)).sum((1, 2))
        cost = (plan * costs).sum((1, 2))
        error = _marginal_error(plan.sum(-1), plan.sum(-2), part).detach()
        return cost, cost + part.epsilon * entropy, error, iterations

    parts = [
        checkpoint(solve, *part.tensors(), use_reentrant=False, preserve_rng_state=False) for part in _chunks(problems)
    ]
    return _joined(parts)
