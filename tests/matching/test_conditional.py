"""Conditional transport: both conditional plans from the navigator, cost 1 - cosine of critic features."""

import oracles
import pytest
import torch
from problems import random_problem, right_padding

from alignattn.errors import ShapeError
from alignattn.functional import conditional_transport


def features(seed=0, dtype=torch.float64, navigator_scale=0.7, critic_width=5, navigator_width=5):
    """critic_query, critic_key, navigator_query, navigator_key."""
    critic = random_problem(d=critic_width, seed=seed, dtype=dtype)
    navigator = random_problem(d=navigator_width, seed=seed + 100, dtype=dtype)
    return *critic, *[navigator_scale * side for side in navigator]


def by_loops(critic_query, critic_key, navigator_query, navigator_key, query_mask=None, key_mask=None):
    query_side, key_side = [critic_query, navigator_query], [critic_key, navigator_key]
    return oracles.per_problem(oracles.conditional_transport, query_side, key_side, query_mask, key_mask)


def cosine_costs(critic_query, critic_key):
    return 1 - torch.nn.functional.cosine_similarity(critic_query[..., :, None, :], critic_key[..., None, :, :], dim=-1)


def test_constant_navigator_gives_the_mean_cost():
    critic_query, critic_key, navigator_query, navigator_key = features()
    expected = cosine_costs(critic_query, critic_key).mean((-1, -2))
    value = conditional_transport(critic_query, critic_key, 0 * navigator_query, 0 * navigator_key)
    torch.testing.assert_close(value, expected)
    constant = torch.ones_like(navigator_query), torch.ones_like(navigator_key)
    torch.testing.assert_close(conditional_transport(critic_query, critic_key, *constant), expected)


def test_sharp_navigator_gives_the_mean_of_row_and_of_column_minima():
    critic_query, critic_key, *_ = features()
    costs = cosine_costs(critic_query, critic_key)
    expected = (costs.amin(-1).mean(-1) + costs.amin(-2).mean(-1)) / 2
    # logits 1e4 * cos: nearly all mass on the nearest token
    sharp = [100 * torch.nn.functional.normalize(side, dim=-1) for side in (critic_query, critic_key)]
    torch.testing.assert_close(conditional_transport(critic_query, critic_key, *sharp), expected, rtol=0, atol=1e-6)


def test_the_two_directions_have_plans_of_their_own():
    # one query on the first of two orthogonal keys. pi(k|q) = (3/4, 1/4), pi(q|k) = 1.
    critic_query = torch.tensor([[1.0, 0.0]]).double()[None, None]
    critic_key = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()[None, None]
    navigator_query = torch.tensor([[3.0]]).double().log()[None, None]  # log 3 * 1 against log 3 * 0
    navigator_key = torch.tensor([[1.0], [0.0]]).double()[None, None]
    value = conditional_transport(critic_query, critic_key, navigator_query, navigator_key)
    forward, backward = 3 / 4 * 0 + 1 / 4 * 1, (0 + 1) / 2
    assert value.item() == pytest.approx((forward + backward) / 2, abs=1e-9)


def test_single_tokens_give_their_cost_whatever_the_navigator():
    critic_query, critic_key, navigator_query, navigator_key = (side[:, :, :1] for side in features())
    expected = cosine_costs(critic_query, critic_key)[..., 0, 0]
    value = conditional_transport(critic_query, critic_key, 50 * navigator_query, -50 * navigator_key)
    torch.testing.assert_close(value, expected)


def test_zero_critic_features_cost_one():
    _, _, navigator_query, navigator_key = features()
    value = conditional_transport(0 * navigator_query, 0 * navigator_key, navigator_query, navigator_key)
    torch.testing.assert_close(value, torch.ones_like(value))


def test_opposite_critic_features_cost_two_and_equal_ones_nothing():
    navigator, direction = random_problem(b=1, h=1, n=4, m=1, d=8)
    same = direction.expand(1, 1, 4, 8)
    assert conditional_transport(same, same, navigator, navigator).item() == pytest.approx(0, abs=1e-9)
    assert conditional_transport(same, -3 * same, navigator, navigator).item() == pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize("navigator_scale", [0.1, 1.0, 5.0])
def test_agrees_with_loops_over_the_valid_tokens(navigator_scale):
    inputs = features(navigator_scale=navigator_scale)
    masks = right_padding([6, 1, 3], 6), right_padding([2, 7, 1], 7)
    value = conditional_transport(*inputs, query_mask=masks[0], key_mask=masks[1])
    torch.testing.assert_close(value, by_loops(*inputs, *masks), rtol=1e-9, atol=1e-9)


def test_each_side_may_be_masked_alone():
    inputs = features(seed=5)
    query_mask, key_mask = right_padding([6, 1, 4], 6), right_padding([2, 7, 1], 7)
    only_query = conditional_transport(*inputs, query_mask=query_mask)
    only_key = conditional_transport(*inputs, key_mask=key_mask)
    torch.testing.assert_close(only_query, by_loops(*inputs, query_mask), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(only_key, by_loops(*inputs, None, key_mask), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("critic_width", "navigator_width"), [(5, 3), (3, 5), (1, 16)])
def test_critic_and_navigator_may_differ_in_width(critic_width, navigator_width):
    inputs = features(critic_width=critic_width, navigator_width=navigator_width)
    torch.testing.assert_close(conditional_transport(*inputs), by_loops(*inputs), rtol=1e-9, atol=1e-9)


def test_single_precision_agrees_with_loops():
    inputs = features(dtype=torch.float32, critic_width=16, navigator_width=16)
    value = conditional_transport(*inputs)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), by_loops(*inputs), rtol=0, atol=2e-6)


