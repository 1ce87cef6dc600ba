"""Sinkhorn's iterations in the log domain, for many problems at once.

Costs are alpha_i + beta_j - x_i·y_j, and what depends on one token alone vanishes into its potential. So
    log pi_ij = f_i + g_j + x_i·y_j / epsilon,
and the two half-steps are f = log a - LSE_j(g + x·y/epsilon) and g = log b - LSE_i(f + x·y/epsilon). Only f and g
outlive a half-step: problems are taken in chunks whose matrices fit a fixed budget, and a problem larger than the
budget in tiles whose products are computed anew. Memory is linear in the number of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alignattn.matching import kernels
from alignattn.matching.opaque import opaque
from alignattn.matching.tokens import MATRIX_ELEMENTS, chunks_of

if TYPE_CHECKING:
    from alignattn.matching.kernels.stored_scores import StoredScores

TIMES_TOKENS = 4  # scores that kernels hold, as a multiple of queries and keys: memory stays linear in their number
LOOK_EVERY = 10  # iterations, whether all problems are done: to look costs an accelerator its queue


@dataclass
class Problems:
    """Transport problems with cost alpha_i + beta_j - x_i·y_j, all heads of all samples in one axis p."""

    x: Float[Tensor, "p n d"]
    y: Float[Tensor, "p m d"]
    alpha: Float[Tensor, "p n"]
    beta: Float[Tensor, "p m"]
    log_a: Float[Tensor, "p n"]  # log marginals, -inf for padded tokens
    log_b: Float[Tensor, "p m"]
    epsilon: Float[Tensor, " p"]
    products: str = field(default=kernels.EXACT, kw_only=True)  # how kernels make them

    def __getitem__(self, part: slice) -> "Problems":
        return Problems(*(tensor[part] for tensor in self.tensors()), products=self.products)

    def of_queries(self) -> "Problems":
        """Of the queries with themselves."""
        return self._of_one(self.x, self.alpha, self.log_a)

    def of_keys(self) -> "Problems":
        """Of the keys with themselves."""
        return self._of_one(self.y, self.beta, self.log_b)

    def _of_one(self, tokens: Tensor, own: Tensor, log_marginal: Tensor) -> "Problems":
        return Problems(
            tokens, tokens, own, own, log_marginal, log_marginal, torch.ones_like(self.epsilon), products=self.products
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.y, self.alpha, self.beta, self.log_a, self.log_b, self.epsilon

    def detached(self) -> "Problems":
        return Problems(*(tensor.detach() for tensor in self.tensors()), products=self.products)


# Sums of a plan's rows and what they carry; the same of columns; sum pi log pi.
Carried = tuple[
    tuple[Float[Tensor, "p n"], Float[Tensor, "p n d"]],
    tuple[Float[Tensor, "p m"], Float[Tensor, "p m d"]],
    Float[Tensor, " p"],
]
Solved = tuple[Float[Tensor, "p n"], Float[Tensor, "p m"], Int[Tensor, " p"]]


@runtime_checkable
class Scores(Protocol):
    """x·y/epsilon of some problems, and what Sinkhorn takes of it."""

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> Solved:
        """Potentials f and g, beginning with this g, and the number of iterations each problem took."""

    def carry(self, f: Tensor, g: Tensor) -> Carried:
        """Of the plan exp(f_i + g_j + x_i·y_j/epsilon)."""


def _scores(problems: Problems) -> Scores:
    if not kernels.serve(problems.x):
        size = problems.x.shape[1] * problems.y.shape[1] * len(problems.x)
        in_cache = problems.x.device.type == "cpu" and size <= MATRIX_ELEMENTS["cpu"]
        return _Exponentials(problems) if in_cache and not torch.compiler.is_compiling() else _Scores(problems)
    from alignattn.matching.kernels.sinkhorn import StreamedScores

    return StreamedScores(problems.x, problems.y, problems.epsilon, problems.products)


def _are_stored(problems: Problems) -> bool:
    """Whether kernels hold scores in memory: where to read them is faster, and they are not many more than tokens."""
    if not kernels.serve(problems.x):
        return False
    from alignattn.matching.kernels import stored_scores

    (_, n, d), m = problems.x.shape, problems.y.shape[1]
    return n * m <= TIMES_TOKENS * (n + m) * d and stored_scores.pay(n, m, problems.products)


def _stored_scores(problems: Problems) -> "StoredScores":
    from alignattn.matching.kernels.stored_scores import StoredScores

    return StoredScores(problems.x, problems.y, problems.epsilon)


class _Iterated:
    """Sinkhorn's iterations, of log-sums along rows and columns."""

    def log_sum(self, potential: Tensor, *, transposed: bool = False) -> Tensor:
        """LSE_j( g_j + x_i·y_j/epsilon ) for each query; transposed: LSE_i( f_i + x_i·y_j/epsilon ) for each key."""
        raise TypeError(f"{type(self).__name__} must define log_sum().")

    def solve(
        self, log_a: Tensor, log_b: Tensor, g: Tensor, max_iterations: int, tolerance: float, look_every: int
    ) -> Solved:
        """Each iteration sets f, then g, so that the columns are right and the rows tell the error. The next f tells
        it for free: the row sums of a plan are a_i exp(f_i - f_i'). A problem that is within the tolerance moves no
        more, so its result does not depend on the others in its chunk.
        """
        traced = torch.compiler.is_compiling()  # cannot look; nothing moves once all are done
        valid, f = log_a.isfinite(), log_a
        done = torch.zeros_like(g[:, 0], dtype=torch.bool)
        iterations = torch.zeros_like(done, dtype=torch.int64)
        for iteration in range(max_iterations):
            new_f = log_a - self.log_sum(g)
            if iteration:
                off = torch.expm1((f - new_f).detach().masked_fill(~valid, 0.0)).abs().amax(-1)
                done = done | (off <= tolerance)
                if not traced and iteration % look_every == 0 and done.all():
                    break
            f = torch.where(done[:, None], f, new_f)
            g = torch.where(done[:, None], g, log_b - self.log_sum(f, transposed=True))
            iterations += ~done
        return f, g, iterations


