"""Critic and navigator with their ways back written out, against autograd through the plain networks."""

import itertools

import pytest
import torch
from problems import random_problem, right_padding

from alignattn.config import METHODS, resolve
from alignattn.functional import conditional_transport
from alignattn.matching.carriers import critic_and_navigator
from alignattn.matching.networks import Discriminator, Navigator, reverse_gradient
from alignattn.matching.scale import standardise as on_one_scale

LAYERS, SAMPLES, HEADS, WIDTH = 2, 3, 2, 5
NAMES = ["a", "b"]


def tokens(*, n=6, m=4):
    given = random_problem(b=LAYERS * SAMPLES, h=HEADS, n=n, m=m, d=WIDTH)
    return [side.unflatten(0, (LAYERS, SAMPLES)).requires_grad_() for side in given]


def networks():
    """Of a width in, one within and one out that cannot be taken for each other."""
    critic = Discriminator(NAMES, WIDTH, hidden=7, out=3, seed=1, role="critic").double()
    return critic, Navigator(NAMES, WIDTH, hidden=4, out=2, seed=1).double()


def descend(tensor):
    return tensor


def plain(query, key, critic, navigator, navigator_ascends, layers=None):
    """The four features, each network by itself between turns of the gradient."""
    features = []
    for network, around in (
        (critic, reverse_gradient),
        (navigator, reverse_gradient if navigator_ascends else descend),
    ):
        for side in (query, key):
            found = around(network(around(side.flatten(1, 3)), layers))
            features.append(found.unflatten(1, side.shape[1:4]).flatten(0, 1))
    return features


def by_hand(query, key, critic, navigator, navigator_ascends, layers=None):
    weights = critic.weights(query, layers), navigator.weights(query, layers)
    return list(itertools.chain(*critic_and_navigator(query, key, *weights, navigator_ascends=navigator_ascends)))


def gradients(features, of):
    generator = torch.Generator().manual_seed(2)
    outer = [torch.randn(side.shape, generator=generator, dtype=side.dtype) for side in features]
    return torch.autograd.grad(features, of, outer)


@pytest.mark.parametrize("navigator_ascends", [False, True])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (6, 4)])
def test_features_and_all_gradients_are_those_of_the_plain_networks(n, m, navigator_ascends):
    sides, both = tokens(n=n, m=m), networks()
    found, expected = (way(*sides, *both, navigator_ascends) for way in (by_hand, plain))
    torch.testing.assert_close(found, expected)
    of = [*sides, *(parameter for network in both for parameter in network.parameters())]
    truth = gradients(expected, of)
    torch.testing.assert_close(gradients(found, of), truth)
    assert all(gradient.abs().sum() > 0 for gradient in truth)


@pytest.mark.parametrize("layers", [slice(1, 2), torch.tensor([1]), torch.tensor([1, 0])], ids=str)
def test_some_rows_of_a_bank_serve_the_layers_they_are_of(layers):
    rows = 2 if torch.is_tensor(layers) and len(layers) == 2 else 1
    sides, both = [side.detach()[:rows].requires_grad_() for side in tokens()], networks()
    found, expected = (way(*sides, *both, False, layers) for way in (by_hand, plain))
    torch.testing.assert_close(found, expected)
    of = [*sides, *(parameter for network in both for parameter in network.parameters())]
    torch.testing.assert_close(gradients(found, of), gradients(expected, of))


def test_the_tokens_gradients_agree_with_finite_differences():
    both = networks()
    assert torch.autograd.gradcheck(lambda *sides: by_hand(*sides, *both, True), tokens(n=3, m=2))


@pytest.mark.parametrize("wanted", ["query", "key", "critic", "navigator"])
def test_who_wants_nothing_gets_nothing(wanted):
    sides, both = tokens(), networks()
    learning = {
        "query": sides[:1],
        "key": sides[1:],
        "critic": list(both[0].parameters()),
        "navigator": list(both[1].parameters()),
    }
    truth = gradients(plain(*sides, *both, False), learning[wanted])
    for tensor in itertools.chain(*learning.values()):
        tensor.requires_grad_(False)
    for tensor in learning[wanted]:
        tensor.requires_grad_()
    found = by_hand(*sides, *both, False)
    assert all(feature.requires_grad for feature in found)
    torch.testing.assert_close(gradients(found, learning[wanted]), truth)


def test_a_graph_that_is_kept_gives_the_same_twice():
    sides, both = tokens(), networks()
    losses = conditional_transport(*by_hand(*sides, *both, False))
    of = [*sides, *both[0].parameters(), *both[1].parameters()]
    first = torch.autograd.grad(losses.sum(), of, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), of), first, rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("navigator_ascends", [False, True])
def test_a_matching_is_conditional_transport_of_plain_features(masked, standardise, navigator_ascends):
    options = {"standardise": standardise, "navigator_ascends": navigator_ascends}
    matcher = METHODS["ct"][0](resolve("ct", None, "stable", options).matcher)
    matcher.ensure(NAMES, WIDTH, torch.device("cpu"))
    matcher.double()
    sides = tokens()
    masks = [None, None]
    if masked:  # one sample has no key at all
        masks = [right_padding([6, 2, 4, 3, 1, 6], 6), right_padding([2, 4, 1, 0, 3, 4], 4)]
    of_layers = (None if mask is None else mask.unflatten(0, (LAYERS, SAMPLES)) for mask in masks)
    losses = matcher(*sides, *of_layers, NAMES).flatten(0, 1)
    seen = sides
    if standardise:
        seen = on_one_scale(*(side.flatten(0, 1) for side in sides), *masks)
        seen = [side.unflatten(0, (LAYERS, SAMPLES)) for side in seen]
    features = plain(*seen, *matcher.banks[0].values(), navigator_ascends)
    expected = conditional_transport(*features, query_mask=masks[0], key_mask=masks[1])
    torch.testing.assert_close(losses, expected)
    of = [*sides, *matcher.parameters()]
    found, truth = (torch.autograd.grad(value.sum(), of) for value in (losses, expected))
    torch.testing.assert_close(found, truth)
