"""Fewer tokens and layers a step: what is drawn is fair, told by the seed, and on average the whole."""

import copy
from collections import Counter

import pytest
import torch

import alignattn
from alignattn import balance
from alignattn.capture import QueryKey
from alignattn.errors import ConfigError
from alignattn.thinning import Thinning

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")

SIZES = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


@pytest.fixture
def bert():
    torch.manual_seed(0)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **still)).train()


@pytest.fixture
def batch():
    ids = torch.randint(0, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}


def row(length=12, other=None, masked=True):
    numbers = torch.arange(3 * length, dtype=torch.float32).view(3, 1, length, 1).expand(3, 2, length, 8)
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[0, 4:] = False
    mask[1, 1:] = False
    mask = mask if masked else None
    if other is None:
        return QueryKey(query=numbers, key=numbers + 0.5, query_mask=mask, key_mask=mask)
    key = torch.arange(3 * other, dtype=torch.float32).view(3, 1, other, 1).expand(3, 2, other, 8)
    return QueryKey(query=numbers, key=key, query_mask=mask)


def drawn(thinning, update, record):
    thinning.begin(update)
    return thinning.tokens(record)


def test_tokens_are_valid_ones_of_their_sample_the_same_of_queries_and_keys():
    thinning = Thinning(5, 1, 0)
    for update in range(20):
        few = drawn(thinning, update, row())
        assert few.query.shape == few.key.shape == (3, 2, 5, 8) and few.query_mask.shape == (3, 5)
        torch.testing.assert_close(few.key, few.query + 0.5)
        assert few.query_mask.sum(1).tolist() == [4, 1, 5]  # all valid ones where there are fewer
        for sample in range(3):
            places = few.query[sample, 0, :, 0][few.query_mask[sample]] - 12 * sample
            assert places.unique().numel() == places.numel() and places.max() < (4, 1, 12)[sample]
            torch.testing.assert_close(places, places.sort().values)


def test_every_token_is_as_likely_as_any_other():
    thinning, counts = Thinning(3, 1, 0), Counter()
    for update in range(3000):
        few = drawn(thinning, update, row())
        counts.update(int(x) - 24 for x in few.query[2, 0, :, 0])
    # 3000 draws of 3 out of 12: 750 each, deviation 24
    assert set(counts) == set(range(12)) and all(abs(count - 750) < 5 * 24 for count in counts.values())


def test_keys_of_another_length_are_drawn_by_themselves():
    few = drawn(Thinning(5, 1, 0), 0, row(4, other=9, masked=False))
    assert few.query.shape[2] == 4 and few.key.shape[2] == 5
    few = drawn(Thinning(9, 1, 0), 0, row(12, masked=False))
    assert few.query_mask is None and few.query.shape[2] == 9
    whole = row(12)
    assert drawn(Thinning(12, 1, 0), 0, whole) is whole


def test_what_is_drawn_is_told_by_the_seed_and_the_update_and_leaves_torch_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = Thinning(5, 3, 7), Thinning(5, 3, 7), Thinning(5, 3, 8)

    def draws(thinning, update):
        first = drawn(thinning, update, row()).query
        return first, thinning.layers([6]), drawn(thinning, update, row()).query

    drawn(one, 0, row())
    mine, theirs, strangers = draws(one, 4), draws(two, 4), draws(other, 4)
    assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1] and torch.equal(mine[2], theirs[2])
    assert not torch.equal(mine[0], strangers[0])
    assert not torch.equal(mine[0], mine[2])  # the next loss of the same update draws anew
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_are_one_in_so_many_and_never_none():
    thinning = Thinning(None, 3, 0)
    seen = Counter()
    for update in range(600):
        thinning.begin(update)
        chosen, counted = thinning.layers([5, 5])
        assert counted == 3 and chosen[:5] == chosen[5:] and 1 <= sum(chosen[:5]) <= 2
        seen.update(place for place in range(5) if chosen[place])
    assert all(abs(count - 200) < 5 * 12 for count in seen.values()) and len(seen) == 5
    thinning.begin(0)
    assert thinning.layers([2, 5])[1] == 2  # fewer layers than that: each counts less


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_on_average_over_what_can_be_drawn_it_is_the_loss_of_all_layers(bert, batch, reduction, monkeypatch):
    options = {"weight": 1.0, "reduction": reduction, "recentre": False, "add_to_outputs": False}

    def term(phase, **more):
        model = copy.deepcopy(bert)
        alignment = alignattn.align(model, "mmd", **options, **more)
        alignment._strength.set_clock(1)  # not looked at
        monkeypatch.setattr("random.Random.randrange", lambda self, every: phase)
        model(**batch)
        loss = alignment.loss()
        loss.backward()
        gradients = [p.grad for n, p in model.named_parameters() if "query" in n or "key" in n]
        logged = alignment.meter.read()["alignment_loss"]
        alignment.detach()
        zeros = [torch.zeros_like(p) for n, p in model.named_parameters() if "query" in n or "key" in n]
        return loss.detach(), [z if g is None else g for g, z in zip(gradients, zeros, strict=True)], logged

    whole, gradients, _ = term(0)
    parts = [term(phase, every=2) for phase in (0, 1)]
    torch.testing.assert_close((parts[0][0] + parts[1][0]) / 2, whole)
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close((parts[0][1][i] + parts[1][1][i]) / 2, gradient, rtol=1e-4, atol=1e-6)
    if reduction == "sum":  # logs of a mean are the mean of what was matched
        assert float(parts[0][0]) == pytest.approx(parts[0][2], rel=1e-5)


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_every_method_trains_and_only_looks_see_all_layers(bert, batch, method, generator):
    alignment = alignattn.align(bert, method, weight=0.1, max_tokens=6, every=2, generator=generator)
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.01)
    seen = []
    for _ in range(2 * balance.EVERY if balance.EVERY > 1 else 4):
        loss = bert(**batch).loss
        seen.append(len(alignment.parts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    looked = [count for step, count in enumerate(seen) if step % balance.EVERY == 0]
    assert set(looked) == {5}
    if balance.EVERY > 1:
        assert set(seen) == {2, 3, 5}
    logs = alignment.meter.read()
    assert len([name for name in logs if name.startswith("alignment/")]) == 5


def test_gradients_reach_the_tokens_that_were_drawn_and_no_others():
    numbers = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, 9, 4, generator=numbers).requires_grad_() for _ in range(2))
    alignment = alignattn.Alignment("mmd", weight=1.0, max_tokens=4)
    alignment.record(query, key)
    alignment.loss().backward()
    for side in (query, key):
        touched = side.grad.abs().sum((1, 3)) > 0  # (b, n)
        assert touched.sum(1).tolist() == [4, 4]
    torch.testing.assert_close(query.grad.abs().sum((1, 3)) > 0, key.grad.abs().sum((1, 3)) > 0)


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": 2.5}, {"every": 0}, {"every": True}])
def test_bad_values_are_refused(options):
    with pytest.raises(ConfigError, match="whole number"):
        alignattn.Alignment("mmd", **options)


def test_defaults_leave_no_trace_in_a_result_file():
    assert not {"max_tokens", "every"} & alignattn.Alignment("mmd").config.acting().keys()
    assert alignattn.Alignment("mmd", every=2, max_tokens=9).config.acting()["every"] == 2
