"""MMD: squared, Gaussian kernel exp(-|x - y|^2 / (2 s^2)), biased and unbiased."""

import functools
import math

import oracles
import pytest
import torch
from problems import random_problem, right_padding

from alignattn.errors import ConfigError, ShapeError
from alignattn.functional import mmd


def by_loops(query, key, query_mask=None, key_mask=None, **options):
    single = functools.partial(oracles.mmd, **options)
    return oracles.per_problem(single, [query], [key], query_mask, key_mask)


def test_two_single_points_give_the_closed_form():
    query = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)[None, None, None]
    key = torch.zeros(1, 1, 1, 3, dtype=torch.float64)  # |x - y|^2 = 9
    value = mmd(query, key, bandwidth=1.5, unbiased=False).item()
    assert value == pytest.approx(2 - 2 * math.exp(-9 / (2 * 1.5**2)), abs=1e-12)


def test_one_is_the_standard_gaussian_kernel():
    # unit distance: k = exp(-1/2)
    query, key = torch.zeros(1, 1, 2, 1, dtype=torch.float64), torch.ones(1, 1, 2, 1, dtype=torch.float64)
    assert mmd(query, key, bandwidth=1.0).item() == pytest.approx(2 - 2 * math.exp(-0.5), abs=1e-12)
    assert mmd(query, key, bandwidth=1).item() == pytest.approx(2 - 2 * math.exp(-0.5), abs=1e-12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_wide_kernel_is_linear_and_gives_the_squared_distance_of_means(unbiased):
    query, key = random_problem(n=6, m=9)
    width = 1e4
    expected = (query.mean(2) - key.mean(2)).square().sum(-1)
    if unbiased:  # less the variance of the two sample means
        expected = expected - query.var(2).sum(-1) / 6 - key.var(2).sum(-1) / 9
    value = width**2 * mmd(query, key, bandwidth=width, unbiased=unbiased)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)


def test_narrow_kernel_sees_only_identical_tokens():
    query, key = random_problem(n=6, m=9)
    biased = mmd(query, key, bandwidth=1e-3, unbiased=False)
    torch.testing.assert_close(biased, torch.full_like(biased, 1 / 6 + 1 / 9))
    torch.testing.assert_close(mmd(query, key, bandwidth=1e-3), torch.zeros_like(biased))


def test_unbiased_form_averages_to_the_population_value():
    # q ~ N(0, I), k ~ N(shift, I) in d dimensions, s = 1:
    # E k(x, y) = (1 / 3)^(d/2) exp(-|mean difference|^2 / 6)
    generator = torch.Generator().manual_seed(0)
    d, shift = 2, 1.0
    query = torch.randn(100, 100, 3, d, generator=generator, dtype=torch.float64)
    key = torch.randn(100, 100, 4, d, generator=generator, dtype=torch.float64)
    population = 2 * (1 / 3) ** (d / 2) * (1 - math.exp(-d * shift**2 / 6))
    values = mmd(query, key + shift, bandwidth=1.0)
    assert values.mean().item() == pytest.approx(population, abs=4 * values.std().item() / 100)
    same = mmd(query, key, bandwidth=1.0)
    assert same.mean().item() == pytest.approx(0, abs=4 * same.std().item() / 100)
    assert same.min() < 0
    assert mmd(query, key, bandwidth=1.0, unbiased=False).mean() > 0.2


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("bandwidth", ["median", "mean", 0.8])
def test_agrees_with_loops_over_the_valid_tokens(bandwidth, unbiased):
    query, key = random_problem(b=5)
    masks = right_padding([6, 2, 3, 5, 4], 6), right_padding([2, 7, 3, 1, 6], 7)  # pairs even and odd in number
    value = mmd(query, key, bandwidth=bandwidth, unbiased=unbiased, query_mask=masks[0], key_mask=masks[1])
    expected = by_loops(query, key, *masks, bandwidth=bandwidth, unbiased=unbiased)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bandwidth", ["median", "mean"])
