"""Hooks that only find something out go when it is known; what they watched over is still watched."""

import copy
from contextlib import nullcontext

import pytest
import torch

import alignattn
from alignattn.bench.workload import Shape, make_batch, make_model, training_step
from alignattn.errors import UnsupportedModelError

transformers = pytest.importorskip("transformers", reason="pip install 'alignattn[hf]'")
CPU = torch.device("cpu")
SHAPE = Shape("tiny", 2, 16, 2, 4, 8, "fp32", vocabulary=50)


def hooked(model):
    """Names of modules below the root that are called with hooks."""
    return [name for name, m in model.named_modules() if name and (m._forward_hooks or m._forward_pre_hooks)]


@pytest.mark.parametrize("recentre", [True, False])
def test_a_model_that_is_known_has_no_hooks_but_at_its_root_and_trains_on(recentre):
    model, batch = make_model(SHAPE, CPU), make_batch(SHAPE, CPU)
    alignment = alignattn.align(model, "mmd", recentre=recentre)
    attentions = [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    assert hooked(model) == sorted(attentions + ([f"{name}.key" for name in attentions] if recentre else []))
    step = training_step(model, batch, "fp32")
    step()
    assert hooked(model) == []
    keys = [model.get_submodule(name).key for name in attentions]
    for _ in range(10):  # and where they were recentred, means go on to meet
        before = keys[0].bias.detach().clone()
        step()
        assert list(alignment.parts) == attentions
    moved = (keys[0].bias - before).norm()
    assert (moved > 10 * 1e-5) == recentre  # further than the optimizer moves it
    alignment.detach()


def test_a_module_that_gets_another_implementation_is_asked_again():
    model, batch = make_model(SHAPE, CPU), make_batch(SHAPE, CPU)
    alignment = alignattn.align(model, "mmd", recentre=False)
    training_step(model, batch, "fp32")()
    attention = model.bert.encoder.layer[1].attention.self
    assert hooked(model) == []
    model.set_attn_implementation("eager")
    attention.forward = lambda hidden_states, attention_mask=None, **_: (hidden_states, None)  # sees no interface
    with pytest.raises(UnsupportedModelError, match=r"layer\.1\.attention\.self .* ran, and no product"):
        model(**batch)
    del attention.forward
    model(**batch).loss.backward()
    assert len(alignment.parts) == 2
    alignment.detach()


def test_a_module_that_gets_a_config_of_its_own_is_asked_again_and_no_other():
    model, batch = make_model(SHAPE, CPU), make_batch(SHAPE, CPU)
    alignment = alignattn.align(model, "mmd", recentre=False)
    step = training_step(model, batch, "fp32")
    step()
    attention = model.bert.encoder.layer[1].attention.self
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"
    attention.eval()  # which is not recorded: nothing is known of it when the next look is over
    for _ in range(10):
        step()
    assert hooked(model) == ["bert.encoder.layer.1.attention.self"]
    attention.train()
    for _ in range(10):
        step()
    assert hooked(model) == [] and len(alignment.parts) == 2
    alignment.detach()


def test_keys_of_a_layer_that_was_left_out_at_first_are_recentred_later():
    model, batch = make_model(SHAPE, CPU), make_batch(SHAPE, CPU)
    alignment = alignattn.align(model, "mmd")
    step, late = training_step(model, batch, "fp32"), model.bert.encoder.layer[1].attention.self
    late.eval()
    step()
    assert "bert.encoder.layer.1.attention.self.key" in hooked(model)
    late.train()
    for _ in range(9):
        step()
    before = late.key.bias.detach().clone()
    step()
    assert (late.key.bias - before).norm() > 10 * 1e-5  # further than the optimizer moves it
    assert hooked(model) == []
    alignment.detach()


def test_detaching_takes_hooks_away_that_were_never_settled():
    model = make_model(SHAPE, CPU)
    alignment = alignattn.align(model, "mmd")
    assert hooked(model)
    alignment.detach()
    assert hooked(model) == []


def test_modules_that_may_attend_elsewhere_are_asked_each_time():
    config = transformers.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=1, bos_token_id=0,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).train()
    ids = torch.randint(3, 50, (4, 8), generator=torch.Generator().manual_seed(0))
    alignment = alignattn.align(model, "mmd", recentre=False)  # which would go on asking of cross-attention's keys
    before = [name for name in hooked(model) if name.endswith("attn")]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert [name for name in hooked(model) if name.endswith("attn")] == before != []
        assert sorted(alignment.parts) == ["model.decoder.layers.0.self_attn", "model.encoder.layers.0.self_attn"]
    alignment.detach()


def test_an_evaluation_of_a_known_model_is_that_of_the_plain_one():
    model, batch = make_model(SHAPE, CPU), make_batch(SHAPE, CPU)
    alignment = alignattn.align(model, "ct")
    training_step(model, batch, "fp32")()
    model.eval()
    found = model(**batch).logits
    alignment.detach()
    assert torch.equal(found, model(**batch).logits)


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_that_is_not_recorded_is_given_attention_functions_as_they_are(bert, batch, fails):
    from transformers.models.bert import modeling_bert

    alignment = alignattn.align(bert, "mmd", weight=1.0)
    interface = modeling_bert.ALL_ATTENTION_FUNCTIONS
    plain, given = interface.plain["sdpa"], []

    def note(*_):
        given.append(interface["sdpa"] is plain)
        if fails:
            raise RuntimeError("on the way")

    handle = bert.bert.encoder.layer[1].register_forward_pre_hook(note)
    assert interface["sdpa"] is plain
    with pytest.raises(RuntimeError, match="on the way") if fails else nullcontext():
        bert(**batch)
    assert interface["sdpa"] is plain
    with torch.no_grad(), pytest.raises(RuntimeError, match="on the way") if fails else nullcontext():
        bert.eval()(**batch)
    assert given == [False, True]
    handle.remove()
    bert.train()(**batch).loss.backward()
    assert len(alignment.parts) == 3


def test_where_layers_are_computed_again_attention_is_watched_all_the_time(bert):
    from transformers.models.bert import modeling_bert

    alignment = alignattn.align(bert, "mmd", weight=1.0, stream="layer")
    interface = modeling_bert.ALL_ATTENTION_FUNCTIONS
    assert interface["sdpa"] is not interface.plain["sdpa"]
    other = alignattn.align(copy.deepcopy(bert), "mmd")
    alignment.detach()
    assert interface["sdpa"] is interface.plain["sdpa"]
    other.detach()
    assert modeling_bert.ALL_ATTENTION_FUNCTIONS is interface.plain
