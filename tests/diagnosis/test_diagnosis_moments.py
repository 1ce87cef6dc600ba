"""Distances of means and covariances, in figures one can work out."""

import math

import pytest
import torch

from alignattn.diagnosis.moments import Moments, distances


def moments(tokens, mask=None):
    found = Moments(tokens)
    found.add(tokens, torch.ones(tokens.shape[0], tokens.shape[2], dtype=torch.bool) if mask is None else mask)
    return found


def test_means_and_covariances_are_torchs():
    tokens = torch.randn(4, 2, 6, 3) * 2 + 1
    mask = torch.rand(4, 6) < 0.7
    found = moments(tokens.masked_fill(~mask[:, None, :, None], torch.nan), mask)
    for head in range(2):
        valid = tokens[:, head][mask].double()
        torch.testing.assert_close(found.mean[head], valid.mean(0))
        torch.testing.assert_close(found.covariance[head], torch.cov(valid.T))
        assert float(found.length[head]) == pytest.approx(float(valid.norm(dim=-1).mean()))


def test_points_on_two_axes():
    # Of ±a on the first axis and ±b on the second, with 4 points, the covariance is diag(2 a², 2 b²) / 3.
    def cross(a, b, x=0.0):
        return torch.tensor([[a, 0.0], [-a, 0.0], [0.0, b], [0.0, -b]])[None, None] + torch.tensor([x, 0.0])

    query, key = moments(cross(1.0, 2.0, x=3.0)), moments(cross(2.0, 1.0))
    means, covariances = distances(query, key)
    # pooled: (2/3) diag(2.5, 2.5); difference: (2/3) diag(-3, 3)
    assert float(means) == pytest.approx(3 / math.sqrt(2 / 3 * 5))
    assert float(covariances) == pytest.approx(math.hypot(3, 3) / math.hypot(2.5, 2.5))


def test_scale_and_rotation_of_all_vectors_change_nothing():
    query, key = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4) * torch.tensor([1.0, 2.0, 3.0, 0.5]) + 1
    turn = torch.linalg.qr(torch.randn(4, 4)).Q
    plain = distances(moments(query), moments(key))
    turned = distances(moments(query @ turn * 100), moments(key @ turn * 100))
    for one, other in zip(plain, turned, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_covariances_that_share_nothing_are_two_apart():
    still = torch.ones(1, 1, 8, 2) * torch.tensor([3.0, 4.0])
    _, covariances = distances(moments(torch.randn(1, 1, 8, 2)), moments(still))
    assert float(covariances) == pytest.approx(2.0)


def test_two_points_are_one_or_infinitely_apart():
    one, other = torch.full((2, 1, 3, 2), 0.1), torch.full((2, 1, 3, 2), 0.7)
    assert [float(x) for x in distances(moments(one), moments(one))] == [0.0, 0.0]
    assert [float(x) for x in distances(moments(one), moments(other))] == [math.inf, 0.0]


def test_batches_add_up():
    tokens = torch.randn(6, 2, 5, 3)
    parts = Moments(tokens)
    for i in range(0, 6, 2):
        parts.add(tokens[i : i + 2], torch.ones(2, 5, dtype=torch.bool))
    torch.testing.assert_close(parts.covariance, moments(tokens).covariance)