def test_each_side_may_be_masked_alone(bandwidth):
    query, key = random_problem(seed=1)
    query_mask, key_mask = right_padding([6, 2, 4], 6), right_padding([2, 7, 3], 7)
    only_query = mmd(query, key, bandwidth=bandwidth, query_mask=query_mask)
    only_key = mmd(query, key, bandwidth=bandwidth, key_mask=key_mask)
    options = {"bandwidth": bandwidth, "unbiased": True}
    torch.testing.assert_close(only_query, by_loops(query, key, query_mask, **options), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(only_key, by_loops(query, key, None, key_mask, **options), rtol=1e-9, atol=1e-11)


def test_median_is_the_default_and_unbiased():
    query, key = random_problem()
    torch.testing.assert_close(mmd(query, key), by_loops(query, key, bandwidth="median", unbiased=True))


def test_median_of_an_even_number_of_distances_is_the_mean_of_the_middle_two():
    # tokens 0, 1 | 3, 7: squared distances 1, 4, 9, 16, 36, 49; the median of six is (9 + 16) / 2.
    query = torch.tensor([0.0, 1.0]).double()[None, None, :, None]
    key = torch.tensor([3.0, 7.0]).double()[None, None, :, None]
    scale = (9 + 16) / 2
    cross = sum(math.exp(-distance / scale) for distance in (9, 49, 4, 36)) / 4
    expected = math.exp(-1 / scale) + math.exp(-16 / scale) - 2 * cross
    assert mmd(query, key).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("bandwidth", ["median", "mean"])
@pytest.mark.parametrize("scale", [1e-3, 50.0])
def test_scaling_all_vectors_does_not_count_as_alignment(bandwidth, scale):
    query, key = random_problem()
    torch.testing.assert_close(
        mmd(scale * query, scale * key, bandwidth=bandwidth), mmd(query, key, bandwidth=bandwidth)
    )


def test_single_precision_agrees_with_loops():
    query, key = random_problem(n=20, m=15, d=64, dtype=torch.float32)
    for bandwidth in ("median", "mean", 8.0):
        value = mmd(query, key, bandwidth=bandwidth)
        expected = by_loops(query, key, bandwidth=bandwidth, unbiased=True)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("bandwidth", ["median", 4.0])
def test_a_common_offset_costs_no_precision(bandwidth):
    query, key = random_problem(n=12, m=14, d=16, dtype=torch.float32)
    moved = mmd(query + 1000, key + 1000, bandwidth=bandwidth)
    torch.testing.assert_close(moved, mmd(query, key, bandwidth=bandwidth), rtol=0, atol=5e-4)


def test_fewer_than_two_tokens_on_a_side_contribute_nothing_to_the_unbiased_form():
    query, key = (side.requires_grad_() for side in random_problem())
    value = mmd(query, key, query_mask=right_padding([1, 6, 0], 6), key_mask=right_padding([7, 1, 7], 7))
    assert torch.equal(value, torch.zeros_like(value))
    value.sum().backward()
    assert torch.equal(query.grad, torch.zeros_like(query)) and torch.equal(key.grad, torch.zeros_like(key))
    assert torch.equal(mmd(query[:, :, :1], key), torch.zeros_like(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_sets_have_no_discrepancy(dtype):
    query, _ = random_problem(n=30, d=32, dtype=dtype)
    shuffled = query[:, :, torch.randperm(30, generator=torch.Generator().manual_seed(0))]
    biased = mmd(query, shuffled, unbiased=False)
    torch.testing.assert_close(biased, torch.zeros_like(biased), rtol=0, atol=1e-5)
    constant = torch.ones_like(query)
    for unbiased in (True, False):
        value = mmd(constant, constant, unbiased=unbiased)
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bandwidth", ["median", "mean", 1.5])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradient_is_that_of_the_loops_at_a_fixed_bandwidth(bandwidth, unbiased):
    query, key = (side[:1, :1].clone().requires_grad_() for side in random_problem(n=4, m=5, d=3))
    masks = right_padding([3], 4), right_padding([4], 5)
    mmd(query, key, bandwidth=bandwidth, unbiased=unbiased, query_mask=masks[0], key_mask=masks[1]).sum().backward()
    kept = query.detach()[0, 0, :3].numpy(), key.detach()[0, 0, :4].numpy()
    held = math.sqrt(oracles.squared_bandwidth_doubled(*kept, bandwidth) / 2)
    options = {"bandwidth": held, "unbiased": unbiased}
    expected_query = oracles.finite_difference(lambda q: oracles.mmd(q, kept[1], **options), kept[0])
    expected_key = oracles.finite_difference(lambda k: oracles.mmd(kept[0], k, **options), kept[1])
    torch.testing.assert_close(query.grad[0, 0, :3], expected_query, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(key.grad[0, 0, :4], expected_key, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("unbiased", [False, True])
def test_gradcheck_on_a_batch(unbiased):
    inputs = tuple(side.requires_grad_() for side in random_problem(b=2, n=3, m=4, d=2))
    assert torch.autograd.gradcheck(lambda query, key: mmd(query, key, bandwidth=1.3, unbiased=unbiased), inputs)


def test_many_tokens_agree_with_the_direct_form_in_value_and_gradient():
    """More tokens than one block, and a count that no block divides."""
    n, m, width = 1201, 1050, 2.0
    query, key = (side.requires_grad_() for side in random_problem(b=1, h=1, n=n, m=m, d=4))

    def kernel(left, right):
        return torch.exp(-(left[..., :, None, :] - right[..., None, :, :]).square().sum(-1) / (2 * width**2))

    within = [
        (kernel(side, side).sum((-1, -2)) - count) / count / (count - 1) for side, count in ((query, n), (key, m))
    ]
    expected = within[0] + within[1] - 2 * kernel(query, key).mean((-1, -2))
    value = mmd(query, key, bandwidth=width)
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
    for got, direct in zip(
        torch.autograd.grad(value.sum(), (query, key)), torch.autograd.grad(expected.sum(), (query, key)), strict=True
    ):
        torch.testing.assert_close(got, direct, rtol=1e-7, atol=1e-12)


def test_median_of_many_tokens_may_be_of_a_subset_but_is_close_and_repeatable():
    query, key = random_problem(b=1, h=3, n=450, m=350, d=8)
    state = torch.get_rng_state()
    value = mmd(query, key)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(mmd(query, key), value)
    pooled = torch.cat([query, key], 2).reshape(3, 800, 8)
    widths = [math.sqrt(torch.nn.functional.pdist(tokens).square().median().item() / 2) for tokens in pooled]
    for got, width, q, k in zip(value.flatten(), widths, query.flatten(0, 1), key.flatten(0, 1), strict=True):
        assert got.item() == pytest.approx(mmd(q[None, None], k[None, None], bandwidth=width).item(), rel=0.1)


def test_unknown_bandwidth_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"(?s)medain.*median.*mean"):
        mmd(*random_problem(), bandwidth="medain")


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan])
def test_bandwidth_that_is_not_positive_is_refused(bandwidth):
    with pytest.raises(ConfigError):
        mmd(*random_problem(), bandwidth=bandwidth)


@pytest.mark.parametrize("key_shape", [(2, 3, 6), (1, 3, 6, 5), (2, 2, 6, 5), (2, 3, 6, 4), (2, 3, 0, 5)], ids=str)
def test_shapes_that_do_not_fit_are_refused(key_shape):
    with pytest.raises(ShapeError):
        mmd(torch.zeros(2, 3, 4, 5), torch.zeros(key_shape))
    with pytest.raises(ShapeError):
        mmd(torch.zeros(key_shape), torch.zeros(2, 3, 4, 5))


@pytest.mark.parametrize("mask", [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool)], ids=["float", "wrong length"])
def test_masks_that_do_not_fit_are_refused(mask):
    with pytest.raises(ShapeError):
        mmd(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5), key_mask=mask)


