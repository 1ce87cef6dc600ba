"""Reference implementations to test against: NumPy float64, one problem at a time, padded tokens deleted.

Nothing here is fast, and nothing here is shared with the package.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import ot
import torch

FLOAT64_GUARD = 8 * np.finfo(np.float64).eps
FLOAT32_GUARD = 8 * float(np.finfo(np.float32).eps)

Array = np.ndarray


def as_array(tensor: torch.Tensor) -> Array:
    return tensor.detach().to(torch.float64).numpy()


def per_problem(
    single: Callable[..., float],
    query_side: Sequence[torch.Tensor],
    key_side: Sequence[torch.Tensor],
    query_mask: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """single(*query_side, *key_side) for every sample and head, with the padded tokens removed from each argument."""
    batch, heads, queries = query_side[0].shape[:3]
    keys = key_side[0].shape[2]
    values = torch.zeros(batch, heads, dtype=torch.float64)
    for b in range(batch):
        kept_queries = [i for i in range(queries) if query_mask is None or bool(query_mask[b, i])]
        kept_keys = [j for j in range(keys) if key_mask is None or bool(key_mask[b, j])]
        for h in range(heads):
            arguments = [as_array(side[b, h])[kept_queries] for side in query_side]
            arguments += [as_array(side[b, h])[kept_keys] for side in key_side]
            values[b, h] = single(*arguments)
    return values


# ---- costs


def cosine_cost(query: Array, key: Array, guard: float = FLOAT64_GUARD) -> Array:
    cost = np.zeros((len(query), len(key)))
    for i, q in enumerate(query):
        for j, k in enumerate(key):
            lengths = math.sqrt(float(q @ q) + guard) * math.sqrt(float(k @ k) + guard)
            cost[i, j] = 1 - float(q @ k) / lengths
    return cost


def sqeuclidean_cost(query: Array, key: Array) -> Array:
    cost = np.zeros((len(query), len(key)))
    for i, q in enumerate(query):
        for j, k in enumerate(key):
            cost[i, j] = float((q - k) @ (q - k)) / (2 * len(q))
    return cost


COSTS = {"cosine": cosine_cost, "sqeuclidean": sqeuclidean_cost}


# ---- optimal transport


def log_sum_exp(values: Array) -> float:
    top = float(np.max(values))
    return top + math.log(float(np.sum(np.exp(values - top))))


def sinkhorn_plan(cost: Array, epsilon: float, max_iterations: int = 20_000, threshold: float = 1e-13) -> Array:
    """The plan minimising sum c pi + epsilon sum pi log pi, uniform marginals."""
    n, m = cost.shape
    f, g = np.zeros(n), np.zeros(m)
    for _ in range(max_iterations):
        for i in range(n):
            f[i] = -epsilon * (log_sum_exp((g - cost[i]) / epsilon) + math.log(n))
        for j in range(m):
            g[j] = -epsilon * (log_sum_exp((f - cost[:, j]) / epsilon) + math.log(m))
        plan = np.exp((f[:, None] + g[None, :] - cost) / epsilon)
        if np.max(np.abs(plan.sum(1) * n - 1)) < threshold:
            break
    return plan


def sinkhorn_plan_in_memory(cost: torch.Tensor, epsilon: float, iterations: int = 12) -> torch.Tensor:
    """The same for a matrix that is too large for loops."""
    n, m = cost.shape
    f, g = torch.zeros(n, dtype=cost.dtype), torch.zeros(m, dtype=cost.dtype)
    for _ in range(iterations):
        f = -epsilon * (torch.logsumexp((g - cost) / epsilon, 1) + math.log(n))
        g = -epsilon * (torch.logsumexp((f[:, None] - cost) / epsilon, 0) + math.log(m))
    return torch.exp((f[:, None] + g - cost) / epsilon)


def transport(
    query: Array, key: Array, *, cost: str, epsilon: float, relative: bool = False, **options: float
) -> tuple[float, float]:
    """(sum c pi, sum c pi + epsilon sum pi log pi); zeros where a side has no tokens."""
    if len(query) == 0 or len(key) == 0:
        return 0.0, 0.0
    matrix = COSTS[cost](query, key)
    epsilon = epsilon * float(matrix.mean()) if relative else epsilon
    plan = sinkhorn_plan(matrix, epsilon, **options)
    entropy = sum(p * math.log(p) for p in plan.ravel() if p > 0)
    paid = float((matrix * plan).sum())
    return paid, paid + epsilon * entropy


def exact_transport(query: Array, key: Array, *, cost: str) -> float:
    if len(query) == 0 or len(key) == 0:
        return 0.0
    weights_query, weights_key = np.full(len(query), 1 / len(query)), np.full(len(key), 1 / len(key))
    return float(ot.emd2(weights_query, weights_key, COSTS[cost](query, key)))


# ---- conditional transport


def conditional_transport(
    critic_query: Array, navigator_query: Array, critic_key: Array, navigator_key: Array
) -> float:
    n, m = len(critic_query), len(critic_key)
    if n == 0 or m == 0:
        return 0.0
    cost = cosine_cost(critic_query, critic_key)

    def expected(costs: Array, scores: Array) -> float:
        weights = [math.exp(score - max(scores)) for score in scores]
        return sum(weight * c for weight, c in zip(weights, costs, strict=True)) / sum(weights)

    forward = sum(expected(cost[i], [float(navigator_query[i] @ k) for k in navigator_key]) for i in range(n)) / n
    backward = sum(expected(cost[:, j], [float(navigator_key[j] @ q) for q in navigator_query]) for j in range(m)) / m
    return 0.5 * forward + 0.5 * backward


# ---- adversarial


def adversarial(query_logits: Array, key_logits: Array) -> float:
    if len(query_logits) == 0 or len(key_logits) == 0:
        return 0.0
    log_d = [math.log(1 / (1 + math.exp(-logit))) for logit in query_logits]
    log_not_d = [math.log(1 - 1 / (1 + math.exp(-logit))) for logit in key_logits]
    return sum(log_d) / len(log_d) + sum(log_not_d) / len(log_not_d)


# ---- maximum mean discrepancy


def pooled_squared_distances(query: Array, key: Array) -> list[float]:
    pooled = [*query, *key]
    return [
        float((pooled[i] - pooled[j]) @ (pooled[i] - pooled[j])) for i in range(len(pooled)) for j in range(i)
    ]  # each pair of distinct tokens once


def squared_bandwidth_doubled(query: Array, key: Array, bandwidth: str | float) -> float:
    """2 s^2."""
    if not isinstance(bandwidth, str):
        return 2 * bandwidth**2
    distances = sorted(pooled_squared_distances(query, key))
    if bandwidth == "mean":
        return sum(distances) / len(distances)
    half = len(distances) // 2
    return distances[half] if len(distances) % 2 else (distances[half - 1] + distances[half]) / 2


def mmd(query: Array, key: Array, *, bandwidth: str | float, unbiased: bool) -> float:
    n, m = len(query), len(key)
    if min(n, m) < (2 if unbiased else 1):
        return 0.0
    scale = squared_bandwidth_doubled(query, key, bandwidth)

    def mean_kernel(left: Array, right: Array, skip_diagonal: bool) -> float:
        values = [
            math.exp(-float((x - y) @ (x - y)) / scale)
            for i, x in enumerate(left)
            for j, y in enumerate(right)
            if not (skip_diagonal and i == j)
        ]
        return sum(values) / len(values)

    within = mean_kernel(query, query, unbiased) + mean_kernel(key, key, unbiased)
    return within - 2 * mean_kernel(query, key, False)


# ---- finite differences


def finite_difference(function: Callable[[Array], float], at: Array, step: float = 1e-5) -> torch.Tensor:
    """Central differences of a scalar function, entry by entry."""
    gradient = np.zeros_like(at)
    for index in np.ndindex(*at.shape):
        above, below = at.copy(), at.copy()
        above[index] += step
        below[index] -= step
        gradient[index] = (function(above) - function(below)) / (2 * step)
    return torch.from_numpy(gradient)
