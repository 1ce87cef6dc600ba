"""The GAN loss: mean log D(q) + mean log(1 - D(k)) over valid tokens."""

import math

import oracles
import pytest
import torch
from problems import random_problem, right_padding

from alignattn.errors import ShapeError
from alignattn.functional import adversarial


def random_logits(dtype=torch.float64, scale=2.0):
    query, key = random_problem(seed=3)
    return (scale * query[..., 0]).to(dtype), (scale * key[..., 0]).to(dtype)


def test_zero_logits_give_minus_two_log_two():
    value = adversarial(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    torch.testing.assert_close(value, torch.full((2, 3), -2 * math.log(2)))


def test_perfect_discriminator_gives_zero():
    value = adversarial(torch.full((1, 1, 4), 80.0), torch.full((1, 1, 5), -80.0))
    torch.testing.assert_close(value, torch.zeros(1, 1))


def test_wrong_discriminator_pays_its_logit_on_both_sides():
    value = adversarial(torch.full((1, 1, 4), -500.0), torch.full((1, 1, 5), 300.0))
    torch.testing.assert_close(value, torch.full((1, 1), -800.0))


def test_optimal_discriminator_gives_twice_the_jensen_shannon_divergence_less_two_log_two():
    # queries: token type A three times, B once; keys: A once, B three times. D* = p / (p + r), logit = log(p / r).
    logit_a, logit_b = math.log(0.75 / 0.25), math.log(0.25 / 0.75)
    query_logits = torch.tensor([logit_a, logit_a, logit_a, logit_b], dtype=torch.float64)[None, None]
    key_logits = torch.tensor([logit_a, logit_b, logit_b, logit_b], dtype=torch.float64)[None, None]
    mixture = 0.5
    divergence = 0.75 * math.log(0.75 / mixture) + 0.25 * math.log(0.25 / mixture)  # both halves alike
    assert adversarial(query_logits, key_logits).item() == pytest.approx(2 * divergence - 2 * math.log(2), abs=1e-12)


def test_four_tokens_by_hand():
    # D(q) = 1/2, 3/4; 1 - D(k) = 1/5, 1/2
    query_logits = torch.tensor([0.0, math.log(3)], dtype=torch.float64)[None, None]
    key_logits = torch.tensor([math.log(4), 0.0], dtype=torch.float64)[None, None]
    expected = (math.log(1 / 2) + math.log(3 / 4)) / 2 + (math.log(1 / 5) + math.log(1 / 2)) / 2
    assert adversarial(query_logits, key_logits).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_agrees_with_loops_over_the_valid_tokens(dtype, tolerance):
    query_logits, key_logits = random_logits(dtype)
    masks = right_padding([6, 1, 4], 6), right_padding([2, 7, 1], 7)
    value = adversarial(query_logits, key_logits, query_mask=masks[0], key_mask=masks[1])
    expected = oracles.per_problem(oracles.adversarial, [query_logits], [key_logits], *masks)
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)


def test_each_side_may_be_masked_alone():
    query_logits, key_logits = random_logits()
    query_mask, key_mask = right_padding([6, 1, 4], 6), right_padding([2, 7, 1], 7)
    only_query = adversarial(query_logits, key_logits, query_mask=query_mask)
    only_key = adversarial(query_logits, key_logits, key_mask=key_mask)
    expected_query = oracles.per_problem(oracles.adversarial, [query_logits], [key_logits], query_mask)
    expected_key = oracles.per_problem(oracles.adversarial, [query_logits], [key_logits], None, key_mask)
    torch.testing.assert_close(only_query, expected_query)
    torch.testing.assert_close(only_key, expected_key)


def test_swapping_the_sides_and_the_sign_of_the_logits_changes_nothing():
    query_logits, key_logits = random_logits()
    torch.testing.assert_close(adversarial(query_logits, key_logits), adversarial(-key_logits, -query_logits))


def test_gradient_is_the_closed_form():
    query_logits, key_logits = random_logits()
    query_logits.requires_grad_(), key_logits.requires_grad_()
    query_mask = right_padding([6, 1, 4], 6)
    adversarial(query_logits, key_logits, query_mask=query_mask).sum().backward()
    counts = torch.tensor([6.0, 1.0, 4.0], dtype=torch.float64)[:, None, None]
    expected_query = torch.sigmoid(-query_logits.detach()) / counts * query_mask[:, None, :]
    expected_key = -torch.sigmoid(key_logits.detach()) / key_logits.shape[-1]
    torch.testing.assert_close(query_logits.grad, expected_query)
    torch.testing.assert_close(key_logits.grad, expected_key)


def test_gradient_agrees_with_finite_differences():
    query_logits, key_logits = random_logits()
    inputs = query_logits.requires_grad_(), key_logits.requires_grad_()
    assert torch.autograd.gradcheck(adversarial, inputs)


def test_huge_logits_keep_a_useful_gradient():
    query_logits = torch.full((1, 1, 2), -1e4, requires_grad=True)
    key_logits = torch.full((1, 1, 2), 1e4, requires_grad=True)
    adversarial(query_logits, key_logits).sum().backward()
    torch.testing.assert_close(query_logits.grad, torch.full((1, 1, 2), 0.5))
    torch.testing.assert_close(key_logits.grad, torch.full((1, 1, 2), -0.5))


@pytest.mark.parametrize(
    ("query_shape", "key_shape"),
    [
        ((2, 3, 4, 5), (2, 3, 4, 5)),
        ((2, 3), (2, 3)),
        ((2, 3, 4), (1, 3, 4)),
        ((2, 3, 4), (2, 2, 4)),
        ((2, 3, 0), (2, 3, 4)),
        ((2, 3, 4), (2, 3, 0)),
    ],
    ids=["4-d", "2-d", "batch", "heads", "no queries", "no keys"],
)
def test_shapes_that_do_not_fit_are_refused(query_shape, key_shape):
    with pytest.raises(ShapeError):
        adversarial(torch.zeros(query_shape), torch.zeros(key_shape))


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool), torch.ones(4, dtype=torch.bool)],
    ids=["float", "wrong length", "1-d"],
)
def test_masks_that_do_not_fit_are_refused(mask):
    with pytest.raises(ShapeError):
        adversarial(torch.zeros(2, 3, 4), torch.zeros(2, 3, 6), query_mask=mask)
    with pytest.raises(ShapeError):
        adversarial(torch.zeros(2, 3, 6), torch.zeros(2, 3, 4), key_mask=mask)


def test_logits_may_have_the_axis_that_a_linear_layer_leaves():
    query, key = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    torch.testing.assert_close(adversarial(query[..., None], key[..., None]), adversarial(query, key))
    with pytest.raises(ShapeError, match=r"\[b, h, tokens, 1\]"):
        adversarial(torch.randn(2, 3, 4, 2), key)
