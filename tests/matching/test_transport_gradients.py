"""Optimal transport, its two gradients: of the regularised value (plan held fixed) and of the cost (unrolled)."""

import oracles
import pytest
import torch
from problems import random_problem, right_padding

from alignattn.functional import optimal_transport

COSTS = ["cosine", "sqeuclidean"]
CONVERGED = {"max_iterations": 2000, "tolerance": 1e-12}
MASKS = {"query_mask": right_padding([3], 4), "key_mask": right_padding([4], 5)}


def one_problem(seed=0):
    return tuple(side[:1, :1].clone().requires_grad_() for side in random_problem(n=4, m=5, d=3, seed=seed))


def naive_gradients(query, key, which, **options):
    """Finite differences of the oracle's cost (which=0) or regularised value (which=1), in the valid q and k."""
    q, k = query.detach()[0, 0, :3].numpy(), key.detach()[0, 0, :4].numpy()
    of_query = oracles.finite_difference(lambda x: oracles.transport(x, k, **options)[which], q)
    of_key = oracles.finite_difference(lambda x: oracles.transport(q, x, **options)[which], k)
    return of_query, of_key


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("output", ["cost", "regularised"])
def test_fixed_plan_gives_the_gradient_of_the_regularised_value(cost, output):
    query, key = one_problem()
    result = optimal_transport(query, key, cost=cost, epsilon=0.2, gradient="plan", **CONVERGED, **MASKS)
    getattr(result, output).sum().backward()
    of_query, of_key = naive_gradients(query, key, 1, cost=cost, epsilon=0.2)
    torch.testing.assert_close(query.grad[0, 0, :3], of_query, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(key.grad[0, 0, :4], of_key, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("output", "which"), [("cost", 0), ("regularised", 1)])
def test_unrolled_gives_the_gradient_of_what_is_differentiated(cost, output, which):
    query, key = one_problem()
    result = optimal_transport(query, key, cost=cost, epsilon=0.2, gradient="unrolled", **CONVERGED, **MASKS)
    getattr(result, output).sum().backward()
    of_query, of_key = naive_gradients(query, key, which, cost=cost, epsilon=0.2)
    torch.testing.assert_close(query.grad[0, 0, :3], of_query, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(key.grad[0, 0, :4], of_key, rtol=1e-6, atol=1e-7)


def test_the_two_gradients_differ():
    gradients = []
    for gradient in ("plan", "unrolled"):
        query, key = one_problem()
        optimal_transport(query, key, epsilon=0.2, gradient=gradient, **CONVERGED).cost.sum().backward()
        gradients.append(query.grad)
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_fixed_plan_is_the_default():
    gradients = []
    for options in ({}, {"gradient": "plan"}):
        query, key = one_problem()
        optimal_transport(query, key, **options).cost.sum().backward()
        gradients.append(query.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("iterations", [1, 4])
def test_unrolled_is_exact_however_few_the_iterations(cost, iterations):
    inputs = tuple(side.requires_grad_() for side in random_problem(b=2, h=1, n=3, m=4, d=2))
    masks = {"query_mask": right_padding([3, 2], 3), "key_mask": right_padding([2, 4], 4)}

    def paid(query, key):
        options = {"cost": cost, "epsilon": 0.3, "max_iterations": iterations, "tolerance": 0.0}
        return optimal_transport(query, key, gradient="unrolled", **options, **masks).cost

    assert torch.autograd.gradcheck(paid, inputs)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(("gradient", "which"), [("plan", 1), ("unrolled", 0)])
def test_relative_epsilon_carries_no_gradient(cost, gradient, which):
    query, key = one_problem(seed=3)
    result = optimal_transport(
        query, key, cost=cost, epsilon=0.3, relative_epsilon=True, gradient=gradient, **CONVERGED, **MASKS
    )
    result.cost.sum().backward()
    of_query, of_key = naive_gradients(query, key, which, cost=cost, epsilon=result.epsilon.item())
    torch.testing.assert_close(query.grad[0, 0, :3], of_query, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(key.grad[0, 0, :4], of_key, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("iterations", [1, 2, 10])
def test_the_plan_in_the_gradient_has_the_marginal_error_that_is_told(iterations):
    """d * gradient of q_i is sum_j pi_ij (q_i - k_j): with more coordinates than keys the plan can be read off."""
    n, m, d = 4, 5, 8
    query, key = (side.requires_grad_() for side in random_problem(b=2, n=n, m=m, d=d))
    result = optimal_transport(query, key, cost="sqeuclidean", epsilon=0.05, max_iterations=iterations, tolerance=0.0)
    result.cost.sum().backward()
    offsets = (query[..., :, None, :] - key[..., None, :, :]).detach()  # (b, h, n, m, d)
    by_query = torch.linalg.lstsq(offsets.mT, d * query.grad[..., None]).solution[..., 0]  # (b, h, n, m)
    by_key = torch.linalg.lstsq(-offsets.permute(0, 1, 3, 4, 2), d * key.grad[..., None]).solution[..., 0].mT
    torch.testing.assert_close(by_query, by_key, rtol=0, atol=1e-9)
    assert (by_query > -1e-9).all()
    errors = torch.cat([(by_query.sum(-1) * n - 1).abs(), (by_query.sum(-2) * m - 1).abs()], dim=-1)
    torch.testing.assert_close(result.marginal_error, errors.amax(-1), rtol=1e-6, atol=1e-8)
    costs = offsets.square().sum(-1) / (2 * d)
    torch.testing.assert_close(result.cost.detach(), (by_query * costs).sum((-1, -2)))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("gradient", ["plan", "unrolled"])
def test_a_step_down_lowers_the_cost(cost, gradient):
    query, key = (side.requires_grad_() for side in random_problem(n=10, m=10))
    before = optimal_transport(query, key, cost=cost, gradient=gradient, epsilon=0.1)
    before.cost.sum().backward()
    after = optimal_transport(query - 0.1 * query.grad, key - 0.1 * key.grad, cost=cost, epsilon=0.1)
    assert (after.cost < before.cost).all()


@pytest.mark.parametrize("cost", COSTS)
def test_single_precision_gradient_agrees_with_double(cost):
    gradients = []
    for dtype in (torch.float32, torch.float64):
        sides = random_problem(n=40, m=33, d=32, dtype=torch.float32)
        query, key = (side.to(dtype).requires_grad_() for side in sides)
        options = {"epsilon": 0.1, "relative_epsilon": True, "max_iterations": 300, "tolerance": 1e-5}
        optimal_transport(query, key, cost=cost, **options).cost.sum().backward()
        gradients.append((query.grad.double(), key.grad.double()))
    for single, double in zip(*gradients, strict=True):
        assert (single - double).norm() < 1e-3 * double.norm()


def test_blocks_do_not_show_in_the_gradient():
    """A problem of more tokens than one block, its plan from a matrix in memory."""
    query, key = (side.requires_grad_() for side in random_problem(b=1, h=1, n=1201, m=1030, d=4))
    options = {"cost": "sqeuclidean", "epsilon": 0.5, "max_iterations": 200, "tolerance": 1e-10}
    optimal_transport(query, key, **options).cost.sum().backward()
    q, k = query.detach()[0, 0], key.detach()[0, 0]
    costs = torch.cdist(q, k).square() / 8
    plan = oracles.sinkhorn_plan_in_memory(costs, 0.5)
    torch.testing.assert_close(query.grad[0, 0], (q / 1201 - plan @ k) / 4, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(key.grad[0, 0], (k / 1030 - plan.T @ q) / 4, rtol=1e-6, atol=1e-9)


def test_what_the_result_tells_of_itself_carries_no_gradient():
    query, key = one_problem()
    for gradient in ("plan", "unrolled"):
        result = optimal_transport(query, key, gradient=gradient)
        assert result.cost.requires_grad and not result.marginal_error.requires_grad
