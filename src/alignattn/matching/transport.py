"""Entropic optimal transport between queries and keys.

    OT = sum_ij c(q_i, k_j) pi_ij,    pi = argmin sum_ij c pi + epsilon sum_ij pi log pi
    subject to sum_j pi_ij = 1/n, sum_i pi_ij = 1/m over the valid tokens

Zhang et al. 2021, section 2.3.2 (which prints the entropy with the other sign and swaps the marginals). The paper
leaves the cost open: `cosine` is 1 - cos(q, k), `sqeuclidean` is |q - k|²/(2d).

Both costs are c_ij = alpha_i + beta_j - x_i·y_j, the form that `sinkhorn.py` solves.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignattn.errors import ConfigError, checked, unknown
from alignattn.matching import kernels
from alignattn.matching.divergence import Asked, divergence
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.matching.scores import Problems
from alignattn.matching.sinkhorn import LOOK_EVERY, are_stored, unrolled, with_fixed_plan
from alignattn.matching.tokens import (
    check_pair,
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
    if cost != "cosine" and gradient == "plan" and not relative_epsilon and _are_values_alone(query, key):
        from alignattn.matching.kernels.values import values

        asked = Asked(_scale(cost, query), _limit(query), epsilon, max_iterations, tolerance, debiased=False)
        alive = samples_with_tokens(query_mask, key_mask)
        found = [one.view(-1, query.shape[1]) for one in values(query, key, query_mask, key_mask, asked)]
        return TransportResult(*(zero_where_empty(one, alive) for one in found[:3]), *found[3:])
    problems, alive = _prepared(cost, query, key, query_mask, key_mask)
    settings = (epsilon, relative_epsilon, max_iterations, tolerance, gradient)
    return _solved(problems, alive, query.shape[1], *settings)


def _are_values_alone(query: Tensor, key: Tensor) -> bool:
    """Whether kernels tell them from tokens, without anything to differentiate."""
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return False
    return kernels.serve(query) and kernels.serve(key) and are_stored(query.shape[2], key.shape[2], query)


def _prepared(
    cost: str, query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Problems, Bool[Tensor, " b"] | None]:
    """The problems of all heads in one axis, and which samples have tokens on both sides."""
    alive = samples_with_tokens(query_mask, key_mask)
    query_mask, key_mask, (query, key) = without_empty(query_mask, key_mask, (query, True), (key, False))
    return _inner_product_form(cost, query, key, query_mask, key_mask), alive


def _solved(
    problems: Problems,
    alive: Bool[Tensor, " b"] | None,
    heads: int,
    epsilon: float,
    relative_epsilon: bool,
    max_iterations: int,
    tolerance: float,
    gradient: str,
) -> TransportResult:
    if relative_epsilon:
        problems.epsilon = _relative(problems, epsilon)
    else:
        problems.epsilon.fill_(epsilon)
    solve = unrolled if gradient == "unrolled" else with_fixed_plan
    values, regularised, error, iterations = (t.view(-1, heads) for t in solve(problems, max_iterations, tolerance))
    return TransportResult(
        cost=zero_where_empty(values, alive),
        regularised=zero_where_empty(regularised, alive),
        marginal_error=zero_where_empty(error, alive),
        iterations=iterations,
        epsilon=problems.epsilon.view(-1, heads),
    )


def _inner_product_form(
    cost: str,
    query: Float[Tensor, "b h n d"],
    key: Float[Tensor, "b h m d"],
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
) -> Problems:
    log_a, log_b = (_log_uniform(t, m) for t, m in ((query, query_mask), (key, key_mask)))
    if cost == "cosine":
        x, y = direction(query), direction(key)
        alpha, beta = torch.full_like(log_a, 0.5), torch.full_like(log_b, 0.5)
    else:
        scale, limit = _scale(cost, query), _limit(query)
        # Distances know no origin: around the common mean the products are small, and so is their rounding.
        origin = (_mean(query.detach(), query_mask, log_a) + _mean(key.detach(), key_mask, log_b)) / 2
        x, y = ((t - origin if scale == 1 else (t - origin) * scale).clamp(-limit, limit) for t in (query, key))
        if query_mask is not None:
            x = x.masked_fill(~query_mask[:, None, :, None], 0.0)
        if key_mask is not None:
            y = y.masked_fill(~key_mask[:, None, :, None], 0.0)
        alpha, beta = x.square().sum(-1) / 2, y.square().sum(-1) / 2
    x, y, alpha, beta, log_a, log_b = (t.flatten(0, 1) for t in (x, y, alpha, beta, log_a, log_b))
    return Problems(x, y, alpha, beta, log_a, log_b, epsilon=x.new_ones(len(x)))


def _scale(cost: str, tokens: Tensor) -> float:
    """Of tokens whose cost is then |x - y|²/2."""
    return 1 / math.sqrt(tokens.shape[-1]) if cost == "sqeuclidean" else 1.0


def _limit(tokens: Tensor) -> float:
    """Of coordinates. 5e7 in fp32: costs over epsilon, and their gradients, stay finite."""
    return float(torch.finfo(tokens.dtype).max ** 0.2)


def _mean(
    tokens: Float[Tensor, "b h n d"], mask: Tensor | None, log_marginal: Float[Tensor, "b h n"]
) -> Float[Tensor, "b h 1 d"]:
    if mask is None:
        return tokens.mean(2, keepdim=True)
    return (tokens * log_marginal.exp()[..., None]).sum(2, keepdim=True)


def _log_uniform(tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h n"]:
    samples, heads, count, _ = tokens.shape
    if mask is None:
        return tokens.new_full((samples, heads, count), -math.log(count))
    logs = tokens.new_zeros(samples, count).masked_fill(~mask, float("-inf"))
    return (logs - mask.sum(-1, keepdim=True).to(logs.dtype).log())[:, None].expand(-1, heads, -1)


@torch.no_grad()
def _relative(problems: Problems, epsilon: float) -> Float[Tensor, " p"]:
    """Epsilon times the mean cost of each problem."""
    a, b = problems.log_a.exp(), problems.log_b.exp()
    of_tokens = (a * problems.alpha).sum(-1) + (b * problems.beta).sum(-1)
    of_pairs = ((a[..., None] * problems.x).sum(1) * (b[..., None] * problems.y).sum(1)).sum(-1)
    # Where all tokens meet the mean cost is rounding, or zero: no plan is better than another, and none may divide by
    # it.
    rounding: Tensor = 8 * torch.finfo(a.dtype).eps * of_tokens + torch.finfo(a.dtype).tiny ** 0.5
    mean: Tensor = (of_tokens - of_pairs).clamp_min(0.0)
    return epsilon * mean + rounding


class TransportMatcher(Matcher):
    """Optimal transport has nothing to learn: queries and keys descend the cost of the plan between them."""

    config: TransportConfig
    separable = separable_by_heads = replayable = True

    def is_replayable(self) -> bool:
        """With more iterations it asks the device whether all are done."""
        few = self.config.gradient == "plan" and self.config.max_iterations <= LOOK_EVERY
        return few and super().is_replayable()

    def _at_once(self) -> bool:
        """Whether kernels have one pass for it: of distances, and of few iterations, as nothing is asked between."""
        config = self.config
        plain = config.cost != "cosine" and config.gradient == "plan" and not config.relative_epsilon
        return plain and config.max_iterations <= LOOK_EVERY

    def losses(
        self,
        query: Float[Tensor, "l b h n d"],
        key: Float[Tensor, "l b h m d"],
        query_mask: Bool[Tensor, "lb n"] | None,
        key_mask: Bool[Tensor, "lb m"] | None,
        names: list[str],
    ) -> Float[Tensor, "lb h"]:
        config = self.config
        heads, scaled = query.shape[2], self.brought(query, key)
        query, key = query.flatten(0, 1), key.flatten(0, 1)
        if self._at_once() and kernels.serve(query) and kernels.serve(key):
            how = (config.epsilon, config.max_iterations, config.tolerance, config.debiased)
            asked = Asked(_scale(config.cost, query), _limit(query), *how)
            return divergence(query, key, query_mask, key_mask, asked, products=self.products, scaled=scaled)
        problems, alive = _prepared(config.cost, query, key, query_mask, key_mask)
        problems.products = self.products

        def solve(some: Problems) -> TransportResult:
            settings = (config.epsilon, config.relative_epsilon, config.max_iterations, config.tolerance)
            return _solved(some, alive, heads, *settings, config.gradient)

        if not config.debiased:
            return solve(problems).cost
        own = solve(problems.of_queries()).regularised + solve(problems.of_keys()).regularised
        return solve(problems).regularised - own / 2
