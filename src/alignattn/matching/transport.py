"""Entropic optimal transport between queries and keys.

    OT = sum_ij c(q_i, k_j) pi_ij,    pi = argmin sum_ij c pi + epsilon sum_ij pi log pi
    subject to sum_j pi_ij = 1/n, sum_i pi_ij = 1/m over the valid tokens

Zhang et al. 2021, section 2.3.2 (which prints the entropy with the other sign and swaps the marginals). The paper
leaves the cost open: `cosine` is 1 - cos(q, k), `sqeuclidean` is |q - k|²/(2d).

Both costs are c_ij = alpha_i + beta_j - x_i·y_j, and what depends on one token alone vanishes into its potential. So
    log pi_ij = f_i + g_j + x_i·y_j / epsilon,
and Sinkhorn's two half-steps are f = log a - LSE_j(g + x·y/epsilon) and g = log b - LSE_i(f + x·y/epsilon). Only f
and g outlive a half-step: problems are taken in chunks whose matrices fit a fixed budget, and a problem larger than
the budget in tiles whose products are computed anew. Memory is linear in the number of tokens.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from alignattn.errors import ConfigError, unknown
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.tokens import (
    check_pair,
    checked,
    chunks_of,
    direction,
    full_precision,
    samples_with_tokens,
    without_empty,
    zero_where_empty,
)

COSTS = ("cosine", "sqeuclidean", "half_sqeuclidean")
GRADIENTS = ("plan", "unrolled")


@dataclass(frozen=True)
class TransportResult:
    """What Sinkhorn reached, for each problem."""

    cost: Float[Tensor, "b h"]  # sum c pi
    regularised: Float[Tensor, "b h"]  # sum c pi + epsilon sum pi log pi
    marginal_error: Float[Tensor, "b h"]  # the largest relative error of any token's marginal
    iterations: Int[Tensor, "b h"]
    epsilon: Float[Tensor, "b h"]


@dataclass(frozen=True, kw_only=True)
class TransportConfig(MatcherConfig):
    """Options of method "ot"."""

    cost: str = "cosine"  # or "sqeuclidean" = |q-k|²/(2d), or "half_sqeuclidean" = |q-k|²/2
    epsilon: float = 0.01  # entropic regularisation, in units of the cost
    relative_epsilon: bool = False  # epsilon in units of the problem's mean cost instead
    max_iterations: int = 100  # a problem may be far from converged then: marginal_error tells
    tolerance: float = 1e-3  # stop when no marginal is off by more than this share
    gradient: str = "plan"  # plan held fixed: exact for the regularised value; "unrolled": exact for the cost
    debiased: bool = False  # regularised(q,k) - regularised(q,q)/2 - regularised(k,k)/2, as in the released code

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.cost, self.epsilon, self.max_iterations, self.tolerance, self.gradient)


def check_settings(cost: str, epsilon: float, max_iterations: int, tolerance: float, gradient: str) -> None:
    """Raise for settings that Sinkhorn cannot run with."""
    for name, value, allowed in (("cost", cost, COSTS), ("gradient", gradient, GRADIENTS)):
        if value not in allowed:
            raise unknown(name, value, allowed)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"epsilon must be > 0 and finite, got {epsilon}. The paper uses 0.01.")
    if max_iterations < 1:
        raise ConfigError(f"max_iterations must be >= 1, got {max_iterations}. The default is 100.")
    if not tolerance >= 0:
        raise ConfigError(f"tolerance must be >= 0, got {tolerance}. The default is 1e-3.")


@checked(check_pair)
@full_precision
def optimal_transport(
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    *,
    cost: str = "cosine",
    epsilon: float = 0.01,
    relative_epsilon: bool = False,
    max_iterations: int = 100,
    tolerance: float = 1e-3,
    gradient: str = "plan",
    query_mask: Bool[Tensor, "b n"] | None = None,
    key_mask: Bool[Tensor, "b m"] | None = None,
) -> TransportResult:
    """Entropic transport of queries [b, h, n, d] onto keys [b, h, m, d], each problem for itself."""
    check_settings(cost, epsilon, max_iterations, tolerance, gradient)
    samples, heads = query.shape[:2]
    alive = samples_with_tokens(query_mask, key_mask)
    query_mask, key_mask, (query, key) = without_empty(query_mask, key_mask, (query, True), (key, False))
    problems = _inner_product_form(cost, query, key, query_mask, key_mask)
    if relative_epsilon:
        problems.epsilon = _relative(problems, epsilon)
    else:
        problems.epsilon.fill_(epsilon)
    solve = _unrolled if gradient == "unrolled" else _with_fixed_plan
    values, regularised, error, iterations = (
        t.view(samples, heads) for t in solve(problems, max_iterations, tolerance)
    )
    return TransportResult(
        cost=zero_where_empty(values, alive),
        regularised=zero_where_empty(regularised, alive),
        marginal_error=zero_where_empty(error, alive),
        iterations=iterations,
        epsilon=problems.epsilon.view(samples, heads),
    )


@dataclass
class _Problems:
    """Transport problems with cost alpha_i + beta_j - x_i·y_j, all heads of all samples in one axis p."""

    x: Float[Tensor, "p n d"]
    y: Float[Tensor, "p m d"]
    alpha: Float[Tensor, "p n"]
    beta: Float[Tensor, "p m"]
    log_a: Float[Tensor, "p n"]  # log marginals, -inf for padded tokens
    log_b: Float[Tensor, "p m"]
    epsilon: Float[Tensor, " p"]

    def __getitem__(self, part: slice) -> "_Problems":
        return _Problems(*(tensor[part] for tensor in self.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.y, self.alpha, self.beta, self.log_a, self.log_b, self.epsilon

    def detached(self) -> "_Problems":
        return _Problems(*(tensor.detach() for tensor in self.tensors()))


def _inner_product_form(
    cost: str,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
) -> _Problems:
    log_a, log_b = (_log_uniform(t, m) for t, m in ((query, query_mask), (key, key_mask)))
    if cost == "cosine":
        x, y = direction(query), direction(key)
        alpha, beta = torch.ones_like(log_a), torch.zeros_like(log_b)
    else:
        scale = 1 / math.sqrt(query.shape[-1]) if cost == "sqeuclidean" else 1.0
        # Distances know no origin: around the common mean the products are small, and so is their rounding.
        origin = sum((t.detach() * w.exp()[..., None]).sum(2, keepdim=True) for t, w in ((query, log_a), (key, log_b)))
        limit = torch.finfo(query.dtype).max ** 0.2  # 5e7 in fp32: costs over epsilon, and their gradients, stay finite
        x, y = (((t - origin / 2) * scale).clamp(-limit, limit) for t in (query, key))
        if query_mask is not None:
            x = x.masked_fill(~query_mask[:, None, :, None], 0.0)
        if key_mask is not None:
            y = y.masked_fill(~key_mask[:, None, :, None], 0.0)
        alpha, beta = x.square().sum(-1) / 2, y.square().sum(-1) / 2
    x, y, alpha, beta, log_a, log_b = (t.flatten(0, 1) for t in (x, y, alpha, beta, log_a, log_b))
    return _Problems(x, y, alpha, beta, log_a, log_b, epsilon=x.new_ones(len(x)))


def _log_uniform(tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h n"]:
    samples, heads, count, _ = tokens.shape
    if mask is None:
        return tokens.new_full((samples, heads, count), -math.log(count))
    logs = tokens.new_zeros(samples, count).masked_fill(~mask, float("-inf"))
    return (logs - mask.sum(-1, keepdim=True).to(logs.dtype).log())[:, None].expand(-1, heads, -1)


@torch.no_grad()
def _relative(problems: _Problems, epsilon: float) -> Float[Tensor, " p"]:
    """Epsilon times the mean cost of each problem."""
    a, b = problems.log_a.exp(), problems.log_b.exp()
    of_tokens = (a * problems.alpha).sum(-1) + (b * problems.beta).sum(-1)
    of_pairs = ((a[..., None] * problems.x).sum(1) * (b[..., None] * problems.y).sum(1)).sum(-1)
    # Where all tokens meet the mean cost is rounding, or zero: no plan is better than another, and none may divide by
    # it.
    rounding: Tensor = 8 * torch.finfo(a.dtype).eps * of_tokens + torch.finfo(a.dtype).tiny ** 0.5
    mean: Tensor = (of_tokens - of_pairs).clamp_min(0.0)
    return epsilon * mean + rounding


class _Scores:
    """x·y/epsilon of a chunk of problems, and the two sums that Sinkhorn takes of it.

    If one tile holds it, it is kept, once for each direction: a log-sum-exp along rows that lie whole in memory is
    ten times faster on a CPU. Otherwise each tile is computed anew.
    """

    def __init__(self, problems: _Problems) -> None:
        self.x, self.y = problems.x / problems.epsilon[:, None, None], problems.y
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
        """LSE_j( g_j + x_i·y_j/epsilon ) for each query; transposed: LSE_i( f_i + x_i·y_j/epsilon ) for each key."""
        tiles = self.tiles(transposed=transposed)
        parts = [torch.logsumexp(self.tile(t, transposed=transposed) + potential[:, None, :], -1) for t in tiles]
        return torch.cat(parts, 1)


def _sinkhorn(
    problems: _Problems, scores: _Scores, max_iterations: int, tolerance: float
) -> tuple[Float[Tensor, "p n"], Float[Tensor, "p m"], Int[Tensor, " p"]]:
    """Potentials f and g, and the number of iterations each problem took.

    Each iteration sets f, then g, so that the columns are right and the rows tell the error. The next f tells it for
    free: the row sums of a plan are a_i exp(f_i - f_i'). A problem that is within the tolerance moves no more, so its
    result does not depend on the others in its chunk.
    """
    look_every = 1 if problems.x.device.type == "cpu" else 10  # to look costs an accelerator its queue
    valid = problems.log_a.isfinite()
    done = torch.zeros_like(problems.epsilon, dtype=torch.bool)
    iterations = torch.zeros_like(done, dtype=torch.int64)
    f = problems.log_a
    g = problems.log_b - problems.beta / problems.epsilon[:, None]  # potential zero
    for iteration in range(max_iterations):
        new_f = problems.log_a - scores.log_sum(g)
        if iteration:
            off = torch.expm1((f - new_f).detach().masked_fill(~valid, 0.0)).abs().amax(-1)
            done = done | (off <= tolerance)
            if iteration % look_every == 0 and done.all():
                break
        f = torch.where(done[:, None], f, new_f)
        g = torch.where(done[:, None], g, problems.log_b - scores.log_sum(f, transposed=True))
        iterations += ~done
    return f, g, iterations


def _with_fixed_plan(problems: _Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost with the plan as a constant: the gradient is that of the regularised value, by the envelope theorem."""
    step = chunks_of(len(problems.x), problems.x.shape[1] * problems.y.shape[1], problems.x.device)
    constants = problems.detached()
    parts = [
        _plan_statistics(constants[start : start + step], max_iterations, tolerance)
        for start in range(0, len(problems.x), step)
    ]
    rows, columns, to_keys, to_queries, entropy, error, iterations = (torch.cat(t) for t in zip(*parts, strict=True))
    # sum_ij x_i·y_j pi_ij is both sum_i x_i·to_keys_i and sum_j y_j·to_queries_j; each carries its own gradient.
    of_queries = (problems.x * to_keys).sum((1, 2))
    of_keys = (problems.y * to_queries).sum((1, 2))
    product = of_queries + of_keys - of_keys.detach()
    cost = (rows * problems.alpha).sum(-1) + (columns * problems.beta).sum(-1) - product
    return cost, cost + problems.epsilon * entropy, error, iterations


@torch.no_grad()
def _plan_statistics(problems: _Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Row and column sums of the plan, what it carries to either side, sum pi log pi, and how it was reached."""
    scores = _Scores(problems)
    f, g, iterations = _sinkhorn(problems, scores, max_iterations, tolerance)
    rows, to_keys = torch.empty_like(f), torch.empty_like(problems.x)
    columns, to_queries = torch.zeros_like(g), torch.zeros_like(problems.y)
    for tile in scores.tiles():
        plan = torch.exp(scores.tile(tile) + f[:, tile, None] + g[:, None, :])  # (p, t, m)
        rows[:, tile], to_keys[:, tile] = plan.sum(-1), plan @ problems.y
        columns += plan.sum(-2)
        to_queries += plan.mT @ problems.x[:, tile]
    entropy = (
        (rows * f.masked_fill(f.isinf(), 0.0)).sum(-1)
        + (columns * g.masked_fill(g.isinf(), 0.0)).sum(-1)
        + (problems.x * to_keys).sum((1, 2)) / problems.epsilon
    )
    error = _marginal_error(rows, columns, problems)
    return rows, columns, to_keys, to_queries, entropy, error, iterations


def _marginal_error(rows: Float[Tensor, "p n"], columns: Float[Tensor, "p m"], problems: _Problems) -> Tensor:
    errors = []
    for sums, log_marginal in ((rows, problems.log_a), (columns, problems.log_b)):
        valid = log_marginal.isfinite()
        off = (sums / log_marginal.masked_fill(~valid, 0.0).exp() - 1).abs()
        errors.append(off.masked_fill(~valid, 0.0).amax(-1))
    return torch.maximum(errors[0], errors[1])


def _unrolled(problems: _Problems, max_iterations: int, tolerance: float) -> tuple[Tensor, ...]:
    """Cost differentiated through the iterations. Holds n×m numbers for each of them, for one chunk at a time."""
    step = chunks_of(len(problems.x), problems.x.shape[1] * problems.y.shape[1], problems.x.device)

    def solve(*tensors: Tensor) -> tuple[Tensor, ...]:
        part = _Problems(*tensors)
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

    parts = []
    for start in range(0, len(problems.x), step):
        tensors = problems[start : start + step].tensors()
        parts.append(checkpoint(solve, *tensors, use_reentrant=False, preserve_rng_state=False))
    return tuple(torch.cat(t) for t in zip(*parts, strict=True))


class TransportMatcher(Matcher):
    """Optimal transport has nothing to learn: queries and keys descend the cost of the plan between them."""

    config: TransportConfig

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        sides = {"q": (query.flatten(0, 1), query_mask), "k": (key.flatten(0, 1), key_mask)}

        def solve(first: str, second: str) -> TransportResult:
            (query, query_mask), (key, key_mask) = sides[first], sides[second]
            config = self.config
            return optimal_transport(
                query,
                key,
                cost=config.cost,
                epsilon=config.epsilon,
                relative_epsilon=config.relative_epsilon,
                max_iterations=config.max_iterations,
                tolerance=config.tolerance,
                gradient=config.gradient,
                query_mask=query_mask,
                key_mask=key_mask,
            )

        if not self.config.debiased:
            return solve("q", "k").cost
        return solve("q", "k").regularised - (solve("q", "q").regularised + solve("k", "k").regularised) / 2
