"""Models behind the attention interface of transformers: what is captured is what the layer uses."""

import pytest
import tiny
import torch
from references import FAMILIES, INTERFACE, Family, layer_output, merged, softmax_attention
from tiny import first_output, observed, padded_batch, records_of, traces, valid_tokens

from alignattn.capture import AttentionCall, Tap
from alignattn.errors import UnsupportedModelError

SIDES = [None, "right", "left"]
IMPLEMENTATIONS = ["sdpa", "eager"]

every_family = pytest.mark.parametrize("family", [pytest.param(FAMILIES[name], id=name) for name in INTERFACE])
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_side = pytest.mark.parametrize("side", SIDES)


def keys_of(family: Family, name: str, side: str | None) -> torch.Tensor:
    """Which keys of this self-attention are valid: a decoder's tokens all are, it has been given no mask."""
    if family.decoder and name.startswith("decoder"):
        return torch.ones(tiny.SAMPLES, tiny.LENGTH - 1, dtype=torch.bool)
    return valid_tokens(side)


@every_family
@every_implementation
@every_side
def test_attention_of_the_captured_q_and_k_is_the_layers_output(family, implementation, side):
    model = family.build(implementation).train()
    with observed(model, list(family.attentions)) as seen:
        records = records_of(model, **padded_batch(side, decoder=family.decoder))
    captured = {record.name: record for record in records}
    for name in family.attentions:
        record, valid = captured[name], keys_of(family, name, side)
        output = layer_output(family, model, name, record.query, record.key, seen[name], valid)
        torch.testing.assert_close(output[valid], seen[name].output[valid], rtol=1e-4, atol=1e-5)