def test_many_tokens_agree_with_the_direct_form():
    """More tokens than one block of any attention kernel, and a count that no block divides."""
    critic_query, critic_key = random_problem(b=2, h=2, n=701, m=1030, d=16, seed=7)
    navigator_query, navigator_key = random_problem(b=2, h=2, n=701, m=1030, d=16, seed=8)
    query_mask, key_mask = right_padding([701, 350], 701), right_padding([513, 1030], 1030)
    value = conditional_transport(
        critic_query, critic_key, navigator_query, navigator_key, query_mask=query_mask, key_mask=key_mask
    )
    for sample in range(2):
        kept = [side[sample][:, query_mask[sample]] for side in (critic_query, navigator_query)]
        kept += [side[sample][:, key_mask[sample]] for side in (critic_key, navigator_key)]
        costs, scores = cosine_costs(kept[0], kept[2]), kept[1] @ kept[3].mT
        both = (costs * scores.softmax(-1)).sum(-1).mean(-1) + (costs * scores.softmax(-2)).sum(-2).mean(-1)
        torch.testing.assert_close(value[sample], both / 2, rtol=1e-9, atol=1e-9)


def test_swapping_queries_and_keys_changes_nothing():
    critic_query, critic_key, navigator_query, navigator_key = features()
    value = conditional_transport(critic_query, critic_key, navigator_query, navigator_key)
    swapped = conditional_transport(critic_key, critic_query, navigator_key, navigator_query)
    torch.testing.assert_close(value, swapped)


@pytest.mark.parametrize("length", [7.0, 1e30])
def test_the_length_of_critic_features_does_not_count(length):
    critic_query, critic_key, *navigators = features(dtype=torch.float32)
    value = conditional_transport(critic_query, critic_key, *navigators)
    moved = conditional_transport(length * critic_query, 0.1 * critic_key, *navigators)
    torch.testing.assert_close(moved, value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["critic q", "critic k", "navigator q", "navigator k"])
def test_gradient_agrees_with_finite_differences_of_the_loops(which):
    inputs = [side[:1, :1, :4].clone().requires_grad_() for side in features(seed=2)]
    masks = right_padding([3], 4), right_padding([2], 4)
    conditional_transport(*inputs, query_mask=masks[0], key_mask=masks[1]).sum().backward()

    def naive(values):
        replaced = [torch.from_numpy(values) if i == which else side for i, side in enumerate(inputs)]
        return by_loops(*replaced, *masks).item()

    expected = oracles.finite_difference(naive, inputs[which].detach().numpy())
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(inputs[which].grad, expected, rtol=1e-6, atol=1e-8)


def test_gradcheck_on_a_batch():
    inputs = tuple(side[:2, :1, :3, :3].clone().requires_grad_() for side in features(seed=4))
    masks = {"query_mask": right_padding([3, 1], 3), "key_mask": right_padding([2, 3], 3)}
    assert torch.autograd.gradcheck(lambda *sides: conditional_transport(*sides, **masks), inputs)


def test_a_step_down_lowers_it_and_a_critic_step_up_raises_it():
    inputs = [side.requires_grad_() for side in features()]
    before = conditional_transport(*inputs).sum()
    before.backward()
    down = [side.detach() - 1e-3 * side.grad for side in inputs]
    up = [side.detach() + 1e-3 * side.grad for side in inputs[:2]]
    assert conditional_transport(*down).sum() < before
    assert conditional_transport(*up, *inputs[2:]).sum() > before


GOOD = ((2, 3, 4, 5), (2, 3, 6, 5), (2, 3, 4, 5), (2, 3, 6, 5))


@pytest.mark.parametrize(
    ("which", "shape"),
    [
        (0, (2, 3, 4)),
        (1, (1, 3, 6, 5)),
        (1, (2, 2, 6, 5)),
        (1, (2, 3, 6, 4)),
        (2, (2, 3, 5, 5)),
        (3, (2, 3, 5, 5)),
        (3, (2, 3, 6, 4)),
        (2, (2, 1, 4, 5)),
    ],
    ids=["3-d", "batch", "heads", "critic width", "query count", "key count", "navigator width", "navigator heads"],
)
def test_shapes_that_do_not_fit_are_refused(which, shape):
    shapes = [*GOOD[:which], shape, *GOOD[which + 1 :]]
    with pytest.raises(ShapeError):
        conditional_transport(*(torch.zeros(s) for s in shapes))


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0)])
def test_no_tokens_are_refused(n, m):
    query, key = torch.zeros(2, 3, n, 5), torch.zeros(2, 3, m, 5)
    with pytest.raises(ShapeError):
        conditional_transport(query, key, query, key)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 3, 4, dtype=torch.bool)],
    ids=["float", "wrong length", "3-d"],
)
def test_masks_that_do_not_fit_are_refused(mask):
    with pytest.raises(ShapeError):
        conditional_transport(*(torch.zeros(s) for s in GOOD), query_mask=mask)
