"""Matching beside the forward: when it happens, and that nothing else changes. On a device: test_cuda.py."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

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


def calls(*names):
    return [QueryKey(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), name=name) for name in names]


PARTS, SHARES, SCALE = [[0, 1], [2]], [0.2, 0.3, 0.5], 4.0


def planned(parts=PARTS, answer=lambda number: number + 10):
    asked = []
    ahead = Ahead(lambda number, records, plan: asked.append([record.name for record in records]) or answer(number))
    ahead.learn(Plan.of(calls("a", "b", "c"), parts, SHARES, SCALE))
    return ahead, asked


def taken(ahead, records, parts=PARTS, shares=SHARES, scale=SCALE):
    return ahead.take(records, parts, shares, scale)


def noticed(ahead, records):
    for count in range(1, len(records) + 1):
        ahead.notice(records[:count])


def test_a_part_is_matched_when_its_last_call_is_recorded_and_found_by_the_loss():
    ahead, asked = planned()
    records = calls("a", "b", "c")
    for count, expected in ((1, []), (2, [["a", "b"]]), (3, [["a", "b"], ["c"]])):
        ahead.notice(records[:count])
        assert asked == expected
    assert taken(ahead, records) == {0: 10, 1: 11}
    assert taken(ahead, records) == {}  # once


def test_calls_of_a_part_need_not_follow_each_other():
    records = calls("a", "b", "c")
    for place, expected in ((None, {0: 10, 1: 11}), (0, {1: 11}), (1, {0: 10}), (2, {1: 11})):
        ahead, asked = planned([[0, 2], [1]])
        noticed(ahead, records)
        assert asked == [["b"], ["a", "c"]]
        put = [replace(record) if at == place else record for at, record in enumerate(records)]
        assert taken(ahead, put, [[0, 2], [1]]) == expected  # of a part that one call was put otherwise, nothing


def test_a_part_that_nobody_could_match_is_not_found_and_the_others_keep_their_numbers():
    ahead, asked = planned(answer=lambda number: None if number == 0 else 0)
    records = calls("a", "b", "c")
    noticed(ahead, records)
    assert len(asked) == 2 and taken(ahead, records) == {1: 0}


def test_before_the_first_loss_nothing_is_expected():
    ahead = Ahead(lambda *_: pytest.fail("Nothing is known of the loss."))
    assert not ahead.expects
    noticed(ahead, calls("a", "b"))
    assert taken(ahead, calls("a", "b")) == {}


VALID = torch.ones(2, 5, dtype=torch.bool)
OTHERS = {
    "name": lambda record: replace(record, name="x"),
    "call": lambda record: replace(record, call=1),
    "length of queries": lambda record: replace(record, query=torch.randn(2, 3, 6, 4)),
    "length of keys": lambda record: replace(record, key=torch.randn(2, 3, 6, 4)),
    "type of queries": lambda record: replace(record, query=record.query.double()),
    "type of keys": lambda record: replace(record, key=record.key.double()),
    "device": lambda record: replace(record, query=record.query.to("meta"), key=record.key.to("meta")),
    "gradient of queries": lambda record: replace(record, query=record.query.requires_grad_()),
    "gradient of keys": lambda record: replace(record, key=record.key.requires_grad_()),
    "mask of queries": lambda record: replace(record, query_mask=VALID),
    "mask of keys": lambda record: replace(record, key_mask=VALID),
    "weights": lambda record: replace(record, sample_weight=torch.ones(2)),
    "packed": lambda record: replace(record, segments=torch.zeros(2, 5, dtype=torch.long)),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("other", OTHERS)
def test_calls_of_another_kind_are_not_matched_ahead(other, place):
    ahead, asked = planned()
    records = calls("a", "b", "c")
    records[place] = OTHERS[other](records[place])
    noticed(ahead, records)
    assert asked == ([["a", "b"]] if place == 2 else []) and not ahead.expects
    ahead.begin()
    ahead.notice(calls("a", "b")[:1])
    assert ahead.expects


def test_calls_in_another_order_are_not_matched_ahead():
    ahead, asked = planned()
    noticed(ahead, calls("b", "a", "c"))
    assert not asked and not ahead.expects


def test_a_pass_of_more_calls_is_of_another_loss():
    ahead, asked = planned()
    records = calls("a", "b", "c", "d")
    noticed(ahead, records)
    assert asked == [["a", "b"], ["c"]] and not ahead.expects
    assert taken(ahead, records, shares=[0.2, 0.3, 0.25, 0.25]) == {}


def test_what_was_matched_ahead_of_another_loss_is_left():
    records = calls("a", "b", "c")
    for otherwise in (
        lambda ahead: taken(ahead, [replace(records[0]), *records[1:]]),  # as when weights were put in
        lambda ahead: taken(ahead, records, shares=[0.1, 0.4, 0.5]),
        lambda ahead: taken(ahead, records, scale=8.0),
        lambda ahead: taken(ahead, records, [[0], [1, 2]]),
        lambda ahead: ahead.begin() or taken(ahead, records),
        lambda ahead: ahead.learn(None) or taken(ahead, records),
    ):
        ahead, asked = planned()
        ahead.notice(records[:1])
        ahead.notice(records[:2])
        assert asked and otherwise(ahead) == {}


def test_what_is_matched_is_no_part_of_the_forward_that_is_running():
    """Neither its gradients, nor its autocast, nor a mode of somebody who looks on there."""
    seen, told = [], []

    class LookOn(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def match(_number, records, _plan):
        told.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return records[0].query.exp()

    records = calls("a")
    ahead = Ahead(match)
    ahead.learn(Plan.of(records, [[0]], [1.0], SCALE))
    with torch.autocast("cpu", dtype=torch.bfloat16), LookOn():
        ahead.notice(records)
    assert told == [(False, False)] and "exp" not in seen
    assert list(taken(ahead, records, [[0]], [1.0])) == [0]


class OnDevice(torch.Tensor):
    """Says that it lies on an accelerator."""

    is_cuda = True


class Stream:
    """Tells what is asked of it."""

    def __init__(self, name, told):
        self.name, self.told = name, told

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.told.append(f"on {self.name}")

    def __exit__(self, *_):
        self.told.append(f"off {self.name}")


def test_a_stream_of_its_own_waits_for_the_models_and_the_loss_for_it(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("the model's", told))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: told.append("made") or Stream("its own", told))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    records = [replace(record, query=record.query.as_subclass(OnDevice)) for record in calls("a", "b")]
    ahead = Ahead(lambda *_: told.append("matched") or 1)
    ahead.learn(Plan.of(records, [[0], [1]], [0.5, 0.5], SCALE))
    noticed(ahead, records)
    part = ["its own waits for the model's", "on its own", "matched", "off its own"]
    assert told == ["made", *part, *part]
    told.clear()
    assert taken(ahead, records, [[0], [1]], [0.5, 0.5]) == {0: 1, 1: 1}
    assert told == ["the model's waits for its own"]
