"""transformers families that write their attention out: queries and keys are read off the projections."""

import copy

import pytest
import tiny
import torch
import transformers
from references import FAMILIES, heads, layer_output
from tiny import first_output, observed, padded_batch, records_of, traces, valid_tokens

from alignattn.capture import Tap
from alignattn.errors import UnsupportedModelError

every_family = pytest.mark.parametrize("name", ["mpnet", "deberta"])
every_side = pytest.mark.parametrize("side", [None, "right", "left"])


@every_family
@every_side
@pytest.mark.parametrize("training", [True, False])
def test_attention_of_the_captured_q_and_k_is_the_layers_output(name, side, training):
    family = FAMILIES[name]
    model = family.build("eager").train(training)
    with observed(model, list(family.attentions)) as seen:
        records = records_of(model, tap={"always": True}, **padded_batch(side))
    assert [record.name for record in records] == list(family.attentions)
    valid = valid_tokens(side)
    for record in records:
        output = layer_output(family, model, record.name, record.query, record.key, seen[record.name], valid)
        torch.testing.assert_close(output[valid], seen[record.name].output[valid], rtol=1e-4, atol=1e-5)


@every_family
@every_side
def test_masks_of_a_record_are_the_padding_of_the_batch(name, side):
    model = FAMILIES[name].build("eager").train()
    valid = valid_tokens(side)
    for record in records_of(model, **padded_batch(side)):
        for mask in (record.query_mask, record.key_mask):
            assert torch.equal(valid, torch.ones_like(valid) if mask is None else mask)


@every_family
def test_eval_outputs_are_bit_identical_while_attached(name):
    model = FAMILIES[name].build("eager").eval()
    plain, before = first_output(model, **padded_batch("right")), traces(model)
    records = []
    tap = Tap(model, watch=records.append)
    assert torch.equal(first_output(model, **padded_batch("right")), plain)
    assert not records
    tap.remove()
    assert traces(model) == before


@pytest.mark.parametrize("share", [True, False])
def test_relative_positions_of_deberta_are_no_tokens(share):
    """With shared projections it calls them twice a layer, the second time on the embeddings of distances."""
    model = tiny.deberta(
        "eager", relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=share, position_buckets=4
    ).train()
    name = "encoder.layer.1.attention.self"
    with observed(model, [name]) as seen:
        records = records_of(model, tap={"layers": name}, **padded_batch("right"))
    module, (record,) = model.get_submodule(name), records
    for tokens, projection in ((record.query, module.query_proj), (record.key, module.key_proj)):
        expected = heads(seen[name].hidden @ projection.weight.T + projection.bias, 4)
        torch.testing.assert_close(tokens, expected)


@every_family
def test_nothing_can_stand_in_and_the_error_says_so_without_trace(name):
    model = FAMILIES[name].build("eager")
    before = traces(model)
    with pytest.raises(
        UnsupportedModelError, match=rf"{type(model).__name__} .*{FAMILIES[name].attentions[0]}.*watched"
    ):
        Tap(model, attend=lambda call: call.proceed())
    assert traces(model) == before


@every_family
def test_layer_that_runs_twice_gives_two_records(name):
    model = FAMILIES[name].build("eager").train()
    model.encoder.layer = torch.nn.ModuleList([model.encoder.layer[0]] * 2)
    records = records_of(model, **padded_batch(None))
    assert [record.call for record in records] == [0, 1]
    assert not torch.equal(records[0].key, records[1].key)


@every_family
@pytest.mark.parametrize("projections", [True, False])
def test_copy_of_an_attached_model_is_plain(name, projections):
    model = FAMILIES[name].build("eager").train()
    plain = first_output(model, **padded_batch("right"))
    records = []
    tap = Tap(model, watch=records.append, projections=projections)
    duplicate = copy.deepcopy(model)
    assert torch.equal(first_output(duplicate, **padded_batch("right")), plain)
    assert not records
    tap.remove()
    assert torch.equal(first_output(duplicate, **padded_batch("right")), plain)


def test_forward_pass_that_fails_leaves_nothing_for_the_next():
    model = tiny.mpnet("eager").train()
    records = []
    tap = Tap(model, watch=records.append)
    failing = model.encoder.layer[0].attention.attn.o.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**padded_batch(None))
    failing.remove()
    records.clear()
    model(**padded_batch("right"))
    tap.remove()
    assert len(records) == 2 and torch.equal(records[0].key_mask, valid_tokens("right"))


def test_families_inside_and_outside_the_interface_can_live_in_one_model():
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = tiny.bert(), tiny.mpnet("eager")

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            return self.inside(**batch)[0] + self.outside(**batch)[0]

    model = Both()
    assert isinstance(model.outside, transformers.MPNetModel)
    before = traces(model)
    records = records_of(model, **padded_batch("left"))
    assert [record.name.split(".")[0] for record in records] == ["inside"] * 2 + ["outside"] * 2
    assert traces(model) == before
