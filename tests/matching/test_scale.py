"""The common scale of queries and keys, against the definition token by token and finite differences."""

import pytest
import torch

from alignattn.matching.scale import standardise


def problem(n=5, m=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2, n, 3, generator=generator, dtype=torch.float64) * 2 + 1
    key = torch.randn(3, 2, m, 3, generator=generator, dtype=torch.float64)
    query_mask = torch.ones(3, n, dtype=torch.bool)
    key_mask = torch.ones(3, m, dtype=torch.bool)
    query_mask[1, 2:] = False
    key_mask[2, :1] = False
    return query.to(dtype), key.to(dtype), query_mask, key_mask


def by_hand(query, key, query_mask, key_mask):
    sides = [torch.zeros_like(query), torch.zeros_like(key)]
    for sample in range(query.shape[0]):
        for head in range(query.shape[1]):
            valid = [query[sample, head][query_mask[sample]], key[sample, head][key_mask[sample]]]
            pooled = torch.cat(valid)
            mean = pooled.mean(0)
            deviation = ((pooled - mean).square().mean() + 1e-6).sqrt()
            for side, mask, tokens in zip(sides, (query_mask, key_mask), valid, strict=True):
                side[sample, head, mask[sample]] = (tokens - mean) / deviation
    return sides


def test_each_problem_has_mean_zero_and_deviation_one_as_by_hand():
    given = problem()
    for told, expected in zip(standardise(*given), by_hand(*given), strict=True):
        torch.testing.assert_close(told, expected)


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_agrees_with_finite_differences(masked):
    query, key, *masks = problem()
    masks = masks if masked else [None, None]
    sides = [query.requires_grad_(), key.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, k: standardise(q, k, *masks), sides)


def test_what_stands_at_padding_reaches_neither_value_nor_gradient():
    query, key, query_mask, key_mask = problem()
    clean = standardise(query, key, query_mask, key_mask)
    query[1, :, 2:] = torch.nan
    query.requires_grad_()
    scaled = standardise(query, key, query_mask, key_mask)
    torch.testing.assert_close(scaled, clean)
    sum(side.square().sum() for side in scaled).backward()
    assert query.grad.isfinite().all() and not query.grad[1, :, 2:].any()


def test_a_sample_without_tokens_and_one_of_a_single_point_are_zeros():
    query, key, query_mask, key_mask = problem()
    query_mask[0], key_mask[0] = False, False
    query[1], key[1] = 5.0, 5.0
    query.requires_grad_()
    scaled = standardise(query, key, query_mask, key_mask)
    for side in scaled:
        assert not side[:2].any() and side[2].any()
    scaled[0].sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-30, 1e15, 1e30])
def test_any_size_of_single_precision_numbers(size):
    query, key, *masks = problem(dtype=torch.float32)
    query, key = (query * size).requires_grad_(), key * size
    scaled = standardise(query, key, *masks)
    scaled[0].square().sum().backward()
    assert all(side.isfinite().all() for side in scaled) and query.grad.isfinite().all()
    if size > 1:
        for told, expected in zip(scaled, by_hand(*problem()), strict=True):
            torch.testing.assert_close(told.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    given = problem(dtype=dtype)
    leaf = given[0].requires_grad_()
    scaled = standardise(leaf, *given[1:])
    assert scaled[0].dtype == scaled[1].dtype == torch.float32
    for told, expected in zip(
        scaled, by_hand(*(t.double() if t.is_floating_point() else t for t in given)), strict=True
    ):
        torch.testing.assert_close(told.double(), expected, rtol=1e-4, atol=1e-5)
    scaled[0].sum().backward()
    assert leaf.grad.dtype == dtype


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
def test_one_point_far_away_stays_one_point(size):
    point = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0)) * size
    query, key = standardise(point.expand(1, 2, 37, 8), point.expand(1, 2, 41, 8), None, None)
    assert query.abs().max() < 1e-3 and key.abs().max() < 1e-3
