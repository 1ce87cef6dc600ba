"""Matching beside the forward: when it happens, and that nothing else changes. On a device: test_cuda.py."""

from dataclasses import replace

import pytest
import torch

import alignattn
from alignattn.ahead import Ahead, Plan
from alignattn.capture import QueryKey
from test_replay import Recorder, assert_alike, batch, model_of

STEPS = 14


def run(method, *, ahead, steps=STEPS, given=lambda step: {}, samples=lambda step: 3, **options):
    """A training by records, with and without matching ahead; and how much was played when each forward was over."""
    model = model_of()
    alignment = alignattn.align(model, method, **options)
    alignment.objective.recorder = recorder = Recorder()
    if not ahead:
        alignment.objective.ahead.learn = lambda *_: None
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    early, records = [], []
    model.bert.embeddings.register_forward_hook(lambda *_: records.append(recorder.records))
    last = model.bert.encoder.layer[-1].output  # behind all attention, and before the loss is put together
    last.register_forward_hook(lambda *_: early.append(recorder.played))
    last.register_forward_hook(lambda *_: records.append(recorder.records))
    losses = []
    for step in range(steps):
        before = recorder.played
        loss = model(**batch(step, samples=samples(step)), **given(step)).loss
        early[-1] -= before
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert records[::2] == records[1::2]  # none was made within a forward
    return model, losses, early


@pytest.mark.parametrize("method", ["gan", "mmd"])
def test_what_is_recorded_is_matched_before_the_forward_is_over(method):
    ahead, losses, early = run(method, ahead=True)
    plain, expected, never = run(method, ahead=False)
    assert losses == expected and not any(never)
    assert_alike(ahead, plain)
    # A shape is recorded when it comes for the third time; what is looked at, every tenth update, is not done ahead.
    assert early == [0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 0, 3, 3, 3]


def test_samples_that_count_by_the_labels_of_an_update():
    """As the Trainer of transformers has it: their weights are known when the forward begins."""
    options = {"given": lambda step: {"num_items_in_batch": torch.tensor(5 + step % 3)}, "weight": 0.5}
    ahead, losses, early = run("mmd", ahead=True, **options)
    plain, expected, _ = run("mmd", ahead=False, **options)
    assert losses == expected and sum(early) == 3 * 9
    assert_alike(ahead, plain)


def test_batches_of_another_size_are_matched_as_ever():
    options = {"samples": lambda step: 2 + step % 3 // 2, "weight": 0.5}
    ahead, losses, early = run("gan", ahead=True, **options)
    plain, expected, _ = run("gan", ahead=False, **options)
    assert losses == expected
    assert_alike(ahead, plain)
    assert 0 < sum(early) < 3 * 9


@pytest.mark.parametrize("case", ["forgotten", "two passes", "frozen", "weight", "left out"])
def test_a_loss_that_comes_otherwise_is_put_together_anew(case):
    found = []
    for ahead in (True, False):
        model = model_of()
        options = {"weight": (lambda step: 0.5 * (step != 9)) if case == "weight" else 0.5}
        alignment = alignattn.align(model, "gan", add_to_outputs=False, **options)
        alignment.objective.recorder = recorder = Recorder()
        if not ahead:
            alignment.objective.ahead.learn = lambda *_: None
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        losses = []
        for step in range(STEPS):
            if step == 8 and case == "left out":
                handle = model.classifier.register_forward_hook(_failing)
                with pytest.raises(RuntimeError):  # a forward that fails half way
                    model(**batch(step))
                handle.remove()
            if step == 8 and case == "frozen":
                model.bert.embeddings.requires_grad_(False)
                model.bert.encoder.layer[0].requires_grad_(False)
            loss = model(**batch(step)).loss
            if step == 8 and case == "two passes":
                loss = loss + model(**batch(step + 100)).loss
            if step == 8 and case == "forgotten":
                with torch.no_grad():
                    model(**batch(step + 100))
            loss = loss + alignment.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert recorder.played
        found.append((losses, model))
    assert found[0][0] == found[1][0]
    assert_alike(found[0][1], found[1][1])


def _failing(*_):
    raise RuntimeError("half way")


def calls(*names, tokens=5, **options):
    return [
        QueryKey(torch.randn(2, 3, tokens, 4), torch.randn(2, 3, tokens, 4), name=name, **options) for name in names
    ]


PARTS = [[0, 1], [2]]


def planned():
    asked = []
    ahead = Ahead(lambda number, records, plan: asked.append([record.name for record in records]) or number + 10)
    ahead.learn(Plan.of(calls("a", "b", "c"), PARTS, [0.2, 0.3, 0.5], 4.0))
    return ahead, asked


def test_a_part_is_matched_when_its_last_call_is_recorded_and_found_by_the_loss():
    ahead, asked = planned()
    records = calls("a", "b", "c")
    for count, expected in ((1, []), (2, [["a", "b"]]), (3, [["a", "b"], ["c"]])):
        ahead.notice(records[:count])
        assert asked == expected
    assert ahead.take(records, PARTS, [0.2, 0.3, 0.5], 4.0) == {0: 10, 1: 11}
    assert ahead.take(records, PARTS, [0.2, 0.3, 0.5], 4.0) == {}  # once


@pytest.mark.parametrize(
    "other",
    [
        lambda: calls("a", "x", "c"),
        lambda: calls("a", "b", "c", tokens=6),
        lambda: [replace(record, call=1) for record in calls("a", "b", "c")],
        lambda: calls("a", "b", "c", query_mask=torch.ones(2, 5, dtype=torch.bool)),
        lambda: calls("a", "b", "c", sample_weight=torch.ones(2)),
        lambda: [replace(record, query=record.query.requires_grad_()) for record in calls("a", "b", "c")],
    ],
)
def test_calls_of_another_kind_are_not_matched_ahead(other):
    ahead, asked = planned()
    records = other()
    for count in (1, 2, 3):
        ahead.notice(records[:count])
    assert not asked and not ahead.expects
    ahead.begin()
    ahead.notice(calls("a", "b")[:1])
    assert ahead.expects


def test_what_was_matched_ahead_of_another_loss_is_left():
    records, shares = calls("a", "b", "c"), [0.2, 0.3, 0.5]
    for taken in (
        lambda ahead: ahead.take(
            [replace(records[0]), *records[1:]], PARTS, shares, 4.0
        ),  # as when weights were put in
        lambda ahead: ahead.take(records, PARTS, [0.1, 0.4, 0.5], 4.0),
        lambda ahead: ahead.take(records, PARTS, shares, 8.0),
        lambda ahead: ahead.take(records, [[0], [1, 2]], shares, 4.0),
        lambda ahead: ahead.begin() or ahead.take(records, PARTS, shares, 4.0),
        lambda ahead: ahead.learn(None) or ahead.take(records, PARTS, shares, 4.0),
    ):
        ahead, asked = planned()
        ahead.notice(records[:1])
        ahead.notice(records[:2])
        assert asked and taken(ahead) == {}
