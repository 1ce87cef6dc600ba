"""What the logs say of an alignment's health, against the same by hand; and the warnings."""

import warnings

import pytest
import torch
from torch import nn

import alignattn
from alignattn import balance
from alignattn.devices import Arriving
from alignattn.distances import SAMPLES, Distances, Seen
from alignattn.errors import AlignmentWarning, NonFiniteError
from alignattn.finite import FiniteCheck
from alignattn.health import ADVICE, LOOKS_TO_MOVE, PATIENCE, Health
from alignattn.matching.scale import standardise


@pytest.fixture(autouse=True)
def _every_update(monkeypatch):
    monkeypatch.setattr(balance, "EVERY", 1)


def one_update(bert, batch, method):
    """The logs after one update, and the records that went into it with the alignment."""
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    alignment = alignattn.align(bert, method, weight=1.0)
    records = []
    add = alignment._passes.add
    alignment._tap._watch = lambda record: (records.append(record), add(record))
    bert(**batch).loss.backward()
    networks = {name: value.clone() for name, value in alignment.matcher.state_dict().items()}
    torch.optim.SGD(bert.parameters(), lr=0.0).step()
    logs = alignment.meter.read()
    alignment.matcher.load_state_dict(networks)
    return logs, records, alignment.matcher


def of_valid(records, network, bank):
    """The network's answers to the valid queries and keys, [tokens, out] each, a sample and head at a time."""
    for layer, record in enumerate(records):
        q, k = standardise(record.query, record.key, record.query_mask, record.key_mask)
        index = torch.tensor([layer])
        for b in range(len(q)):
            for h in range(q.shape[1]):
                yield tuple(
                    bank[network](side[b, h][mask[b]][None], index)[0]
                    for side, mask in ((q, record.query_mask), (k, record.key_mask))
                )


@torch.no_grad()
def test_accuracy_of_the_discriminator_is_that_of_every_token(bert, batch):
    with torch.enable_grad():
        logs, records, matcher = one_update(bert, batch, "gan")
    rates = []
    for queries, keys in of_valid(records, "discriminator", matcher.banks[0]):
        rates.append(((queries > 0).float().mean() + (keys < 0).float().mean()) / 2)
    assert logs["discriminator_accuracy"] == pytest.approx(float(torch.stack(rates).mean()), rel=1e-4)


@torch.no_grad()
def test_the_critic_gap_is_the_distance_of_mean_directions(bert, batch):
    with torch.enable_grad():
        logs, records, matcher = one_update(bert, batch, "ct")
    gaps = []
    for sides in of_valid(records, "critic", matcher.banks[0]):
        means = [(side / side.norm(dim=-1, keepdim=True)).mean(0) for side in sides]
        gaps.append((means[0] - means[1]).norm())
    assert logs["critic_gap"] == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-3)


@pytest.mark.parametrize("method", ["gan", "ot"])
def test_mmd_in_the_logs_is_that_of_the_first_records(bert, batch, method):
    logs, records, _ = one_update(bert, batch, method)
    values = []
    for record in records:
        masks = {name: getattr(record, name)[:SAMPLES] for name in ("query_mask", "key_mask")}
        some = record.query[:SAMPLES], record.key[:SAMPLES]
        values.append(alignattn.functional.mmd(*some, bandwidth="mean", **masks).mean())
    assert logs["alignment_mmd"] == pytest.approx(float(torch.stack(values).mean().detach()), rel=1e-4)


def looks(count, *, share=0.1, accuracy=0.7, mmd=lambda look: 1.0 / (look + 1)):
    """The warnings of so many looks with these figures."""
    health = Health()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for look in range(count):
            seen = Seen(torch.tensor(float(mmd(look))), torch.tensor(10.0))
            health.settle(torch.tensor(share), seen, {"discriminator_accuracy": torch.tensor(accuracy)})
    return [(str(one.message), one.category) for one in told]


def test_a_sound_alignment_says_nothing():
    assert looks(60) == []


@pytest.mark.parametrize(
    ("figures", "kind", "after"),
    [
        ({"share": 0.55}, "eats", PATIENCE),
        ({"mmd": lambda look: -0.04}, "merged", PATIENCE),
        ({"accuracy": 0.5}, "behind", PATIENCE),
        ({"accuracy": 1.0}, "collapsed", PATIENCE),
        ({"mmd": lambda look: 1.0}, "still", LOOKS_TO_MOVE + PATIENCE - 1),
    ],
)
def test_each_illness_is_told_of_once_with_what_to_do(figures, kind, after):
    assert looks(after, **figures) == []  # a look is judged at the next
    ((message, category),) = looks(100, **figures)
    assert message == ADVICE[kind] and category is AlignmentWarning
    assert len(looks(after + 1, **figures)) == 1


@pytest.mark.parametrize("padded", [True, False])
def test_queries_that_are_their_own_keys_are_told_of_and_others_are_not(padded):
    """Their MMD² is -2 (1 - mean kernel) / tokens; independent ones have none on average."""
    numbers = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 2, 40, dtype=torch.bool)
    mask[..., 25:] = False
    masks = (mask, mask) if padded else (None, None)
    for alike in (True, False):
        health, distances = Health(), Distances()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(PATIENCE + 1):
                query, other = torch.randn(2, 3, 2, 4, 40, 8, generator=numbers).unbind()
                distances.watch(["a", "b", "c"], query, query if alike else other, *masks)
                health.settle(torch.tensor(0.1), distances.settle(), {})
        assert [str(one.message) for one in told] == ([ADVICE["merged"]] if alike else [])


def test_one_bad_look_is_none():
    health = Health()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for look in range(30):
            health.settle(torch.tensor(9.0 if look % 3 else 0.1), None, {})


def test_copies_of_queries_and_keys_have_all_figures_too(encoder):
    alignment = alignattn.align(encoder, "ct", weight=0.001)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * PATIENCE):
            (encoder(torch.randn(2, 5, 16))[..., 0].square().mean() + alignment.loss()).backward()
            optimizer.step()
    logs = alignment.meter.read()
    assert {"alignment_share", "alignment_mmd", "critic_gap"} <= set(logs)


def test_what_is_not_finite_is_raised_for_when_it_is_asked_for():
    """Of an accelerator's answers that have arrived, but for so many of the last."""
    check = FiniteCheck()
    check._pending.append((["a"], Arriving(torch.tensor([False]))))
    check.look(but=1)
    check._pending.append((["b"], Arriving(torch.tensor([True]))))
    with pytest.raises(NonFiniteError, match="keys of a\\."):
        check.look(but=1)
    check.look()
    assert not check._pending