class _Scores(_Iterated):
    """With matrices: of a chunk of problems.

    If one tile holds it, it is kept, once for each direction: a log-sum-exp along rows that lie whole in memory is
    ten times faster on a CPU. Otherwise each tile is computed anew.
    """

    def __init__(self, problems: Problems) -> None:
        self.x, self.y = problems.x / problems.epsilon[:, None, None], problems.y
        self.tokens, self.epsilon = problems.x, problems.epsilon
        self.kept: dict[bool, Tensor] = {}
        if len(self.tiles()) == 1:
            scores = self.x @ self.y.mT  # (p, n, m)
            self.kept = {False: scores, True: scores.mT.contiguous()}

    def tiles(self, *, transposed: bool = False) -> list[slice]:
        """Ranges of rows, each of which fits the budget of one matrix."""
        rows, columns = (self.y, self.x) if transposed else (self.x, self.y)
        step = chunks_of(rows.shape[1], columns.shape[1] * len(rows), rows.device)
        return [slice(start, start + step) for start in range(0, rows.shape[1], step)]

    def tile(self, rows: slice, *, transposed: bool = False) -> Float[Tensor, "p t c"]:
        if self.kept:
            return self.kept[transposed]
        return self.y[:, rows] @ self.x.mT if transposed else self.x[:, rows] @ self.y.mT

    def log_sum(self, potential: Float[Tensor, "p c"], *, transposed: bool = False) -> Float[Tensor, "p r"]:
        tiles = self.tiles(transposed=transposed)
        parts = [torch.logsumexp(self.tile(t, transposed=transposed) + potential[:, None, :], -1) for t in tiles]
        return torch.cat(parts, 1)

    def carry(self, f: Float[Tensor, "p n"], g: Float[Tensor, "p m"]) -> Carried:
        x, y = self.tokens, self.y
        rows, to_keys = torch.empty_like(f), torch.empty_like(x)
        columns, to_queries = torch.zeros_like(g), torch.zeros_like(y)
        for tile in self.tiles():
            plan = torch.exp(self.tile(tile) + f[:, tile, None] + g[:, None, :])  # (p, t, m)
            rows[:, tile], to_keys[:, tile] = plan.sum(-1), plan @ y
            columns += plan.sum(-2)
            to_queries += plan.mT @ x[:, tile]
        entropy = _entropy(rows, columns, (x * to_keys).sum((1, 2)) / self.epsilon, f, g)
        return (rows, to_keys), (columns, to_queries), entropy


