"""When a call is recorded: iff the module trains and gradients are on, and once, however often it is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from sdpa_models import NanoGPT
from tiny import padded_batch, records_of, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import alignattn
from alignattn.capture import AttentionCall, QueryKey, Tap
from alignattn.errors import CaptureError

IDS = torch.arange(12).view(2, 6)


class Checkpointed(nn.Module):
    """Layers of any kind, each under gradient checkpointing of some kind or none."""

    def __init__(self, layers: Callable[[], list[nn.Module]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(layers())
        self.reentrant: bool | None = None

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embed(ids)
        for layer in self.layers:
            if self.reentrant is None:
                tokens = layer(tokens)
            else:
                tokens = checkpoint(layer, tokens, use_reentrant=self.reentrant)
        return tokens


def _encoder_layers() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True) for _ in range(2)]


def _checkpointed(model: nn.Module, reentrant: bool | None) -> nn.Module:
    if isinstance(model, Checkpointed):
        model.reentrant = reentrant
    elif reentrant is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model.train()


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "interface": (tiny.bert, padded_batch("right"), "encoder.layer.0.attention.self"),
    "hooked": (lambda: tiny.deberta("eager"), padded_batch("right"), "encoder.layer.0.attention.self"),
    "grouped": (tiny.llama, padded_batch("right"), "layers.0.self_attn"),
    "multihead": (lambda: seeded(lambda: Checkpointed(_encoder_layers)), {"ids": IDS}, "layers.0.self_attn"),
    "sdpa": (lambda: seeded(lambda: Checkpointed(lambda: list(NanoGPT().h))), {"ids": IDS}, "layers.0.attn"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
kinds_that_can_be_replaced = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hooked"])


@every_kind
def test_recorded_iff_training_with_gradients(kind):
    build, batch, _ = KINDS[kind]
    model = build()
    assert len(records_of(model.train(), **batch)) == 2
    assert records_of(model.eval(), **batch) == []
    with torch.no_grad():
        assert records_of(model.train(), **batch) == []
        assert records_of(model.eval(), **batch) == []
    with torch.inference_mode():
        assert records_of(model.train(), **batch) == []


@every_kind
def test_always_means_always(kind):
    build, batch, _ = KINDS[kind]
    for mode in (True, False):
        with torch.no_grad():
            assert len(records_of(build().train(mode), tap={"always": True}, **batch)) == 2
        assert len(records_of(build().train(mode), tap={"always": True}, **batch)) == 2


@every_kind
def test_frozen_submodule_in_eval_mode_is_not_recorded(kind):
    build, batch, first = KINDS[kind]
    model = build().train()
    model.get_submodule(first).eval()
    (record,) = records_of(model, **batch)
    assert record.name == first.replace("0", "1")


@every_kind
def test_begin_and_finish_are_called_around_recorded_passes_alone(kind):
    build, batch, _ = KINDS[kind]
    model, told = build(), []
    tap = Tap(
        model,
        watch=lambda record: told.append(record.call),
        begin=lambda _: told.append("begin"),
        finish=lambda output, kwargs: told.append(("finish", "labels" in kwargs)),
    )
    model.eval()(**batch)
    with torch.no_grad():
        model.train()(**batch)
    assert told == []
    for _ in range(2):
        model.train()(**batch)
    tap.remove()
    assert told == ["begin", 0, 0, ("finish", False)] * 2


def test_finish_may_exchange_the_output_and_knows_of_labels():
    model, told = tiny.bert_classifier().train(), []

    def finish(output: Any, kwargs: dict[str, Any]) -> Any:
        told.append("labels" in kwargs)
        output["loss"] = output["loss"] + 1
        return output

    batch = padded_batch(None) | {"labels": torch.tensor([0, 1, 0])}
    plain = model(**batch).loss
    tap = Tap(model, finish=finish)
    torch.testing.assert_close(model(**batch).loss, plain + 1)
    tap.remove()
    assert told == [True]


def test_pass_that_failed_is_not_finished():
    model, told = seeded(NanoGPT).train(), []
    tap = Tap(model, finish=lambda *_: told.append("finish"))
    with pytest.raises(ValueError, match="half way"):
        model(IDS, fail=True)
    tap.remove()
    assert told == []


def _gradients(model: nn.Module, batch: dict[str, Any], seen: list[QueryKey]) -> dict[str, Tensor]:
    """Of something that depends on the output and on all queries and keys."""
    model.zero_grad()
    seen.clear()
    output = model(**batch)
    loss = (output if isinstance(output, Tensor) else output[0]).square().mean()
    for record in seen:
        loss = loss + record.query.square().mean() + record.key.pow(3).mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_kind
@pytest.mark.parametrize("projections", [True, False])
def test_checkpointed_layers_are_recorded_once_with_the_same_gradients(kind, projections):
    build, batch, _ = KINDS[kind]
    model, records = build(), []
    tap = Tap(model, watch=records.append, projections=projections)
    expected = _gradients(_checkpointed(model, None), batch, records)
    assert len(records) == 2
    gradients = _gradients(_checkpointed(model, reentrant=False), batch, records)
    tap.remove()
    assert len(records) == 2
    torch.testing.assert_close(gradients, expected)


@kinds_that_can_be_replaced
def test_checkpointed_layers_are_recomputed_by_the_stand_in_that_computed_them(kind):
    build, batch, _ = KINDS[kind]
    model, calls = build(), []

    def squared(call: AttentionCall) -> Tensor:
        calls.append(call.module)
        weights = call.weights().square()
        return call.attend(weights / weights.sum(-1, keepdim=True).clamp_min(1e-6))

    tap = Tap(model, attend=squared)
    expected = _gradients(_checkpointed(model, None), batch, [])
    assert len(calls) == 2
    gradients = _gradients(_checkpointed(model, reentrant=False), batch, [])
    tap.remove()
    assert len(calls) == 2 + 4
    torch.testing.assert_close(gradients, expected)
    assert torch.overrides._get_current_function_mode_stack() == []


@every_kind
def test_reentrant_checkpointing_is_refused_and_the_advice_helps(kind):
    build, batch, first = KINDS[kind]
    model, records = _checkpointed(build(), reentrant=True), []
    tap = Tap(model, watch=records.append)
    with pytest.raises(CaptureError, match=rf"{first}.*re-entrant.*use_reentrant=False"):
        model(**batch)
    assert records == [] and torch.overrides._get_current_function_mode_stack() == []
    _gradients(_checkpointed(model, reentrant=False), batch, records)
    tap.remove()
    assert len(records) == 2


class Headed(nn.Module):
    """A frozen encoder, and a head with an attention that is trained."""

    def __init__(self, kind: str, *, wrapped: bool) -> None:
        super().__init__()
        self.encoder = KINDS[kind][0]()
        self.head = nn.MultiheadAttention(16, 4, batch_first=True)
        self.wrapped = wrapped

    def features(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            output = self.encoder(**batch)
        return output if isinstance(output, Tensor) else output[0]

    def forward(self, **batch: Tensor) -> Tensor:
        features = checkpoint(self.features, batch, use_reentrant=False) if self.wrapped else self.features(batch)
        return self.head(features, features, features)[0]


@every_kind
@pytest.mark.parametrize("wrapped", [True, False])
def test_frozen_encoder_under_no_grad_is_not_taken_for_reentrant_checkpointing(kind, wrapped):
    records = records_of(Headed(kind, wrapped=wrapped).train(), **KINDS[kind][1])
    assert [record.name for record in records] == ["head"]


def test_part_that_is_called_alone_records_nothing():
    model, records = tiny.bert().train(), []
    tap = Tap(model, watch=records.append)
    model.encoder(torch.randn(2, 5, 16))
    tap.remove()
    assert records == []


def test_what_a_failed_pass_recorded_is_no_part_of_the_next():
    model = seeded(NanoGPT).train()
    alignment = alignattn.align(model, "mmd")
    model(IDS)
    expected = alignment.loss()
    with pytest.raises(ValueError, match="half way"):
        model(IDS.flip(0), fail=True)
    model(IDS)
    assert torch.equal(alignment.loss(), expected)
    alignment.detach()
