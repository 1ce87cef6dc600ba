"""The game with its ways back written out, against autograd through network, value and distance each by itself."""

import itertools

import pytest
import torch
from problems import random_problem, right_padding

from alignattn.functional import adversarial, feature_distance
from alignattn.matching.beside import joined, parted, parts, together
from alignattn.matching.game import game
from alignattn.matching.networks import Discriminator, reverse_gradient

LAYERS, SAMPLES = 2, 3


def players(*, n=6, m=6, dtype=torch.float64):
    query, key = (
        side.unflatten(0, (LAYERS, SAMPLES)).to(dtype).requires_grad_()
        for side in random_problem(b=LAYERS * SAMPLES, n=n, m=m)
    )
    network = Discriminator(["a", "b"], query.shape[-1], hidden=5, out=1, seed=1).to(dtype)
    return query, key, network


def masks_of(masked, n, m):
    of_query = right_padding([n, 2, 4, 3, 1, n], n).unflatten(0, (LAYERS, SAMPLES))
    of_key = right_padding([2, m, 1, 0, 4, m], m).unflatten(0, (LAYERS, SAMPLES))  # one sample has no key at all
    chosen = {"neither": (None, None), "queries": (of_query, None), "both": (of_query, of_key)}
    return chosen.get(masked, (of_query, of_query))


def one_by_one(query, key, network, query_mask, key_mask):
    tokens = torch.cat([query.flatten(1, 3), key.flatten(1, 3)], 1)
    shapes = query.shape, key.shape
    features = parts(network.features(tokens, fixed=True), shapes)
    answers = parts(reverse_gradient(network(tokens.detach())), shapes)
    masks = {
        name: None if mask is None else mask.flatten(0, 1)
        for name, mask in (("query_mask", query_mask), ("key_mask", key_mask))
    }
    distance = feature_distance(*(side.flatten(0, 1) for side in features), **masks)
    value = adversarial(*(side.flatten(0, 1) for side in answers), **masks)
    return distance + value - value.detach(), answers


@pytest.mark.parametrize(("n", "m"), [(6, 6), (6, 4)])
@pytest.mark.parametrize("masked", ["neither", "queries", "both", "alike"])
def test_distance_answers_and_all_gradients_are_those_of_each_by_itself(n, m, masked):
    if masked == "alike" and n != m:
        pytest.skip("one mask serves as many of both")
    query, key, network = players(n=n, m=m)
    masks = masks_of(masked, n, m)
    distance, *answers = game(query, key, *masks, *network.weights(query))
    expected, told = one_by_one(query, key, network, *masks)
    torch.testing.assert_close(distance.flatten(0, 1), expected.detach())
    for one, two, mask in zip(answers, told, masks, strict=True):
        there = slice(None) if mask is None else mask[:, :, None, :, None].expand_as(one)
        torch.testing.assert_close(one[there], two[there].detach())
        assert not one.requires_grad
    outer = torch.randn(LAYERS, SAMPLES, 2, dtype=torch.float64)
    of = [query, key, *network.parameters()]
    found = torch.autograd.grad(distance, of, outer)
    truth = torch.autograd.grad(expected, of, outer.flatten(0, 1))
    for side, (one, two) in enumerate(zip(found, truth, strict=True)):
        if side < 2 and masks[side] is not None:  # what stands at padding nobody asks for
            one = one * masks[side][:, :, None, :, None]
        torch.testing.assert_close(one, two)
        assert two.abs().sum() > 0


def test_who_wants_nothing_gets_nothing():
    query, key, network = players()
    (alone,) = torch.autograd.grad(game(query, key, None, None, *network.weights(query))[0].sum(), query)
    fixed = [weight.detach() for weight in network.weights(query)]
    distance, *_ = game(query, key.detach(), None, None, *fixed)
    distance.sum().backward()
    torch.testing.assert_close(query.grad, alone)
    assert key.grad is None
    distance, *_ = game(query.detach(), key.detach(), None, None, *network.weights(query))
    distance.sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in network.parameters())


def test_single_precision_is_as_precise_as_autograd():
    """Far from the origin too, where features about their centre are small beside it."""
    for shift in (0.0, 300.0):
        query, key, network = players()
        exact = [query, key, *network.parameters()]
        truth = torch.autograd.grad(
            game(query + shift, key + shift, None, None, *network.weights(query))[0].sum(), exact
        )
        short = [side.detach().float().requires_grad_() for side in (query, key)]
        net = network.float()
        given = [*short, *net.parameters()]
        ours = game(short[0] + shift, short[1] + shift, None, None, *net.weights(short[0]))[0]
        plain, _ = one_by_one(short[0] + shift, short[1] + shift, net, None, None)
        for one, other, true in zip(
            *(torch.autograd.grad(of.sum(), given) for of in (ours, plain)), truth, strict=True
        ):
            of_ours, of_plain = ((found - true).abs().max() for found in (one, other))
            assert of_ours <= 2 * of_plain + 1e-6 * true.abs().max()


def test_queries_and_keys_that_lie_behind_each_other_are_joined_without_a_copy():
    both = torch.arange(48.0)
    query, key = both[:24].view(1, 2, 3, 2, 2), both[24:].view(1, 2, 3, 2, 2)
    assert joined(query, key).data_ptr() == both.data_ptr()
    for first, second in itertools.permutations((query, key)):
        expected = torch.cat([first.flatten(1, 3), second.flatten(1, 3)], 1)
        assert torch.equal(joined(first, second), expected)
    two = query.view(2, 1, 3, 2, 2), key.view(2, 1, 3, 2, 2)  # layers: the keys of one come before another's queries
    assert torch.equal(joined(*two), torch.cat([side.flatten(1, 3) for side in two], 1))
    apart = query.clone(), key.clone()
    assert torch.equal(joined(*apart), both.view(1, 24, 2))
    for stranger in (
        (query, (both + 1)[24:].view_as(key)),  # of another's memory
        (both.view(1, 2, 3, 2, 4)[..., :2], key),  # as long, with gaps
    ):
        assert torch.equal(joined(*stranger), torch.cat([side.flatten(1, 3) for side in stranger], 1))
    gap = torch.arange(50.0)
    assert torch.equal(joined(gap[:24].view_as(query), gap[26:].view_as(key))[0, 12], torch.tensor([26.0, 27.0]))


def test_what_networks_make_of_both_may_be_differentiated_twice():
    """As a penalty on a critic's gradient is, in a matcher of one's own; that gradient may lie in one piece as well."""
    query, key = (torch.randn(1, 2, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def network(query, key):
        return parted(together(query, key).pow(3), query, key)

    assert torch.autograd.gradgradcheck(network, (query, key))
    outer = torch.randn(48, dtype=torch.float64, requires_grad=True)
    behind = [side.view(2, 3, 2, 2) for side in outer.split(24)]
    first = torch.autograd.grad(network(query, key), (query, key), behind, create_graph=True)
    (found,) = torch.autograd.grad(sum(side.sum() for side in first), outer)
    torch.testing.assert_close(found, 3 * torch.cat([query.flatten(), key.flatten()]).square().detach())
