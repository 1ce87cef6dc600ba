"""Optimal transport, its value: closed forms, POT, geomloss, exact transport, naive loops."""

import functools
import math

import numpy as np
import oracles
import ot
import pytest
import torch
from geomloss import SamplesLoss
from problems import random_problem, right_padding

from alignattn.functional import optimal_transport

COSTS = ["cosine", "sqeuclidean"]
CONVERGED = {"max_iterations": 20_000, "tolerance": 1e-11}


def pairwise(query, key, cost):
    matrices = [[oracles.COSTS[cost](q.numpy(), k.numpy()) for q, k in zip(*s, strict=True)] for s in zip(query, key)]  # noqa: B905
    return torch.from_numpy(np.array(matrices))


def by_loops(query, key, *masks, **options):
    cost = oracles.per_problem(lambda q, k: oracles.transport(q, k, **options)[0], [query], [key], *masks)
    regularised = oracles.per_problem(lambda q, k: oracles.transport(q, k, **options)[1], [query], [key], *masks)
    return cost, regularised


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("epsilon", [1e-3, 1.0])
def test_single_points_give_their_cost(cost, epsilon):
    query, key = random_problem(n=1, m=1)
    result = optimal_transport(query, key, cost=cost, epsilon=epsilon)
    expected = pairwise(query, key, cost)[..., 0, 0]
    torch.testing.assert_close(result.cost, expected)
    torch.testing.assert_close(result.regularised, expected)  # 1 log 1 = 0


@pytest.mark.parametrize("cost", COSTS)
def test_one_query_pays_the_mean_cost_to_the_keys(cost):
    query, key = random_problem(n=1, m=7)
    result = optimal_transport(query, key, cost=cost, epsilon=0.01)
    expected = pairwise(query, key, cost).mean((-1, -2))
    torch.testing.assert_close(result.cost, expected)
    torch.testing.assert_close(result.regularised, expected - 0.01 * math.log(7))


@pytest.mark.parametrize("cost", COSTS)
def test_large_epsilon_gives_the_product_plan(cost):
    query, key = random_problem()
    result = optimal_transport(query, key, cost=cost, epsilon=1e6)
    torch.testing.assert_close(result.cost, pairwise(query, key, cost).mean((-1, -2)), rtol=1e-4, atol=1e-4)


def test_small_epsilon_in_one_dimension_gives_the_sorted_pairing():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    query = torch.arange(8, dtype=torch.float64)[order][None, None, :, None]
    key = (torch.arange(8, dtype=torch.float64) + 0.3)[None, None, :, None]
    result = optimal_transport(query, key, cost="sqeuclidean", epsilon=0.05, max_iterations=5000, tolerance=1e-5)
    assert result.cost.item() == pytest.approx(0.3**2 / 2, abs=1e-3)  # any other pairing costs 1/8 more


@pytest.mark.parametrize("cost", COSTS)
def test_identical_sets_cost_nothing_as_epsilon_vanishes(cost):
    query, _ = random_problem(n=6, d=8)
    result = optimal_transport(query, query.flip(2), cost=cost, epsilon=0.005, max_iterations=3000)
    assert (result.cost.abs() < 1e-3).all()


def test_zero_vectors_cost_one_under_cosine():
    query, key = random_problem()
    torch.testing.assert_close(optimal_transport(0 * query, key).cost, torch.ones(3, 2, dtype=torch.float64))
    torch.testing.assert_close(optimal_transport(query, 0 * key).cost, torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 1e30), (torch.float64, 1e200)], ids=str)
def test_length_does_not_count_under_cosine_even_if_its_square_overflows(dtype, length):
    query, key = random_problem(dtype=dtype)
    solve = functools.partial(optimal_transport, epsilon=0.3, max_iterations=1000, tolerance=1e-5)
    torch.testing.assert_close(solve(length * query, length * key).cost, solve(query, key).cost, rtol=0, atol=1e-4)


