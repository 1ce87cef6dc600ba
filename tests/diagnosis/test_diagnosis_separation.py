"""Telling keys from queries: against scikit-learn and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from alignattn.diagnosis.separation import Sampled, _areas, placed, separation


def sampled(tokens, most=5000, mask=None, first=0, seed=0):
    """Tokens [b, h, n, d], kept."""
    kept = Sampled(most, seed)
    mask = torch.ones(tokens.shape[0], tokens.shape[2], dtype=torch.bool) if mask is None else mask
    kept.add(tokens, mask, torch.arange(first, first + len(tokens)))
    return kept


def test_shares_below_are_scikit_learns_area_ties_included():
    queries, keys = torch.randint(0, 6, (3, 40)).double(), torch.randint(1, 8, (3, 30)).double()
    for head in range(3):
        labels = np.r_[np.ones(40), np.zeros(30)]
        expected = roc_auc_score(labels, torch.cat([queries[head], keys[head]]).numpy())
        assert float(placed(queries, keys)[head].mean()) == pytest.approx(expected)
        assert float(1 - placed(keys, queries)[head].mean()) == pytest.approx(expected)


def test_area_is_the_mean_over_folds_by_their_tokens():
    scores, is_query = torch.randn(2, 60).double(), torch.rand(60) < 0.5
    fold, cluster = torch.randint(0, 3, (60,)), torch.arange(60)
    found, _ = _areas(scores, is_query, fold, cluster)
    for head in range(2):
        areas = [roc_auc_score(is_query[fold == i], scores[head, fold == i]) for i in range(3)]
        expected = sum(area * float((fold == i).sum()) for i, area in enumerate(areas)) / 60
        assert float(found[head]) == pytest.approx(expected)


@pytest.mark.parametrize("delta", [0.5, 1.0, 2.0])
def test_two_gaussians_are_told_apart_as_far_as_they_can_be(delta):
    query, key = torch.randn(300, 2, 10, 6), torch.randn(300, 2, 10, 6)
    query[..., 2] += delta
    area, interval = separation(sampled(query), sampled(key))
    expected = stats.norm.cdf(delta / math.sqrt(2))
    assert area.tolist() == pytest.approx([expected] * 2, abs=0.02)
    assert bool((interval[:, 0] < area).all()) and bool((area < interval[:, 1]).all())


def test_a_difference_of_spread_is_seen():
    query, key = torch.randn(400, 1, 10, 1), 3 * torch.randn(400, 1, 10, 1)
    area, _ = separation(sampled(query), sampled(key))
    assert float(area) == pytest.approx(2 / math.pi * math.atan(3), abs=0.015)  # P(|q| < |k|)


def test_of_one_distribution_the_interval_holds_a_half_though_tokens_of_a_sample_are_alike():
    heads, samples, n = 200, 60, 8
    of_sample = torch.randn(2, samples, heads, 1, 3)  # that tokens of a sample share, on either side
    query, key = (torch.randn(samples, heads, n, 3) + 1.5 * of_sample[side] for side in (0, 1))
    area, interval = separation(sampled(query), sampled(key))
    assert float(area.mean()) == pytest.approx(0.5, abs=0.015)
    inside = ((interval[:, 0] <= 0.5) & (interval[:, 1] >= 0.5)).double().mean()
    assert 0.91 <= float(inside) <= 0.99
    per_token = 1 / math.sqrt(6 * samples * n) * 1.96  # half the width were tokens independent: far too narrow
    assert float((interval[:, 1] - interval[:, 0]).mean() / 2) > 1.5 * per_token


def test_a_classifier_never_sees_the_sample_it_is_asked_about():
    # Each sample has a direction of its own: known, it tells all; held out, it tells nothing.
    direction = torch.randn(40, 1, 1, 60) * 3
    query = direction + 0.1 * torch.randn(40, 1, 4, 60)
    key = -direction + 0.1 * torch.randn(40, 1, 4, 60)
    area, _ = separation(sampled(query), sampled(key))
    assert 0.3 < float(area) < 0.7


def test_what_is_kept_is_drawn_from_all_and_does_not_feel_batches_or_padding():
    tokens = torch.arange(200.0).view(20, 1, 10, 1)
    whole = sampled(tokens, most=50)
    assert len(whole.tokens) == 50 and 60 < float(whole.tokens.mean()) < 140
    parts = Sampled(50, 0)
    for i in range(0, 20, 3):
        some = tokens[i : i + 3]
        padded = torch.nn.functional.pad(some, (0, 0, 2, 1), value=torch.nan)
        mask = torch.ones(len(some), 10, dtype=torch.bool)
        parts.add(padded, torch.nn.functional.pad(mask, (2, 1)), torch.arange(i, i + len(some)))
    assert sorted(parts.tokens.flatten().tolist()) == sorted(whole.tokens.flatten().tolist())
    assert sorted(sampled(tokens, most=50, seed=1).tokens.flatten()) != sorted(whole.tokens.flatten())


def test_one_sample_cannot_be_held_out():
    area, interval = separation(sampled(torch.randn(1, 2, 9, 3)), sampled(torch.randn(1, 2, 9, 3)))
    assert bool(area.isnan().all()) and bool(interval.isnan().all())


def test_keys_that_never_vary_are_told_apart_where_queries_stand_elsewhere():
    query, key = torch.randn(50, 1, 6, 3) + 4, torch.ones(50, 1, 6, 3)
    area, interval = separation(sampled(query), sampled(key))
    assert float(area) > 0.95 and bool(interval.isfinite().all())
    same, _ = separation(sampled(key), sampled(key))
    assert float(same) == 0.5
