"""Taps stack, come off in any order, and leave nothing behind; `layers` chooses among what they reach."""

import copy
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import tiny
import torch
from sdpa_models import NanoGPT
from tiny import first_output, padded_batch, records_of, seeded, traces
from torch import Tensor, nn

from alignattn.capture import AttentionCall, Tap
from alignattn.errors import ConfigError, UnsupportedModelError

IDS = torch.arange(12).view(2, 6)
TOKENS = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return seeded(lambda: nn.TransformerEncoder(layer, 2))


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "interface": (tiny.bert, padded_batch("right")),
    "hooked": (lambda: tiny.mpnet("eager"), padded_batch("right")),
    "multihead": (encoder, {"src": TOKENS}),
    "sdpa": (lambda: seeded(NanoGPT), {"ids": IDS}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
kinds_that_can_be_replaced = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hooked"])


def soft(call: AttentionCall) -> Tensor:
    return call.attend(call.weights())


@every_kind
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_watching_taps_come_off_in_any_order(kind, order):
    build, batch = KINDS[kind]
    model = build()
    before, plain = traces(model.train()), first_output(model.eval(), **batch)
    counts: list[list[str]] = [[], [], []]
    taps = [Tap(model, watch=lambda r, seen=seen: seen.append(r.name)) for seen in counts]
    for gone in range(len(order) + 1):
        for seen in counts:
            seen.clear()
        first_output(model.train(), **batch)
        assert [len(seen) for seen in counts] == [0 if place in order[:gone] else 2 for place in range(3)]
        assert torch.equal(first_output(model.eval(), **batch), plain)
        if gone < len(order):
            taps[order[gone]].remove()
    assert traces(model.train()) == before


@kinds_that_can_be_replaced
@pytest.mark.parametrize("first", ["watch", "stand in"])
@pytest.mark.parametrize("removed", ["watch", "stand in"])
def test_watching_and_standing_in_go_together(kind, first, removed):
    build, batch = KINDS[kind]
    model = build()
    before, plain = traces(model.train()), first_output(model, **batch)
    records, calls = [], []
    options = {
        "watch": {"watch": records.append},
        "stand in": {"attend": lambda c: calls.append(c) or 0 * soft(c)},
    }
    second = "stand in" if first == "watch" else "watch"
    taps = {what: Tap(model, **options[what]) for what in (first, second)}
    replaced = first_output(model, **batch)
    assert (len(records), len(calls)) == (2, 2)
    for record, call in zip(records, calls, strict=True):  # both see the queries and keys of the model
        torch.testing.assert_close(record.query, call.query)
        torch.testing.assert_close(record.key, call.key)
    assert not torch.allclose(replaced, plain)
    taps.pop(removed).remove()
    left = first_output(model, **batch)
    assert torch.equal(left, replaced if removed == "watch" else plain)
    assert (len(records), len(calls)) == ((2, 4) if removed == "watch" else (4, 2))
    for tap in taps.values():
        tap.remove()
    assert torch.equal(first_output(model, **batch), plain)
    assert traces(model) == before


@kinds_that_can_be_replaced
def test_last_of_two_stand_ins_decides(kind):
    build, batch = KINDS[kind]
    model = build().eval()
    plain = first_output(model, **batch)
    first = Tap(model, attend=lambda call: 0 * soft(call))
    second = Tap(model, attend=soft)
    torch.testing.assert_close(first_output(model, **batch), plain, rtol=1e-4, atol=1e-4)
    second.remove()
    assert not torch.allclose(first_output(model, **batch), plain, rtol=1e-3, atol=1e-3)
    first.remove()
    assert torch.equal(first_output(model, **batch), plain)


@kinds_that_can_be_replaced
def test_what_a_stand_in_calls_itself_is_no_attention_of_the_model(kind):
    build, batch = KINDS[kind]
    model, records = build().train(), []
    taps = [Tap(model, watch=records.append)]
    taps.append(Tap(model, attend=lambda c: nn.functional.scaled_dot_product_attention(c.query, c.key, c.value)))
    taps.append(Tap(model, watch=records.append))
    first_output(model, **batch)
    for tap in taps:
        tap.remove()
    assert len(records) == 4


@every_kind
def test_removing_twice_is_as_good_as_once(kind):
    build, batch = KINDS[kind]
    model = build().train()
    before = traces(model)
    kept, gone = [], Tap(model)
    tap = Tap(model, watch=kept.append)
    gone.remove()
    gone.remove()
    first_output(model, **batch)
    assert len(kept) == 2
    tap.remove()
    assert traces(model) == before


@every_kind
@pytest.mark.parametrize("layers", [7, -3, "nowhere", [], ["0", 9], True, 1.5, [None]])
def test_tap_that_cannot_be_made_leaves_no_trace(kind, layers):
    model = KINDS[kind][0]()
    before = traces(model)
    with pytest.raises(ConfigError):
        Tap(model, watch=print, layers=layers, projections=True)
    assert traces(model) == before


@every_kind
@pytest.mark.parametrize("options", [{}, {"projections": True}, {"attend": soft}])
@pytest.mark.parametrize("training", [True, False])
def test_copy_of_an_attached_model_is_a_plain_model(kind, options, training):
    if kind == "hooked" and "attend" in options:
        pytest.skip("nothing can stand in for these")
    build, batch = KINDS[kind]
    model, records = build().train(), []
    plain = {mode: first_output(model.train(mode), **batch) for mode in (True, False)}
    tap = Tap(model.train(training), watch=records.append, **options)
    first_output(model, **batch)
    records.clear()
    duplicate = copy.deepcopy(model)
    assert records == []
    for attached in (True, False):
        for mode in (True, False):
            torch.testing.assert_close(first_output(duplicate.train(mode), **batch), plain[mode], rtol=1e-4, atol=1e-4)
            if "attend" not in options and kind != "multihead":
                assert torch.equal(first_output(duplicate, **batch), plain[mode])
        assert records == []
        if attached:
            tap.remove()
    assert len(records_of(duplicate.train(), **batch)) == 2


def test_copy_is_not_stood_in_for():
    for build, batch in (KINDS[kind] for kind in KINDS if kind != "hooked"):
        model = build().train()
        plain = first_output(model, **batch)
        tap = Tap(model, attend=lambda call: 0 * soft(call))
        torch.testing.assert_close(first_output(copy.deepcopy(model), **batch), plain)
        tap.remove()


NAMES = [f"encoder.layer.{i}.attention.self" for i in range(4)]


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        (0, [0]),
        (-1, [3]),
        (NAMES[2], [2]),
        ("encoder.layer.1", [1]),  # a prefix ends at a dot: not layer 10
        ("encoder", [0, 1, 2, 3]),
        ("encoder.layer.[13].*", [1, 3]),
        ("*.2.*", [2]),
        ([3, 0], [0, 3]),
        ([0, -4, NAMES[0]], [0]),
        (("encoder.layer.3", -3), [1, 3]),
        (range(1, 3), [1, 2]),
    ],
)
def test_layers_are_chosen_by_index_name_prefix_or_pattern(layers, chosen):
    model = tiny.bert(num_hidden_layers=4).train()
    assert [r.name for r in records_of(model, tap={"layers": layers}, **padded_batch(None))] == [
        NAMES[i] for i in chosen
    ]