def test_the_norm_is_guarded_under_the_root():
    # one coordinate: cos = x y / sqrt(x^2 + g) sqrt(y^2 + g), g = 8 * 2^-23; with x = y = 1e-3: 1e-6 / (1e-6 + g)
    query = torch.full((1, 1, 1, 1), 1e-3)
    assert optimal_transport(query, query).cost.item() == pytest.approx(1 - 1e-6 / (1e-6 + 8 * 2**-23), abs=1e-4)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_agrees_with_pot(cost, epsilon):
    query, key = random_problem(n=6, m=9)
    result = optimal_transport(query, key, cost=cost, epsilon=epsilon, **CONVERGED)

    def pot(q, k):
        weights = np.full(len(q), 1 / len(q)), np.full(len(k), 1 / len(k))
        matrix = oracles.COSTS[cost](q, k)
        plan = ot.bregman.sinkhorn_log(*weights, matrix, epsilon, numItermax=100_000, stopThr=1e-13)
        return (plan * matrix).sum()

    torch.testing.assert_close(result.cost, oracles.per_problem(pot, [query], [key]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cost", COSTS)
def test_agrees_with_geomloss(cost):
    # geomloss minimises sum c pi + blur^2 KL(pi | uniform x uniform), c = |x - y|^2 / 2. The divergence is
    # sum pi log pi + log n + log m. Cosine: unit vectors, |x - y|^2 / 2 = 1 - cos. Ours / d: divide both by sqrt(d).
    query, key = random_problem(b=1, h=2, n=6, m=9)
    epsilon = 0.3
    result = optimal_transport(query, key, cost=cost, epsilon=epsilon, **CONVERGED)
    peer = SamplesLoss("sinkhorn", p=2, blur=epsilon**0.5, scaling=0.9995, debias=False, backend="tensorized")
    for h in range(2):
        points = [torch.nn.functional.normalize(s, dim=-1) if cost == "cosine" else s / 5**0.5 for s in (query, key)]
        expected = peer(points[0][0, h], points[1][0, h]).item() - epsilon * (math.log(6) + math.log(9))
        assert result.regularised[0, h].item() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_cost_lies_above_exact_transport_by_at_most_epsilon_log_n(cost, epsilon):
    query, key = random_problem(n=6, m=9)
    paid = optimal_transport(query, key, cost=cost, epsilon=epsilon, max_iterations=2000, tolerance=1e-6).cost
    exact = oracles.per_problem(functools.partial(oracles.exact_transport, cost=cost), [query], [key])
    assert (paid >= exact - 1e-5).all()
    assert (paid <= exact + epsilon * math.log(6) + 1e-5).all()


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("relative", [False, True])
def test_agrees_with_loops_over_the_valid_tokens(cost, relative):
    query, key = random_problem(b=4)
    masks = right_padding([6, 1, 3, 4], 6), right_padding([2, 7, 1, 5], 7)
    result = optimal_transport(
        query,
        key,
        cost=cost,
        epsilon=0.1,
        relative_epsilon=relative,
        query_mask=masks[0],
        key_mask=masks[1],
        **CONVERGED,
    )
    paid, regularised = by_loops(query, key, *masks, cost=cost, epsilon=0.1, relative=relative)
    torch.testing.assert_close(result.cost, paid, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(result.regularised, regularised, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cost", COSTS)
def test_each_side_may_be_masked_alone(cost):
    query, key = random_problem()
    query_mask, key_mask = right_padding([6, 1, 3], 6), right_padding([2, 7, 1], 7)
    options = {"cost": cost, "epsilon": 0.2}
    only_query = optimal_transport(query, key, query_mask=query_mask, **options, **CONVERGED).cost
    only_key = optimal_transport(query, key, key_mask=key_mask, **options, **CONVERGED).cost
    torch.testing.assert_close(only_query, by_loops(query, key, query_mask, None, **options)[0], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(only_key, by_loops(query, key, None, key_mask, **options)[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cost", COSTS)
def test_single_precision_agrees_with_loops(cost):
    query, key = random_problem(n=12, m=9, d=32, dtype=torch.float32)
    result = optimal_transport(query, key, cost=cost, epsilon=0.05, max_iterations=3000, tolerance=1e-5)
    assert result.cost.dtype == torch.float32
    paid, regularised = by_loops(query, key, cost=cost, epsilon=0.05)
    torch.testing.assert_close(result.cost.double(), paid, rtol=0, atol=2e-5)
    torch.testing.assert_close(result.regularised.double(), regularised, rtol=0, atol=2e-5)


def test_a_common_offset_costs_no_precision_under_squared_euclidean():
    query, key = random_problem(n=12, m=9, d=16, dtype=torch.float32)
    solve = functools.partial(optimal_transport, cost="sqeuclidean", epsilon=0.1, max_iterations=500, tolerance=1e-5)
    torch.testing.assert_close(solve(query + 1000, key + 1000).cost, solve(query, key).cost, rtol=0, atol=5e-4)


@pytest.mark.parametrize("cost", COSTS)
def test_many_tokens_agree_with_a_matrix_in_memory(cost):
    """More tokens than one block, and a count that no block divides."""
    query, key = random_problem(b=2, h=1, n=1201, m=1030, d=8)
    query_mask, key_mask = right_padding([1201, 350], 1201), right_padding([513, 1030], 1030)
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    result = optimal_transport(query, key, cost=cost, epsilon=0.5, max_iterations=200, tolerance=1e-9, **masks)
    for sample in range(2):
        q, k = query[sample, 0, query_mask[sample]], key[sample, 0, key_mask[sample]]
        if cost == "cosine":
            matrix = 1 - torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).T
        else:
            matrix = torch.cdist(q, k).square() / 16
        plan = oracles.sinkhorn_plan_in_memory(matrix, 0.5)
        assert result.cost[sample, 0].item() == pytest.approx((plan * matrix).sum().item(), abs=1e-7)


def test_three_iterations_are_enough_at_the_scale_of_the_data():
    """What preset "stable" does: clouds on a common scale, as wide as heads are, apart by as much as they are wide."""
    from alignattn.matching.scale import standardise

    query, key = random_problem(b=4, h=4, n=50, m=50, d=32)
    query, key = standardise(query, key + 0.5, None, None)
    result = optimal_transport(query, key, cost="sqeuclidean", epsilon=1.0, max_iterations=3, tolerance=0.0)
    assert result.marginal_error.max() < 0.01
    short = optimal_transport(query, key, cost="sqeuclidean", epsilon=0.05, max_iterations=3, tolerance=0.0)
    assert short.marginal_error.max() > 0.1  # at the scale of single distances it is far from that


@pytest.mark.parametrize("epsilon", [1.0, 0.4, 0.002])
@pytest.mark.parametrize("masked", [False, True])
def test_one_exponential_for_all_iterations_gives_what_one_each_gives(epsilon, masked):
    from alignattn.matching import sinkhorn

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 9, 4, generator=generator), torch.randn(3, 7, 4, generator=generator)
    log_a, log_b = torch.full((3, 9), 1 / 9).log(), torch.full((3, 7), 1 / 7).log()
    if masked:
        log_a[0, 5:], log_b[0, 3:] = -torch.inf, -torch.inf
        log_a[0, :5], log_b[0, :3] = torch.tensor(1 / 5).log(), torch.tensor(1 / 3).log()
    alpha, beta = x.square().sum(-1) / 2, y.square().sum(-1) / 2
    problems = sinkhorn.Problems(x, y, alpha, beta, log_a, log_b, torch.full((3,), epsilon))
    told = []
    for scores in (sinkhorn.MatrixScores(problems), sinkhorn.ExponentialScores(problems)):
        f, g, iterations = sinkhorn._sinkhorn(problems, scores, 30, 1e-4)
        told.append((f, g, iterations, *scores.carry(f, g)))
    assert (scores.exact is not None) == (epsilon == 0.002)  # where exponentials vanish
    torch.testing.assert_close(told[1], told[0], rtol=2e-3, atol=1e-5)