@every_family
@every_implementation
def test_captured_q_and_k_are_made_by_the_modules_weights(family, implementation):
    model = family.build(implementation).train()
    with observed(model, list(family.attentions)) as seen:
        records = records_of(model, **padded_batch("right", decoder=family.decoder))
    captured = {record.name: record for record in records}
    for name in family.attentions:
        query, key, _ = family.project(model.get_submodule(name), seen[name].hidden)
        shared = query.shape[1] // key.shape[1]
        key = torch.stack([key[:, head // shared] for head in range(query.shape[1])], 1)
        torch.testing.assert_close(captured[name].query, query, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(captured[name].key, key, rtol=1e-4, atol=1e-5)


@every_family
@every_implementation
@every_side
def test_masks_of_a_record_are_the_padding_of_the_batch(family, implementation, side):
    model = family.build(implementation).train()
    for record in records_of(model, **padded_batch(side, decoder=family.decoder)):
        valid = keys_of(family, record.name, side)
        for mask in (record.query_mask, record.key_mask):
            assert torch.equal(valid, torch.ones_like(valid) if mask is None else mask)


@every_family
@every_implementation
@every_side
def test_stand_in_can_do_exactly_what_the_layer_would(family, implementation, side):
    model = family.build(implementation).eval()
    batch = padded_batch(side, decoder=family.decoder)
    plain = first_output(model, **batch)
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        soft, proceeded = call.attend(call.weights()), call.proceed()
        some = (call.bias > -1e30).any(-1) if call.bias is not None else torch.ones(1, 1, 1, dtype=torch.bool)
        some = some.expand(soft.shape[:3])  # queries that may see anything at all
        torch.testing.assert_close(soft[some], proceeded[some], rtol=1e-4, atol=1e-5)
        return proceeded

    tap = Tap(model, attend=attend, cross=True)
    assert torch.equal(first_output(model, **batch), plain)
    tap.remove()
    assert len(calls) == len(tap.sites)


@every_family
@every_implementation
@every_side
def test_stand_in_of_soft_attention_changes_no_output(family, implementation, side):
    model = family.build(implementation).eval()
    batch = padded_batch(side, decoder=family.decoder)
    plain = first_output(model, **batch)
    tap = Tap(model, attend=lambda call: call.attend(call.weights()), cross=True)
    standing_in = first_output(model, **batch)
    tap.remove()
    valid = keys_of(family, family.attentions[0] if not family.decoder else "decoder", side)
    torch.testing.assert_close(standing_in[valid], plain[valid], rtol=1e-4, atol=1e-5)


@every_implementation
def test_stand_in_decides_what_the_layer_puts_out(implementation):
    model = tiny.bert(implementation).eval()
    name = "encoder.layer.0.attention.self"
    tap = Tap(model, attend=lambda call: torch.full_like(call.query, 2.0), layers=name)
    with observed(model, [name, "encoder.layer.1.attention.self"]) as seen:
        model(**padded_batch(None))
    tap.remove()
    assert torch.equal(seen[name].output, torch.full((tiny.SAMPLES, tiny.LENGTH, 16), 2.0))
    assert not torch.equal(seen["encoder.layer.1.attention.self"].output, seen[name].output)


@every_family
@every_implementation
@every_side
def test_eval_outputs_are_bit_identical_while_attached(family, implementation, side):
    model = family.build(implementation).eval()
    batch = padded_batch(side, decoder=family.decoder)
    plain, before = first_output(model, **batch), traces(model)
    records = []
    tap = Tap(model, watch=records.append)
    assert torch.equal(first_output(model, **batch), plain)
    assert not records
    tap.remove()
    assert torch.equal(first_output(model, **batch), plain)
    assert traces(model) == before


@every_implementation
@pytest.mark.parametrize("name", ["t5 encoder", "bart encoder"])
def test_cross_attention_is_left_alone_unless_asked_for(name, implementation):
    model = FAMILIES[name].build(implementation).train()
    batch = padded_batch("right", decoder=True)
    plain = [record.name for record in records_of(model, **batch)]
    assert len(plain) == 4 and not any("EncDec" in n or "encoder_attn" in n for n in plain)
    with_cross = records_of(model, tap={"cross": True}, **batch)
    cross = [record for record in with_cross if record.name not in plain]
    assert len(with_cross) == 6 and len(cross) == 2
    for record in cross:
        assert (record.query.shape[2], record.key.shape[2]) == (tiny.LENGTH - 1, tiny.LENGTH)
        assert record.query_mask is None and torch.equal(record.key_mask, valid_tokens("right"))


def test_cross_attention_of_what_is_captured_is_the_layers_output():
    model = tiny.bart().train()
    name = "decoder.layers.1.encoder_attn"
    with observed(model, [name]) as seen:
        records = records_of(model, tap={"cross": True, "layers": name}, **padded_batch("left", decoder=True))
    module, (record,) = model.get_submodule(name), records
    value = torch.stack((seen[name].others @ module.v_proj.weight.T + module.v_proj.bias).chunk(4, -1), 1)
    allowed = valid_tokens("left")[:, None, None, :].expand(-1, 1, tiny.LENGTH - 1, -1)
    attended = merged(softmax_attention(record.query, record.key, value, 0.5, allowed))
    output = attended @ module.out_proj.weight.T + module.out_proj.bias
    torch.testing.assert_close(output, seen[name].output, rtol=1e-4, atol=1e-5)


def test_stand_in_leaves_cross_attention_alone_unless_asked_for():
    model = tiny.bart().eval()
    modules = []

    def attend(call: AttentionCall) -> torch.Tensor:
        modules.append(call.module)
        return call.proceed()

    tap = Tap(model, attend=attend)
    model(**padded_batch(None, decoder=True))
    tap.remove()
    assert modules == [layer.self_attn for stack in (model.encoder, model.decoder) for layer in stack.layers]


def test_layer_that_runs_three_times_gives_three_records_told_apart():
    model = tiny.bert().train()
    model.encoder.layer = torch.nn.ModuleList([model.encoder.layer[0]] * 3)
    records = records_of(model, **padded_batch(None))
    assert [(r.name, r.call) for r in records] == [("encoder.layer.0.attention.self", call) for call in range(3)]
    assert not torch.equal(records[0].query, records[1].query)


def test_records_carry_the_gradient_to_every_query_and_key_weight():
    model = tiny.bert().train()
    for record in records_of(model, **padded_batch("right")):
        (record.query.square().sum() + record.key.square().sum()).backward(retain_graph=True)
    for layer in model.encoder.layer:
        assert layer.attention.self.query.weight.grad.abs().sum() > 0
        assert layer.attention.self.key.weight.grad.abs().sum() > 0


def test_two_models_of_one_config_object_are_apart():
    first = tiny.bert()
    second = tiny.seeded(lambda: type(first)(first.config))
    batch = padded_batch("right")
    plain, before = first_output(second.eval(), **batch), traces(second)
    records = []
    tap = Tap(first, watch=records.append)
    other = Tap(second, watch=lambda _: pytest.fail("the second model did not run"))
    first.train()(**batch)
    assert len(records) == 2
    tap.remove()
    assert torch.equal(first_output(second, **batch), plain)
    other.remove()
    assert traces(second) == before
    second.train()(**batch)
    assert len(records) == 2


@pytest.mark.parametrize("options", [{}, {"projections": True}, {"attend": lambda call: call.proceed()}])
def test_attention_whose_masks_cannot_be_read_is_refused_without_trace(options):
    model = tiny.bert()
    model.config._attn_implementation_internal = "flex_attention"
    before = traces(model)
    with pytest.raises(UnsupportedModelError, match=r"'flex_attention'.*set_attn_implementation\('sdpa'\)"):
        Tap(model, watch=print, **options)
    assert traces(model) == before
    model.set_attn_implementation("sdpa")
    assert len(records_of(model.train(), **padded_batch(None))) == 2


def test_a_mask_that_all_layers_share_is_read_once_and_another_anew():
    model = FAMILIES["bert"].build("sdpa").train()
    tap = Tap(model, watch=lambda record: None)
    first, second = torch.tensor([[[[True, False]]]]), torch.tensor([[[[False, True]]]])
    once, again = (tap.valid_keys(first, 1, 2) for _ in range(2))
    assert once is again and once.tolist() == [[True, False]]
    assert tap.valid_keys(second, 1, 2).tolist() == [[False, True]]
    assert tap.valid_keys(second, 3, 2).shape == (3, 2) and tap.valid_keys(None, 1, 2) is None
    assert tap.valid_keys(first, 1, 2).tolist() == [[True, False]]
    tap.remove()
    assert tap._valid is None
    for side in ("left", "right"):  # and in a model: forwards that follow each other have their own
        records = records_of(model, **padded_batch(side))
        assert all(torch.equal(record.key_mask, valid_tokens(side)) for record in records)
        assert len({id(record.key_mask) for record in records}) == 1
