"""Gradients that were computed before are handed on, times the factor that each was given with."""

import pytest
import torch

import alignattn
from alignattn.capture import QueryKey
from alignattn.delivery import Delivery, Slice
from alignattn.matching.matcher import Matcher, MatcherConfig
from alignattn.replay import Lease


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_target_gets_its_own_gradient_times_its_own_factor(dtype):
    """Parts of two wholes, and others that stand alone, of several factors and precisions."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    half, weight = 1.0 / 512, torch.tensor(0.7)
    first, second = numbers(3, 2, 4), numbers(2, 5)
    given = [
        *((Slice(first, at), weight) for at in (2, 0, 1)),
        *((Slice(second, at), half) for at in (0, 1)),
        (numbers(6), weight),
        (numbers(2, 3, dtype=torch.float32), half),
        (numbers(1, dtype=torch.float32), half),
        (numbers(dtype=torch.float32), weight),
    ]
    handed, targets, expected = Delivery(), [], []
    for gradient, factor in given:
        alone = gradient.alone() if isinstance(gradient, Slice) else gradient
        targets.append(torch.zeros_like(alone, requires_grad=True))
        handed.to(targets[-1], gradient, factor)
        expected.append((alone.double() * float(factor) * 1024).to(alone.dtype))
    term = handed.term(torch.tensor(1.5), torch.tensor([0.5, 1.5]))
    assert term == 3.0
    term += 1  # who is given it may write to it
    (1024 * term).backward()
    for target, one in zip(targets, expected, strict=True):
        torch.testing.assert_close(target.grad, one)


def delivered(target, *, lent, again=False, ours=True, alone=False):
    """What was handed on is left as it was, or is written over; and whether the lease outlives the backward."""
    whole = torch.ones(2, *target.shape)
    handed = Delivery(alone=alone)
    handed.leases.append(Lease())
    leases = handed.leases
    handed.to(target, Slice(whole, 1, ours=ours, lent=lent), 0.5)
    handed.term(1.0, torch.zeros(1)).backward(retain_graph=again)
    assert again == bool(leases)
    return whole


@pytest.mark.parametrize("lent", [False, True])
def test_gradients_that_are_consumed_are_multiplied_where_they_lie(lent):
    linear = torch.nn.Linear(4, 6)
    tokens = torch.randn(2, 5, 4)
    made = (
        lambda: linear(tokens).view(2, 5, 3, 2).transpose(1, 2),
        lambda: linear(tokens).view(2, 5, 3, 2).transpose(1, 2) + linear(tokens).view(2, 3, 5, 2),
        lambda: torch.nn.functional.layer_norm(linear(tokens), (6,)),
        lambda: linear(tokens).split(3, -1)[0],
    )
    for make in made:
        linear.zero_grad()
        assert torch.equal(delivered(make(), lent=lent), torch.full_like(make(), 0.5).expand(2, *make().shape))
        assert linear.weight.grad.any()
        for spared in ({"again": True}, {"ours": False}, {"alone": True} if lent else {"again": True}):
            kept = delivered(make(), lent=lent, **spared)
            assert torch.equal(kept, torch.ones_like(kept))


def test_what_is_lent_is_left_alone_where_somebody_may_keep_it():
    """A parameter, or who asked for it, would be given a view of it, which the next replay writes over."""
    weight = torch.nn.Parameter(torch.randn(2, 6))
    asked_for = torch.nn.Linear(6, 6)(weight)
    asked_for.retain_grad()
    hooked = torch.nn.Linear(6, 6)(weight)
    hooked.register_hook(lambda gradient: None)
    added = torch.addmm(weight, torch.randn(2, 3), torch.randn(3, 6))
    views = weight.view(3, 4), weight + 1, weight.T.unsqueeze(0), weight.double().float()
    beside = torch.nn.Linear(6, 6)(weight) + weight  # consumed on one way and not on the other
    for target in (weight, *views, added, beside, hooked, asked_for):
        whole = delivered(target, lent=True)
        assert torch.equal(whole, torch.ones_like(whole))
    torch.testing.assert_close(asked_for.grad, torch.full((2, 6), 0.5))
    own = delivered(weight.view(3, 4), lent=False)  # nobody else's: they may have it
    assert torch.equal(own[1], torch.full_like(own[1], 0.5))


@pytest.mark.parametrize("lent", [False, True])
def test_layers_get_their_parts_as_if_each_had_been_told_of(lent):
    """The queries of three calls and then their keys, of which one wants no gradient, and one is somebody's own."""
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(4, 4)
    records = []
    for _ in range(3):
        sides = [linear(torch.randn(2, 5, 4, generator=generator)).view(2, 5, 2, 2).transpose(1, 2) for _ in range(2)]
        records.append(QueryKey(*sides))
    own = torch.nn.Parameter(torch.randn(2, 2, 5, 2, generator=generator))
    records[1] = QueryKey(records[1].query.detach(), records[1].key)
    records[2] = QueryKey(own, records[2].key)
    whole = torch.randn(6, 2, 2, 5, 2, generator=generator)
    before = whole.clone()
    handed = Delivery(alone=False)
    handed.leases.append(Lease())
    handed.to_layers(records, Slice(whole, 0, ours=True, lent=lent), 0.5)
    sides = [record.query for record in records] + [record.key for record in records]
    wanted = [at for at, side in enumerate(sides) if side.requires_grad]
    assert wanted == [0, 2, 3, 4, 5]
    found = torch.autograd.grad(handed.term(1.0, torch.ones(1)), [sides[at] for at in wanted])
    for at, gradient in zip(wanted, found, strict=True):
        torch.testing.assert_close(gradient, 0.5 * before[at])
    assert torch.equal(whole, before) == lent  # a parameter may keep it: then a lent one is left as it is


class OfSums(Matcher):
    """Of sums over tokens: autograd hands out one number for all of them."""

    def forward(self, query, key, *_):
        return (query.sum(-2) - key.sum(-2)).square().sum(-1)


class OfBoth(Matcher):
    """Autograd hands out one tensor for queries and keys."""

    def forward(self, query, key, *_):
        return (query.mT + key.mT).square().sum((-1, -2))


@pytest.mark.parametrize("kind", [OfSums, OfBoth])
def test_gradients_that_autograd_made_are_not_written_over(kind):
    """Of a matcher of one's own: those of queries and keys may be one, and would be multiplied twice."""
    alignment = alignattn.Alignment(kind(MatcherConfig()), weight=0.5, recentre=False)
    query, key = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(2))
    alignment.record(query * 1, key * 1)
    alignment.loss().backward()
    loss = kind(MatcherConfig())(query, key).mean() * 0.5  # over samples and heads
    for found, expected in zip((query.grad, key.grad), torch.autograd.grad(loss, (query, key)), strict=True):
        torch.testing.assert_close(found, expected)