# Without a token's query against its own key


def without_own_by_loops(query, key, query_mask, key_mask, width):
    """The mean over pairs of different tokens, in each of the three terms."""
    values = torch.zeros(query.shape[:2], dtype=query.dtype)

    def kernel(x, y):
        return torch.exp(-(x - y).square().sum() / (2 * width**2))

    def mean(x, y, first, second):
        pairs = [(i, j) for i in first for j in second if i != j]
        return sum(kernel(x[i], y[j]) for i, j in pairs) / len(pairs)

    for b in range(query.shape[0]):
        queries, keys = ([i for i, valid in enumerate(mask[b]) if valid] for mask in (query_mask, key_mask))
        for h in range(query.shape[1]):
            q, k = query[b, h], key[b, h]
            values[b, h] = mean(q, q, queries, queries) + mean(k, k, keys, keys) - 2 * mean(q, k, queries, keys)
    return values


@pytest.mark.parametrize("alike", [True, False])  # masks of queries and keys
def test_without_own_is_the_mean_over_different_tokens_in_value_and_gradient(alike):
    query, key = (t.requires_grad_() for t in random_problem(n=6, m=6))
    query_mask = right_padding([6, 4, 5], 6)
    key_mask = query_mask.clone()
    if not alike:
        key_mask[:, 0] = False
    value = mmd(query, key, bandwidth=1.3, without_own=True, query_mask=query_mask, key_mask=key_mask)
    expected = without_own_by_loops(query, key, query_mask, key_mask, 1.3)
    torch.testing.assert_close(value, expected)
    outer = torch.randn_like(value)
    torch.testing.assert_close(
        torch.autograd.grad((value * outer).sum(), (query, key)),
        torch.autograd.grad((expected * outer).sum(), (query, key)),
    )


def test_queries_that_are_their_own_keys_are_rewarded_unless_those_are_left_out():
    query, _ = random_problem(n=8, m=8)
    assert (mmd(query, query.clone()) < -0.05).all()
    torch.testing.assert_close(mmd(query, query.clone(), without_own=True), torch.zeros(query.shape[:2]).to(query))


def test_where_queries_and_keys_are_not_equally_many_none_are_left_out():
    query, key = random_problem(n=5, m=7)
    assert torch.equal(mmd(query, key, without_own=True), mmd(query, key))
