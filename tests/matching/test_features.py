"""The distance of mean features, and the matcher that descends it."""

import itertools

import pytest
import torch
from problems import random_problem, right_padding

from alignattn.config import resolve
from alignattn.functional import feature_distance
from alignattn.matching.adversarial import AdversarialMatcher


def by_loops(query, key, *, own):
    """Of one problem: means over all pairs of different tokens, one by one."""
    n, m = len(query), len(key)
    if n < 2 or m < 2:
        return 0.0
    of_queries = [float(query[i] @ query[j]) for i, j in itertools.permutations(range(n), 2)]
    of_keys = [float(key[i] @ key[j]) for i, j in itertools.permutations(range(m), 2)]
    across = [float(query[i] @ key[j]) for i in range(n) for j in range(m) if i != j or own]
    gap = sum(of_queries) / len(of_queries) + sum(of_keys) / len(of_keys) - 2 * sum(across) / len(across)
    middle = (query.mean(0) + key.mean(0)) / 2
    variance = sum(float((side - middle).square().sum(-1).mean()) for side in (query, key)) / 2
    return gap / variance


@pytest.mark.parametrize(("n", "m"), [(6, 7), (6, 6), (2, 9), (2, 2)])
def test_it_is_the_mean_over_all_pairs_of_different_tokens(n, m):
    query, key = random_problem(n=n, m=m)
    value = feature_distance(query, key)
    for b, h in itertools.product(range(3), range(2)):
        assert value[b, h].item() == pytest.approx(by_loops(query[b, h], key[b, h], own=n != m), abs=1e-12)


def test_padded_tokens_are_as_if_they_were_not_there():
    query, key = random_problem(n=6, m=6)
    mask = right_padding([6, 2, 4], 6)
    value = feature_distance(query, key, query_mask=mask, key_mask=mask)
    for b, length in enumerate([6, 2, 4]):
        expected = by_loops(query[b, 0, :length], key[b, 0, :length], own=False)
        assert value[b, 0].item() == pytest.approx(expected, abs=1e-12)


def test_neither_a_shift_nor_a_scale_of_all_features_changes_it():
    query, key = random_problem(n=6, m=6)
    torch.testing.assert_close(feature_distance(7 + 3 * query, 7 + 3 * key), feature_distance(query, key))