def test_prefix_ends_at_a_dot():
    model = tiny.bert(num_hidden_layers=11)
    tap = Tap(model, layers="encoder.layer.1")
    tap.remove()
    assert [site.name for site in tap.sites] == [NAMES[1]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (4, "layers=4: BertModel has 4 attention modules, 0 to 3"),
        (-5, "layers=-5: BertModel has 4 attention modules, 0 to 3"),
        ("encoder.layer.9", f"'encoder.layer.9' matches no attention module. They are: {', '.join(NAMES)}"),
        (["encoder", "decoder"], "'decoder' matches no attention module. They are"),
        ([], r"layers=\[\] leaves nothing"),
        (True, "numbers, names or patterns, got True"),
        ([0, None], "numbers, names or patterns, got None"),
        (1.5, "numbers, names or patterns, got 1.5"),
    ],
)
def test_choice_that_cannot_be_is_an_error_that_lists_what_can(layers, message):
    model = tiny.bert(num_hidden_layers=4)
    with pytest.raises(ConfigError, match=message):
        Tap(model, layers=layers)


def test_model_without_attention_is_refused_by_name_with_a_way_out():
    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    with pytest.raises(UnsupportedModelError, match=r"Perceptron has no attention.*alignment\.record\("):
        Tap(Perceptron())
    with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.Module is needed, got function"):
        Tap(lambda: None)
