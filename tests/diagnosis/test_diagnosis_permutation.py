"""Noise of MMD²: against mmd() of tokens that were swapped by hand, and as a test that keeps its level."""

import pytest
import torch
from scipy import stats

from alignattn.diagnosis.draws import _STEP, _scrambled, dealt, mixed, signs, start
from alignattn.diagnosis.permutation import permuted
from alignattn.functional import mmd

CPU = torch.device("cpu")


def run(query, key, query_mask=None, key_mask=None, permutations=60, seed=3, first=0):
    masks = [
        torch.ones(t.shape[0], t.shape[2], dtype=torch.bool) if m is None else m
        for t, m in ((query, query_mask), (key, key_mask))
    ]
    sample = torch.arange(first, first + len(query))
    return permuted(query, key, *masks, sample=sample, seed=seed, permutations=permutations)


def test_numbers_are_those_of_splitmix64():
    assert int(_scrambled(torch.tensor(_STEP))) % 2**64 == 0xE220A8397B1DCDAF  # the first that seed 0 gives


def test_bits_are_fair_and_know_nothing_of_each_other():
    found = signs(0, 5, 500, 201, CPU)
    assert set(found.unique().tolist()) == {-1.0, 1.0} and bool((found[:, 0] == 1).all())
    drawn = found[:, 1:]
    assert abs(float(drawn.mean())) < 4 / (500 * 200) ** 0.5
    products = (drawn.T @ drawn / 500).fill_diagonal_(0.0)
    assert float(products.abs().max()) < 5.5 / 500**0.5  # of 40,000 correlations
    assert not signs(0, 6, 500, 201, CPU).equal(found) and not signs(1, 5, 500, 201, CPU).equal(found)


def test_as_many_are_dealt_to_queries_as_there_are():
    found = dealt(0, 2, 7, 19, 300, CPU)
    assert bool((found.sum(0) == 7).all()) and found[:, 0].tolist() == [1.0] * 7 + [0.0] * 12
    assert found[:, 1:].mean(1) == pytest.approx(torch.full((19,), 7 / 19).numpy(), abs=0.12)


def test_numbers_of_different_parts_differ():
    found = mixed(*start(0, torch.arange(50)[:, None], CPU), torch.arange(50))
    assert len(found.unique()) == 2500


def test_each_permutation_is_the_mmd_of_tokens_that_changed_places():
    query, key = torch.randn(3, 2, 6, 4), torch.randn(3, 2, 6, 4) + 0.5
    found = run(query, key)
    for column in (0, 1, 7, 60):
        total = torch.zeros(2)
        for i in range(3):
            stay = signs(3, i, 6, 61, CPU)[:, column] > 0
            mine, other = (torch.where(stay[:, None], a[i], b[i])[None] for a, b in ((query, key), (key, query)))
            total += mmd(mine, other)[0]
        torch.testing.assert_close(found[:, column].float(), total, atol=2e-6, rtol=1e-5)


def test_with_fewer_keys_than_queries_tokens_are_dealt_anew():
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 8, 4) * 2
    found = run(query, key)
    for column in (0, 1, 33):
        total = torch.zeros(3)
        for i in range(2):
            pooled, mine = torch.cat([query[i], key[i]], 1), dealt(3, i, 5, 13, 61, CPU)[:, column].bool()
            total += mmd(pooled[None, :, mine], pooled[None, :, ~mine])[0]
        torch.testing.assert_close(found[:, column].float(), total, atol=2e-6, rtol=1e-5)


def test_long_samples_take_their_bandwidth_from_some_tokens():
    query, key = torch.randn(1, 1, 400, 4), torch.randn(1, 1, 400, 4) + 1
    assert float(run(query, key)[0, 0]) == pytest.approx(float(mmd(query, key)), rel=0.03)


def test_padding_and_batches_change_nothing():
    query, key = torch.randn(4, 2, 5, 3), torch.randn(4, 2, 5, 3)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]).bool()
    whole = run(query, key, mask, mask)
    garbage = [t.masked_fill(~mask[:, None, :, None], torch.nan) for t in (query, key)]
    longer = [torch.nn.functional.pad(t, (0, 0, 2, 3), value=torch.inf) for t in garbage]
    wide = torch.nn.functional.pad(mask, (2, 3))
    torch.testing.assert_close(run(*longer, wide, wide), whole)
    parts = run(query[:1], key[:1], mask[:1], mask[:1]) + run(query[1:], key[1:], mask[1:], mask[1:], first=1)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("kind", ["apart", "own pairs", "cross"])
def test_of_one_distribution_the_interval_holds_19_of_20_and_p_is_uniform(kind):
    heads, samples, n = 400, 12, 8
    query, key = torch.randn(samples, heads, n, 4), torch.randn(samples, heads, n + 3 * (kind == "cross"), 4)
    if kind == "own pairs":  # a token's query is near its own key, and tokens differ
        token = 2 * torch.randn(samples, heads, n, 4)
        query, key = query + token, key + token
    found = run(query, key, permutations=199)
    seen, chance = found[:, :1], found[:, 1:]
    ends = chance.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 1)
    inside = ((seen[:, 0] >= ends[0]) & (seen[:, 0] <= ends[1])).double().mean()
    assert 0.92 <= float(inside) <= 0.98
    p = (1 + (chance >= seen).sum(1)) / 200
    assert stats.kstest(p.numpy(), "uniform").pvalue > 0.01


def test_tokens_that_are_all_alike_give_zero():
    assert run(torch.ones(2, 1, 4, 3), torch.ones(2, 1, 4, 3)).abs().max() < 1e-6
    assert bool(run(torch.zeros(2, 1, 4, 3), torch.randn(2, 1, 4, 3)).isfinite().all())