def test_two_samples_of_one_distribution_are_at_zero_on_average_and_a_shifted_one_at_its_distance():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(4000, 1, 8, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    apart = feature_distance(query, key)
    assert apart.mean().abs() < 4 * apart.std() / 4000**0.5
    # The squared distance of points apart by one in each of three features, over their variance: 7/8 of 3 within each
    # side with 8 tokens, and a quarter of the squared distance of the means, 3 and twice 3/8 of noise.
    moved = feature_distance(query, key + 1)
    assert moved.mean().item() == pytest.approx(3 / (3 * 7 / 8 + (3 + 2 * 3 / 8) / 4), rel=0.05)


@pytest.mark.parametrize(("n", "m"), [(1, 5), (5, 1), (1, 1)])
def test_one_token_tells_nothing(n, m):
    query, key = (t.requires_grad_() for t in random_problem(n=n, m=m))
    value = feature_distance(query, key)
    value.sum().backward()
    assert not value.any() and not query.grad.any() and not key.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("point", [0.0, 0.1, 1e6])
def test_features_that_are_all_one_give_zero_and_no_gradient(dtype, point):
    query, key = (torch.full((1, 1, 10, 3), point, dtype=dtype, requires_grad=True) for _ in range(2))
    value = feature_distance(query, key)
    value.sum().backward()
    assert value.item() == 0 and not query.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_points_are_as_far_apart_as_can_be(dtype):
    """A blank image, say: all queries one, all keys one. No rounding may pass for their variance."""
    query = torch.full((1, 1, 10, 4), 0.1, dtype=dtype, requires_grad=True)
    value = feature_distance(query, torch.full((1, 1, 10, 4), 0.7, dtype=dtype))
    value.sum().backward()
    assert value.item() == pytest.approx(4, rel=1e-4) and query.grad.abs().max() < 1


def test_masks_that_differ_leave_out_the_own_pairs_that_are_there():
    query, key = random_problem(b=1, h=1, n=6, m=6)
    mask = right_padding([3], 6)
    value = feature_distance(query, key, query_mask=mask)
    few, many = query[0, 0, :3], key[0, 0]
    middle = (few.mean(0) + many.mean(0)) / 2
    assert value.item() == pytest.approx(by_loops(few - middle, many - middle, own=False), abs=1e-12)
    torch.testing.assert_close(feature_distance(query + 9, key + 9, query_mask=mask), value)


@pytest.mark.parametrize(("n", "m"), [(5, 5), (6, 4)])
@pytest.mark.parametrize("masked", ["neither", "queries", "both", "alike"])
def test_gradients_are_those_of_finite_differences(n, m, masked):
    generator = torch.Generator().manual_seed(n * m)
    query = torch.randn(2, 2, n, 3, generator=generator, dtype=torch.float64)
    key = 0.5 + torch.randn(2, 2, m, 3, generator=generator, dtype=torch.float64)
    masks = {"query_mask": torch.ones(2, n, dtype=torch.bool), "key_mask": torch.ones(2, m, dtype=torch.bool)}
    masks["query_mask"][0, 1] = masks["key_mask"][0, -1] = masks["key_mask"][1, :2] = False
    if masked == "alike":
        masks["key_mask"] = masks["query_mask"] if n == m else masks["query_mask"][:, :m]
    kept = {"neither": (), "queries": ("query_mask",)}.get(masked, tuple(masks))
    given = {name: mask for name, mask in masks.items() if name in kept}
    torch.autograd.gradcheck(
        lambda q, k: feature_distance(q, k, **given), (query.requires_grad_(), key.requires_grad_())
    )


# The matcher


def matchers(**options):
    """One that descends the value and one that descends the features, with the same discriminator."""
    made = []
    for matched in ("value", "features"):
        config = resolve("gan", None, "stable", {"matched": matched, **options}).matcher
        matcher = AdversarialMatcher(config)
        matcher.ensure(["a", "b"], 5, torch.device("cpu"))
        made.append(matcher.double())
    return made


def stacked():
    query, key = random_problem(b=6, n=6, m=6)  # two layers of three samples
    mask = right_padding([6, 3, 5], 6).expand(2, 3, 6)
    return query.unflatten(0, (2, 3)).requires_grad_(), key.unflatten(0, (2, 3)).requires_grad_(), mask


def test_the_discriminator_learns_what_it_learns_in_the_game_of_the_paper():
    gradients = []
    for matcher in matchers():
        query, key, mask = stacked()
        matcher(query, key, mask, mask, ["a", "b"]).mean().backward()
        gradients.append([p.grad for p in matcher.parameters()])
    assert all(g.abs().max() > 0 for g in gradients[0])
    for of_value, of_features in zip(*gradients, strict=True):
        torch.testing.assert_close(of_features, of_value)


@pytest.mark.parametrize("discriminator", ["highway", "mlp"])
def test_queries_and_keys_descend_the_distance_of_features_and_nothing_else(discriminator):
    matcher = matchers(standardise=False, discriminator=discriminator)[1]
    query, key, mask = stacked()
    losses = matcher(query, key, mask, mask, ["a", "b"])
    losses.sum().backward()
    bank = matcher.banks[0]["discriminator"]
    again = [t.detach().clone().requires_grad_() for t in (query, key)]
    features = [
        torch.stack([bank.features(t[i].reshape(1, -1, 5), torch.tensor([i])).reshape(3, 2, 6, -1) for i in range(2)])
        for t in again
    ]
    masks = {"query_mask": mask.flatten(0, 1), "key_mask": mask.flatten(0, 1)}
    expected = feature_distance(*(f.flatten(0, 1) for f in features), **masks)
    torch.testing.assert_close(losses.flatten(0, 1), expected)
    expected.sum().backward()
    for tokens, other in zip((query, key), again, strict=True):
        torch.testing.assert_close(tokens.grad, other.grad)


def test_a_detached_query_stays_where_it_is():
    matcher = matchers(detach_query=True)[1]
    query, key, mask = stacked()
    matcher(query, key, mask, mask, ["a", "b"]).sum().backward()
    # Through the common scale and mean of both, the query would get a gradient, were it not detached before.
    assert query.grad is None or not query.grad.any()
    assert key.grad.abs().max() > 0


def test_the_accuracy_is_told_of_what_the_discriminator_answers():
    matcher = matchers(standardise=False)[1]
    query, key, mask = stacked()
    matcher.asked = True
    matcher(query, key, mask, mask, ["a", "b"])
    of_queries, of_keys = matcher.through("discriminator", ["a", "b"], query, key)
    right = []
    for logits, sign in ((of_queries, 1), (of_keys, -1)):
        for sample, valid in enumerate(mask.flatten(0, 1).sum(-1).tolist()):
            right.append((sign * logits[sample, :, :valid, 0] > 0).double().mean())
    assert 0 < sum(right) < len(right)
    assert matcher.figures()["discriminator_accuracy"].item() == pytest.approx(float(sum(right) / len(right)), abs=1e-6)
