"""Which heads are left alone, and that they are."""

import copy
import json

import pytest
import torch

import alignattn
from alignattn import distances
from alignattn.distances import Distances

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")

NAMES = ["first", "second"]


def tokens(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_of_a_long_sample_some_tokens_are_looked_at_evenly_spaced(monkeypatch):
    monkeypatch.setattr(distances, "TOKENS", 4)
    query, key = tokens(0, 1, 1, 3, 10, 4), 1 + tokens(1, 1, 1, 3, 10, 4)
    mask = torch.ones(1, 1, 10, dtype=torch.bool)
    mask[..., 7] = False
    seen = Distances()
    seen.watch(["first"], query, key, mask, mask)
    told = seen.settle()
    some = [0, 2, 5]  # and 7, which is no token
    by_hand = alignattn.functional.mmd(query[0, :, :, some], key[0, :, :, some], bandwidth="mean")
    assert told is not None
    torch.testing.assert_close(told.mmd, by_hand.mean())
    assert told.tokens == 3


def test_it_is_the_mmd_of_each_head_smoothed_over_looks():
    seen = Distances()
    by_hand = None
    for look in range(4):
        query, key = tokens(look, 2, 6, 3, 9, 4), 1 + tokens(10 + look, 2, 6, 3, 9, 4)
        mask = torch.ones(2, 6, 9, dtype=torch.bool)
        mask[:, :2, 6:] = False
        seen.watch(NAMES, query, key, mask, mask)
        told = seen.settle()
        now = torch.zeros(2, 3)
        for layer in range(2):
            for head in range(3):
                of_samples = [
                    alignattn.functional.mmd(
                        query[layer, s, head, : mask[layer, s].sum()][None, None],
                        key[layer, s, head, : mask[layer, s].sum()][None, None],
                        bandwidth="mean",
                    )
                    for s in range(distances.SAMPLES)
                ]
                now[layer, head] = torch.cat(of_samples).mean()
        by_hand = now if by_hand is None else (by_hand + now) / 2
        assert told.mmd == pytest.approx(float(now.mean()), rel=1e-4)
        assert told.tokens == pytest.approx(7.5)
    state = seen.state_dict()
    torch.testing.assert_close(torch.stack([state[f"{name}/3"] for name in NAMES]), by_hand, rtol=1e-4, atol=1e-5)


def test_a_layer_that_comes_later_begins_with_what_is_seen_of_it_then():
    """Beside one that is smoothed, and one with another number of heads; what is no number changes nothing known."""
    seen = Distances()
    seen.load_state_dict({"first/2": torch.tensor([1.0, 2.0]), "third/2": torch.tensor([3.0, float("nan")])})
    seen._now = {
        "first/2": [torch.tensor([3.0, float("nan")])],
        "second/2": [torch.tensor([5.0, float("inf")])],
        "third/2": [torch.tensor([5.0, 7.0])],
        "fourth/1": [torch.tensor([4.0]), torch.tensor([6.0])],
    }
    seen._tokens = [torch.tensor(9.0)]
    seen.settle()
    found = {name: row.tolist() for name, row in seen.state_dict().items()}
    assert found == {"first/2": [2.0, 2.0], "second/2": [5.0, float("inf")], "third/2": [4.0, 7.0], "fourth/1": [5.0]}


def test_heads_that_have_met_are_left_alone_and_others_are_not():
    seen = Distances()
    assert seen.acting(NAMES, 2, torch.device("cpu")) is None and seen.settle() is None
    query = tokens(0, 2, 4, 2, 30, 4)
    key = query + torch.tensor([[0.0, 3.0], [3.0, 0.0]])[:, None, :, None, None]  # in a head of each layer they are one
    seen.watch(NAMES, query, key, None, None)
    seen.settle()
    assert seen.acting(NAMES, 2, torch.device("cpu")).tolist() == [[[0.0, 1.0]], [[1.0, 0.0]]]
    assert seen.acting(NAMES[::-1], 2, torch.device("cpu")).tolist() == [[[1.0, 0.0]], [[0.0, 1.0]]]
    assert seen.acting(["unseen", "first"], 2, torch.device("cpu")).tolist() == [[[1.0, 1.0]], [[0.0, 1.0]]]
    for _ in range(20):  # and they part again
        seen.watch(["first"], query[:1], query[:1] + 3, None, None)
        seen.settle()
    assert seen.acting(["first"], 2, torch.device("cpu")).tolist() == [[[1.0, 1.0]]]


def test_what_cannot_be_measured_acts():
    """One token alone, or a distance that is no number."""
    seen = Distances()
    seen.load_state_dict({"first/3": torch.tensor([float("nan"), 0.0, -1e-9])})
    assert seen.acting(["first"], 3, torch.device("cpu")).tolist() == [[[1.0, 1.0, 0.0]]]
    lonely = Distances()
    lonely.watch(["first"], tokens(0, 1, 4, 2, 1, 4), tokens(1, 1, 4, 2, 1, 4), None, None)
    lonely.settle()
    assert lonely.acting(["first"], 2, torch.device("cpu")).tolist() == [[[1.0, 1.0]]]


def test_one_name_may_stand_for_attentions_of_different_numbers_of_heads():
    alignment = alignattn.Alignment("mmd", weight=0.5)
    pairs = [[torch.nn.Parameter(tokens(i, 2, heads, 5, 4)) for i in range(2)] for heads in (2, 4, 1)]
    optimizer = torch.optim.SGD([side for pair in pairs for side in pair], 0.1)
    for step in range(25):
        for pair in pairs[step % 3 : step % 3 + 1] if step % 2 else pairs:
            alignment.record(*pair)
            alignment.loss().backward()
        optimizer.step()
    assert {len(row) for row in alignment._strength.distances.state_dict().values()} == {1, 2, 4}
    seen = Distances()
    seen.load_state_dict({"first/1": torch.tensor([-1.0])})
    assert seen.acting(["first"], 1, torch.device("cpu")).tolist() == [[[0.0]]]
    assert seen.acting(["first"], 4, torch.device("cpu")).tolist() == [[[1.0] * 4]]


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_no_gradient_reaches_a_head_that_has_met_and_the_others_get_theirs(bert, batch, method):
    """Of the last layer, behind which alignment reaches no other; the loss in the logs is that of all heads."""
    options = {"weight": 0.5, "layers": -1, "recentre": False, "add_to_outputs": False}
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    gradients, values = {}, {}
    for until_met in (False, True):
        model = copy.deepcopy(bert)
        alignment = alignattn.align(model, method, until_met=until_met, **options)
        name = alignment._tap.sites[0].name
        heads = model.config.num_attention_heads
        alignment._strength.distances.load_state_dict({f"{name}/{heads}": torch.tensor([-1.0] + [1.0] * (heads - 1))})
        alignment._strength.set_clock(1)  # not an update that is looked at
        model(**batch)
        loss = alignment.loss()
        loss.backward()
        projection = dict(model.named_modules())[name].query.weight.grad
        gradients[until_met], values[until_met] = projection.unflatten(0, (heads, -1)), loss.item()
    assert values[True] == values[False]
    assert gradients[False][0].abs().max() > 0 and gradients[True][0].abs().max() == 0
    torch.testing.assert_close(gradients[True][1:], gradients[False][1:])


@pytest.mark.filterwarnings("ignore:The MMD in the logs is far below zero")
def test_it_keeps_queries_from_becoming_their_own_keys():
    """At a weight that merges them without it."""
    found = {}
    for until_met in (False, True):
        torch.manual_seed(0)
        alignment = alignattn.Alignment("ot", weight=1.0, until_met=until_met)
        query, key = (torch.nn.Parameter(side) for side in (tokens(0, 8, 2, 12, 4), 2 + 2 * tokens(1, 8, 2, 12, 4)))
        optimizer = torch.optim.Adam([query, key], 0.005)
        for _ in range(600):
            alignment.record(query, key)
            optimizer.zero_grad()
            alignment.loss().backward()
            optimizer.step()
        found[until_met] = alignattn.functional.mmd(query, key).mean().item()
    assert found[False] < -0.08 and -0.04 < found[True] < 0.01


def test_what_was_learnt_of_heads_is_saved(bert, batch, tmp_path):
    alignment = alignattn.align(bert, "mmd")
    optimizer = torch.optim.SGD(bert.parameters(), lr=0.0)
    bert(**batch).loss.backward()
    optimizer.step()
    before = alignment._strength.distances.state_dict()
    assert before
    alignment.save(tmp_path)
    alignment.detach()
    again = alignattn.Alignment.load(bert, tmp_path)
    after = again._strength.distances.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again.detach()
    settings = json.loads((tmp_path / "alignment.json").read_text())
    del settings["config"]["until_met"]  # as an earlier version wrote it
    (tmp_path / "alignment.json").write_text(json.dumps(settings))
    older = alignattn.Alignment.load(bert, tmp_path)
    assert not older.config.until_met
    older.detach()
    literal = alignattn.align(bert, "mmd", preset="paper")
    assert not literal.config.until_met and literal.state_dict()["distances"] == {}