class _Exponentials(_Iterated):
    """The same on a CPU, with one exponential of each score for all iterations: K = exp(x·y/epsilon - largest of row).

    A log-sum-exp is then the logarithm of a product of K and a vector. What vanishes in K or in the vector is below
    1e-37 of the largest: so where a sum is above LEAST nothing that counts was lost. Where one is not, all are taken
    as above from then on.
    """

    LEAST = 1e-20

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        scores = (problems.x / problems.epsilon[:, None, None]) @ problems.y.mT  # (p, n, m)
        self.largest = scores.amax(-1)  # (p, n)
        self.kernel = scores.sub_(self.largest[..., None]).exp_()
        self.exact: _Scores | None = None

    def log_sum(self, potential: Float[Tensor, "p c"], *, transposed: bool = False) -> Float[Tensor, "p r"]:
        if self.exact is None:
            shifted = potential + self.largest if transposed else potential
            most = shifted.amax(-1, keepdim=True)
            weights = (shifted - most).exp()[:, None]  # a row: the same product with a column takes seven times as long
            sums = (weights @ (self.kernel if transposed else self.kernel.mT))[:, 0]
            if sums.min() >= self.LEAST:
                return sums.log() + most if transposed else sums.log() + most + self.largest
            self._give_up()
        assert self.exact is not None
        return self.exact.log_sum(potential, transposed=transposed)

    def carry(self, f: Float[Tensor, "p n"], g: Float[Tensor, "p m"]) -> Carried:
        if self.exact is None:
            of_rows = f + self.largest
            apart = (of_rows.amax(-1, keepdim=True) - g.amax(-1, keepdim=True)) / 2  # both are of one size then
            u, v = (of_rows - apart).exp(), (g + apart).exp()
            if all(w.masked_fill(w == 0, 1.0).min() >= self.LEAST for w in (u, v)) and not self._lost(f, g, u, v):
                plan = self.kernel.mul(u[..., None]).mul_(v[:, None, :])
                x, y, epsilon = self.problems.x, self.problems.y, self.problems.epsilon
                rows, columns, to_keys = plan.sum(-1), plan.sum(-2), plan @ y
                entropy = _entropy(rows, columns, (x * to_keys).sum((1, 2)) / epsilon, f, g)
                return (rows, to_keys), (columns, plan.mT @ x), entropy
            self._give_up()
        assert self.exact is not None
        return self.exact.carry(f, g)

    @staticmethod
    def _lost(f: Tensor, g: Tensor, u: Tensor, v: Tensor) -> bool:
        """Whether a token that has mass got none."""
        return bool(((u == 0) & f.isfinite()).any() | ((v == 0) & g.isfinite()).any())

    def _give_up(self) -> None:
        self.exact = _Scores(self.problems)
        del self.kernel


def _entropy(rows: Tensor, columns: Tensor, product: Tensor, f: Tensor, g: Tensor) -> Float[Tensor, " p"]:
    """Of a plan whose sums these are, sum pi log pi = sum pi (f + g + s): to the last bit the same plan, as with sharp
    plans f, g and s are large and cancel.
    """
    by_rows = (rows * f.masked_fill(f.isinf(), 0.0)).sum(-1)
    by_columns = (columns * g.masked_fill(g.isinf(), 0.0)).sum(-1)
    return by_rows + by_columns + product


def _sinkhorn(problems: Problems, scores: "Scores", max_iterations: int, tolerance: float) -> Solved:
    """Potentials f and g, and the number of iterations each problem took."""
    look_every = 1 if problems.x.device.type == "cpu" else LOOK_EVERY
    g = problems.log_b - problems.beta / problems.epsilon[:, None]  # potential zero
    return scores.solve(problems.log_a, problems.log_b, g, max_iterations, tolerance, look_every)


def with_fixed_plan(problems: Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost with the plan as a constant: the gradient is that of the regularised value, by the envelope theorem."""
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in problems.tensors())
    if not differentiated and _are_stored(problems):
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
    """The same without anything to differentiate: nothing is carried."""
    parts = []
    for part in _chunks(problems):
        scores = _stored_scores(part)
        f, g, iterations = _sinkhorn(part, scores, max_iterations, tolerance)
        parts.append((*scores.value(f, g, part.log_a, part.log_b, part.alpha, part.beta), iterations))
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
    score = _stored_scores if _are_stored(problems) else _scores
    streamed = kernels.serve(x) and score is _scores  # no matrix is held: all are solved at once
    parts = [problems] if streamed else _chunks(problems)
    return _joined([_plan_statistics(part, score(part), max_iterations, tolerance) for part in parts])  # type: ignore[return-value]


def _plan_statistics(problems: Problems, scores: Scores, max_iterations: int, tolerance: float) -> Statistics:
    """Row and column sums of the plan, what it carries to either side, sum pi log pi, and how it was reached."""
    f, g, iterations = _sinkhorn(problems, scores, max_iterations, tolerance)
    (rows, to_keys), (columns, to_queries), entropy = scores.carry(f, g)
    error = _marginal_error(rows, columns, problems)
    return rows, columns, to_keys, to_queries, entropy, error, iterations


def _marginal_error(rows: Float[Tensor, "p n"], columns: Float[Tensor, "p m"], problems: Problems) -> Tensor:
    errors = []
    for sums, log_marginal in ((rows, problems.log_a), (columns, problems.log_b)):
        valid = log_marginal.isfinite()
        off = (sums / log_marginal.masked_fill(~valid, 0.0).exp() - 1).abs()
        errors.append(off.masked_fill(~valid, 0.0).amax(-1))
    return torch.maximum(errors[0], errors[1])


def unrolled(problems: Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost differentiated through the iterations. Holds n×m numbers for each of them, for one chunk at a time."""

    def solve(*tensors: Tensor) -> tuple[Tensor, ...]:
        part = Problems(*tensors)
        scores = _Scores(part)
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
