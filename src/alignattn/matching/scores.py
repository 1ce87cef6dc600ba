"""Scores of transport problems in torch, and Sinkhorn's iterations with them, in the log domain.

Costs are alpha_i + beta_j - x_i·y_j, and what depends on one token alone vanishes into its potential. So
    log pi_ij = f_i + g_j + s_ij,   s_ij = x_i·y_j / epsilon,
and the two half-steps are f = log a - LSE_j(g + s) and g = log b - LSE_i(f + s). Only f and g outlive a half-step. The
same on accelerators: kernels/sinkhorn.py, kernels/stored_scores.py.
"""

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alignattn.matching import kernels
from alignattn.matching.tokens import chunks_of


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
        """Potentials f and g, as `carry` takes them, and the number of iterations each problem took.

        Begins with this g.
        """

    def carry(self, f: Tensor, g: Tensor) -> Carried:
        """Of the plan exp(f_i + g_j + x_i·y_j/epsilon)."""


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


class MatrixScores(_Iterated):
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
            logarithm = (self.tile(tile) + f[:, tile, None]).add_(g[:, None, :])
            plan = logarithm.clamp_(max=0.0).exp_()  # (p, t, m), never above one: more is rounding of large potentials
            rows[:, tile], to_keys[:, tile] = plan.sum(-1), plan @ y
            columns += plan.sum(-2)
            to_queries += plan.mT @ x[:, tile]
        entropy = _entropy(rows, columns, (x * to_keys).sum((1, 2)) / self.epsilon, f, g)
        return (rows, to_keys), (columns, to_queries), entropy


class ExponentialScores(_Iterated):
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
        self.exact: MatrixScores | None = None

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
        self.exact = MatrixScores(self.problems)
        del self.kernel


def _entropy(rows: Tensor, columns: Tensor, product: Tensor, f: Tensor, g: Tensor) -> Float[Tensor, " p"]:
    """Of a plan whose sums these are, sum pi log pi = sum pi (f + g + s): to the last bit the same plan, as with sharp
    plans f, g and s are large and cancel.
    """
    by_rows = (rows * f.masked_fill(f.isinf(), 0.0)).sum(-1)
    by_columns = (columns * g.masked_fill(g.isinf(), 0.0)).sum(-1)
    return by_rows + by_columns + product
