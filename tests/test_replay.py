"""Matching by records: on a CPU they are made by doing the work again, on an accelerator by CUDA (test_cuda.py)."""

import copy
import dataclasses

import pytest
import torch
import transformers

import alignattn
from alignattn import replay
from alignattn.config import METHODS, resolve
from alignattn.counted import Counted
from alignattn.matching.at_once import differentiate

CONFIG = transformers.BertConfig(
    vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=32, num_labels=2,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


class Recorder:
    """Does the work again, over what it has put out before, as a record on a device does."""

    def __init__(self, *, fails=False):
        self.fails = fails
        self.records = self.played = 0

    def __call__(self, work):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.records += 1
        put_out = work()

        def play():
            self.played += 1
            _over(put_out, work())

        return play, put_out


def _over(old, new):
    for before, after in zip(old, new, strict=True):
        if isinstance(before, list | tuple):
            _over(before, after)
        elif isinstance(before, torch.Tensor) and before is not after:
            before.copy_(after)


def model_of(seed=0):
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(CONFIG).train()


def batch(number, samples=3, tokens=7):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 60, (samples, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, tokens - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(samples) % 2}


def trained(method, recorder, steps=32, tokens=lambda step: 7, **options):
    model = model_of()
    alignment = alignattn.align(model, method, **options)
    alignment.objective.recorder = recorder if recorder is not None else Recorder(fails=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(steps):
        loss = model(**batch(step, tokens=tokens(step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_alike(one, other):
    for (name, expected), (_, found) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_training_by_records_is_training(method):
    recorder = Recorder()
    plain, expected = trained(method, None)
    replayed, losses = trained(method, recorder)
    # One a layer, as on a CPU they are not stacked, with figures and without; and one that multiplies what it puts out.
    assert recorder.records == 2 * 2 * 3
    assert recorder.played == 2 * 3 * (32 - 2 * 2)  # two times before, either
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_alike(plain, replayed)


def test_a_larger_shape_begins_anew_and_a_smaller_one_shares_the_memory():
    recorder = Recorder()
    lengths = [5] * 4 + [9] * 4 + [6] * 4 + [9, 5, 6, 9, 5, 6]
    plain, expected = trained("mmd", None, steps=len(lengths), tokens=lengths.__getitem__, weight=0.5)
    replayed, losses = trained("mmd", recorder, steps=len(lengths), tokens=lengths.__getitem__, weight=0.5)
    assert recorder.records > 3 * 3
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_alike(plain, replayed)


def test_tokens_that_are_drawn_hand_their_gradients_back_to_their_places():
    recorder = Recorder()
    plain, expected = trained("mmd", None, steps=12, weight=0.5, max_tokens=4)
    replayed, losses = trained("mmd", recorder, steps=12, weight=0.5, max_tokens=4)
    assert recorder.played
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_alike(plain, replayed)


@pytest.mark.parametrize("how", ["two forwards", "kept graph", "frozen queries", "scaled"])
def test_what_is_lent_is_not_written_over(how):
    gradients = []
    for recorder in (Recorder(fails=True), Recorder()):
        model = model_of()
        alignment = alignattn.align(model, "mmd", weight=0.5, recentre=False)
        alignment.objective.recorder = recorder
        if how == "frozen queries":
            for layer in model.bert.encoder.layer:
                layer.attention.self.query.requires_grad_(False)
            model.bert.embeddings.requires_grad_(False)
        for step in range(5):
            model.zero_grad()
            loss = model(**batch(step)).loss
            if how == "two forwards":
                loss = loss + 2 * model(**batch(100 + step)).loss
            if how == "kept graph":
                loss.backward(retain_graph=True)
                model(**batch(100 + step)).loss.backward()
            (loss * 3 if how == "scaled" else loss).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert recorder.fails or recorder.played
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_where_recording_fails_it_is_tried_once():
    class Counting(Recorder):
        asked = 0

        def __call__(self, work):
            self.asked += 1
            return super().__call__(work)

    recorder = Counting(fails=True)
    trained("mmd", recorder, steps=8)
    assert recorder.asked == 3  # once a layer


def test_methods_that_look_are_matched_plainly():
    recorder = Recorder()
    trained("ot", recorder, steps=6, max_iterations=50)
    trained("mmd", recorder, steps=6, bandwidth="median")
    assert recorder.records == 0


def test_views_of_a_weight_keep_no_view_of_what_is_lent():
    recorder = Recorder()
    alignment = alignattn.Alignment("mmd", weight=0.5, recentre=False)
    alignment.objective.recorder = recorder
    weight = torch.nn.Parameter(torch.randn(2, 5, 8))
    optimizer = torch.optim.SGD([weight], 0.0)
    before = torch.zeros(0)
    for step in range(8):
        key = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(step))
        alignment.record(weight.view(2, 5, 2, 4).transpose(1, 2), key)
        loss = alignment.loss()
        assert step == 0 or torch.equal(before, weight.grad)  # another matching does not write over it
        optimizer.zero_grad()
        loss.backward()
        before = weight.grad.clone()
        optimizer.step()
    assert recorder.played


def test_recording_draws_no_random_numbers_and_knows_the_settings():
    recorder = Recorder()
    alignment = alignattn.Alignment("mmd", weight=0.5)
    alignment.objective.recorder = recorder
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.0)
    query, key = torch.randn(2, 2, 5, 4, requires_grad=True), torch.randn(2, 2, 5, 4)
    state = torch.random.get_rng_state()
    for bandwidth in ("mean", 0.3):
        alignment.matcher.config = dataclasses.replace(alignment.matcher.config, bandwidth=bandwidth)
        for _ in range(6):
            alignment.record(query, key)
            alignment.loss().backward()
            optimizer.step()
    assert torch.equal(state, torch.random.get_rng_state())
    assert recorder.records == 2 * 2  # each with what multiplies its gradients
    assert replay._layout(None) is None and replay._layout(torch.ones(1, 1, 1, dtype=torch.bool)) == 1


def test_a_copied_alignment_and_a_detached_one_leave_nothing_behind():
    recorder = Recorder()
    model = model_of()
    alignment = alignattn.align(model, "mmd", weight=0.5)
    alignment.objective.recorder = recorder
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(5):
        model(**batch(step)).loss.backward()
        optimizer.step()
    assert recorder.played
    alignment.detach()
    assert not alignment.objective._replays
    assert not any("alignattn" in name for name in copy.deepcopy(model).state_dict())


def test_masks_that_differ_from_layer_to_layer_are_copied_one_by_one():
    mask = torch.tensor([[[True, True, False]], [[True, False, False]]])  # (l, b, n)
    own = replay._like_mask(mask)
    replay._copy_mask(own, ~mask)
    assert torch.equal(own, ~mask)
    shared = mask[0].expand(2, 1, 3)
    own = replay._like_mask(shared)
    assert own.stride(0) == 0
    replay._copy_mask(own, ~shared)
    assert torch.equal(own, ~shared)


@pytest.mark.parametrize("beside", [False, True])  # the heads of a token, in memory
def test_all_that_changes_from_step_to_step_is_read_anew(beside):
    matcher = METHODS["mmd"][0](resolve("mmd", None, "stable", {}).matcher)
    matcher.ensure(["a", "b"], 4, torch.device("cpu"))
    replays = replay.Replays(matcher, Recorder())
    seen = 0
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        queries, keys = ([torch.randn(3, 2, 6, 4, generator=generator) for _ in range(2)] for _ in range(2))
        if beside:
            queries, keys = ([t.transpose(1, 2).contiguous().transpose(1, 2) for t in side] for side in (queries, keys))
        masks = [torch.rand(2, 3, 6, generator=generator) < 0.8 for _ in range(2)]
        weights = [torch.rand(3, generator=generator) for _ in range(2)]
        counted = Counted((0.3, 0.7), (2, 3, 2), weights[0].device, weights, torch.rand(2, 1, 2), scale=4.0)
        outer, acting = counted.in_total(), counted.in_gradient()
        found = replays.match(
            queries, keys, *masks, ["a", "b"], counted, lambda query, key: None, of_query=True, of_key=True
        )
        if found is None:
            continue
        seen += 1
        truth = differentiate(matcher, torch.stack(queries), torch.stack(keys), *masks, ["a", "b"], acting)
        torch.testing.assert_close(found.of_query, truth.query)
        torch.testing.assert_close(found.of_key, truth.key)
        assert found.of_key[1].stride() == keys[1].stride()
        torch.testing.assert_close(found.weighed, (truth.losses * outer).sum((1, 2)))
        del found  # gives back what is lent
    assert seen == 4


@pytest.mark.parametrize("changes", ["nothing", "sample_weights", "acting", "shares", "scale"])
def test_what_problems_count_is_that_of_each_call(changes):
    """Numbers that are known to stand there are not copied again: all others are."""
    matcher = METHODS["mmd"][0](resolve("mmd", None, "stable", {}).matcher)
    matcher.ensure(["a", "b"], 4, torch.device("cpu"))
    replays = replay.Replays(matcher, Recorder())
    generator = torch.Generator().manual_seed(0)
    queries, keys = ([torch.randn(3, 2, 6, 4, generator=generator) for _ in range(2)] for _ in range(2))

    def drawn():
        return {
            "sample_weights": [torch.rand(3, generator=generator) for _ in range(2)],
            "acting": torch.rand(2, 1, 2, generator=generator),
            "shares": tuple(torch.rand(2, generator=generator).tolist()),
            "scale": float(torch.rand((), generator=generator)),
        }

    counted = Counted(shape=(2, 3, 2), device=torch.device("cpu"), **(drawn() | {"sample_weights": None}))
    played = 0
    for _ in range(6):
        counted = dataclasses.replace(counted, **{name: new for name, new in drawn().items() if name == changes})
        found = replays.match(
            queries, keys, None, None, ["a", "b"], counted, lambda query, key: None, of_query=True, of_key=True
        )
        if found is None:
            continue
        played += 1
        truth = differentiate(
            matcher, torch.stack(queries), torch.stack(keys), None, None, ["a", "b"], counted.in_gradient()
        )
        torch.testing.assert_close(found.of_query, truth.query)
        torch.testing.assert_close(found.weighed, (truth.losses * counted.in_total()).sum((1, 2)))
        del found
    assert played == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["query", "key", "padding", "largest"])
@pytest.mark.parametrize("standardise", [False, True])  # then it shows in the scale
def test_what_is_not_finite_is_told_of_its_layer(bad, where, standardise):
    matcher = METHODS["mmd"][0](resolve("mmd", None, "stable", {"standardise": standardise}).matcher)
    matcher.ensure(["a", "b", "c"], 4, torch.device("cpu"))
    replays = replay.Replays(matcher, Recorder())
    mask = torch.ones(3, 2, 6, dtype=torch.bool)
    mask[:, :, 5] = False
    counted = Counted((0.3, 0.3, 0.4), (3, 2, 3), mask.device)
    for step in range(4):
        found = None  # gives back what is lent
        generator = torch.Generator().manual_seed(step)
        queries, keys = ([torch.randn(2, 3, 6, 4, generator=generator) for _ in range(3)] for _ in range(2))
        if where == "largest":  # which are numbers yet
            queries[1][0, 1, 2, 3], keys[1][1] = 3e38, -3e38
        else:
            (keys if where == "key" else queries)[1][1, 2, 5 if where == "padding" else 3, 0] = bad
        found = replays.match(
            queries, keys, mask, mask, ["a", "b", "c"], counted, lambda query, key: None, of_query=True, of_key=True
        )
    assert found.finite.tolist() == [True, where in {"padding", "largest"}, True]
