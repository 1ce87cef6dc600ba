"""Optimal transport: epsilon, tolerance, iterations, what the result says of itself, and what is refused."""

import dataclasses
import functools

import oracles
import pytest
import torch
from problems import random_problem, right_padding

from alignattn.errors import ConfigError, ShapeError
from alignattn.functional import optimal_transport

COSTS = ["cosine", "sqeuclidean"]
CONVERGED = {"max_iterations": 20_000, "tolerance": 1e-11}


@pytest.mark.parametrize("cost", COSTS)
def test_relative_epsilon_is_a_share_of_the_mean_cost_of_valid_pairs(cost):
    query, key = random_problem()
    masks = right_padding([6, 2, 0], 6), right_padding([2, 7, 7], 7)
    result = optimal_transport(
        query, key, cost=cost, epsilon=0.1, relative_epsilon=True, query_mask=masks[0], key_mask=masks[1]
    )
    mean = oracles.per_problem(lambda q, k: oracles.COSTS[cost](q, k).mean() if len(q) else 0.0, [query], [key], *masks)
    torch.testing.assert_close(result.epsilon[:2], 0.1 * mean[:2])
    assert not result.epsilon.requires_grad


def test_epsilon_used_is_told():
    result = optimal_transport(*random_problem(), epsilon=0.07)
    torch.testing.assert_close(result.epsilon, torch.full((3, 2), 0.07, dtype=torch.float64))


def test_with_relative_epsilon_scaling_the_vectors_scales_the_cost():
    query, key = random_problem()
    solve = functools.partial(optimal_transport, cost="sqeuclidean", epsilon=0.2, relative_epsilon=True, **CONVERGED)
    torch.testing.assert_close(solve(3 * query, 3 * key).cost, 9 * solve(query, key).cost)


def test_iterations_stop_under_the_tolerance():
    query, key = random_problem()
    loose = optimal_transport(query, key, epsilon=0.1, tolerance=1e-2, max_iterations=5000)
    tight = optimal_transport(query, key, epsilon=0.1, tolerance=1e-8, max_iterations=5000)
    assert (loose.marginal_error <= 1e-2).all() and (tight.marginal_error <= 1e-8).all()
    assert (loose.iterations < tight.iterations).all() and (tight.iterations < 5000).all()
    assert (loose.iterations >= 1).all() and not loose.iterations.is_floating_point()


def test_iterations_stop_at_the_limit_and_the_error_reached_is_told():
    query, key = random_problem(n=30, m=30, d=3)
    result = optimal_transport(query, key, epsilon=0.001, max_iterations=3)
    assert (result.iterations == 3).all() and (result.marginal_error > 1e-3).all()
    again = optimal_transport(query, key, epsilon=0.001, max_iterations=300)
    assert (again.iterations <= 300).all() and (again.marginal_error < result.marginal_error).all()


def test_a_problem_is_not_changed_by_its_neighbours():
    query, key = random_problem(b=4, h=3)
    query = query * torch.tensor([0.1, 1.0, 3.0, 10.0], dtype=torch.float64)[:, None, None, None]  # easy to hard
    solve = functools.partial(optimal_transport, cost="sqeuclidean", epsilon=0.2, tolerance=1e-4, max_iterations=400)
    together = solve(query, key)
    assert together.iterations.unique().numel() > 1
    for b in range(4):
        for h in range(3):
            alone = solve(query[b : b + 1, h : h + 1], key[b : b + 1, h : h + 1])
            for name in ("cost", "regularised", "marginal_error", "iterations"):
                torch.testing.assert_close(
                    getattr(together, name)[b, h], getattr(alone, name)[0, 0], rtol=1e-6, atol=1e-9
                )


def test_result_is_frozen():
    result = optimal_transport(*random_problem())
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.cost = None
    shapes = {
        getattr(result, name).shape for name in ("cost", "regularised", "marginal_error", "iterations", "epsilon")
    }
    assert shapes == {(3, 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost": "euclid"}, "(?s)euclid.*cosine.*sqeuclidean"),
        ({"gradient": "none"}, "(?s)none.*plan.*unrolled"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"tolerance": -1e-3}, "tolerance"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        optimal_transport(*random_problem(), **options)


@pytest.mark.parametrize("key_shape", [(2, 3, 6), (1, 3, 6, 5), (2, 2, 6, 5), (2, 3, 6, 4), (2, 3, 0, 5)], ids=str)
def test_shapes_that_do_not_fit_are_refused(key_shape):
    with pytest.raises(ShapeError):
        optimal_transport(torch.zeros(2, 3, 4, 5), torch.zeros(key_shape))
    with pytest.raises(ShapeError):
        optimal_transport(torch.zeros(key_shape), torch.zeros(2, 3, 4, 5))


@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)], ids=["float", "wrong length"])
def test_masks_that_do_not_fit_are_refused(mask):
    with pytest.raises(ShapeError):
        optimal_transport(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5), query_mask=mask)
