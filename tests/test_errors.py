"""Each mistake gets a message that says what to do, and leaves nothing half done."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import alignattn
from alignattn.errors import (
    AlignmentError,
    AlignmentWarning,
    CaptureError,
    ConfigError,
    NonFiniteError,
    NothingCapturedError,
    ShapeError,
    UnsupportedModelError,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "cot"}, r"Unknown method 'cot'. Choose one of: gan, ot, ct, mmd\."),
        ({"preset": "papr"}, r"Unknown preset 'papr'.*paper, released, stable.*'paper'"),
        ({"method": "ot", "cost": "manhattan"}, r"Unknown cost 'manhattan'.*cosine, sqeuclidean"),
        ({"method": "ot", "epsilom": 1}, r"Unknown option for method 'ot': 'epsilom'.*Did you mean 'epsilon'"),
        ({"method": "gan", "epsilon": 1}, r"Unknown option for method 'gan'"),
        ({"method": "gan", "discriminator": "deep"}, "highway, mlp"),
        ({"method": "mmd", "bandwidth": "medium"}, "median, mean"),
        ({"method": "mmd", "bandwidth": -1.0}, "bandwidth must be > 0"),
        ({"method": "ot", "epsilon": 0.0}, "epsilon must be > 0"),
        ({"method": "ot", "max_iterations": 0}, "max_iterations must be >= 1"),
        ({"method": "gan", "hidden_width": 0}, "hidden_width must be a whole number >= 1"),
        ({"weight": -0.1}, "weight must be a finite number >= 0"),
        ({"weight": math.nan}, "weight must be a finite number >= 0"),
        ({"weight": math.inf}, "weight must be a finite number >= 0"),
        ({"weight": "much"}, "A weight is a number, auto, or auto:0.2"),
        ({"reduction": "median"}, "Unknown reduction 'median'.*mean, sum"),
        ({"generator": "head"}, "Unknown generator 'head'.*model, projections"),
        ({"adversary_optimizer": "sgd"}, "Unknown adversary_optimizer"),
        ({"adversary_rate": 0.0}, "adversary_rate must be > 0"),
        ({"layers": 7}, "has 2 attention modules, 0 to 1"),
        ({"layers": "decoder.*"}, r"matches no attention module. They are: layers.0.self_attn, layers.1.self_attn"),
        ({"layers": []}, "leaves nothing to align"),
    ],
)
def test_bad_settings_are_refused_and_leave_the_model_untouched(encoder, arguments, message):
    with pytest.raises(ConfigError, match=message):
        alignattn.align(encoder, **arguments)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())
    alignattn.align(encoder)  # nothing stands in the way of a right call


def test_weight_of_a_schedule_is_checked_at_each_update(encoder):
    with pytest.raises(ConfigError, match="weight must be a finite number"):
        alignattn.align(encoder, "mmd", weight=lambda step: -1.0)
    alignment = alignattn.align(encoder, "mmd", weight=lambda step: 1.0 - step)
    for _ in range(2):
        encoder(torch.randn(2, 5, 16))
        alignment.loss()
        alignment.advance() if alignment.steps < 2 else None
    with pytest.raises(ConfigError, match="weight must be a finite number"):
        alignment.advance()


def test_model_without_attention_is_refused_and_the_advice_works():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(UnsupportedModelError, match=r"Sequential has no attention.*alignment\.record"):
        alignattn.align(model)
    with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.Module is needed, got str"):
        alignattn.align("bert-base-uncased")
    alignment = alignattn.Alignment("mmd")
    alignment.record(torch.randn(2, 1, 4, 4, requires_grad=True), torch.randn(2, 1, 4, 4))
    alignment.loss().backward()


def test_aligning_twice_is_refused_whole_or_in_part(bert):
    alignment = alignattn.align(bert)
    for part in (bert, bert.bert, bert.bert.encoder):
        with pytest.raises(AlignmentError, match=r"aligned already. Call detach\(\)"):
            alignattn.align(part)
    alignment.detach()
    alignattn.align(bert.bert.encoder).detach()


def test_loss_with_nothing_captured_says_why(encoder):
    alignment = alignattn.align(encoder)
    encoder.eval()
    encoder(torch.randn(2, 5, 16))
    with pytest.raises(
        NothingCapturedError, match=r"2 attention modules \(first: layers.0.self_attn\).*model.train\(\)"
    ):
        alignment.loss()
    encoder.train()
    with torch.no_grad():
        encoder(torch.randn(2, 5, 16))
    with pytest.raises(NothingCapturedError, match="with gradients enabled"):
        alignment.loss()
    encoder(torch.randn(2, 5, 16))
    alignment.loss()
    alignment.detach()
    with pytest.raises(NothingCapturedError, match="attached to no model"):
        alignment.loss()


def test_loss_after_the_term_was_added_is_refused_and_the_advice_works(bert, batch):
    alignment = alignattn.align(bert)
    bert(**batch)
    with pytest.raises(CaptureError, match="add_to_outputs=False"):
        alignment.loss()
    alignment.detach()
    alignment = alignattn.align(bert, add_to_outputs=False)
    (bert(**batch).loss + alignment.loss()).backward()


def test_a_term_that_nobody_consumed_raises_at_the_next_training_forward(bert, batch):
    alignattn.align(bert)
    labels = batch.pop("labels")
    torch.nn.functional.cross_entropy(bert(**batch).logits, labels).backward()
    with pytest.raises(CaptureError, match=r"never used.*Add alignment.loss\(\)"):
        bert(**batch)
    bert(**batch)  # said once; the next forward is recorded afresh


def test_forwards_that_pile_up_are_an_error(encoder):
    alignattn.align(encoder)
    x = torch.randn(1, 3, 16)
    for _ in range(64):
        encoder(x)
    with pytest.raises(CaptureError, match="64 training forwards"):
        encoder(x)


def test_reentrant_checkpointing_is_refused_by_name(bert, batch):
    alignattn.align(bert)
    bert.gradient_checkpointing_enable({"use_reentrant": True})
    bert.enable_input_require_grads()
    with pytest.raises(CaptureError, match=r"bert.encoder.layer.0.attention.self.*use_reentrant"):
        bert(**batch)
    bert.gradient_checkpointing_enable({"use_reentrant": False})
    bert(**batch).loss.backward()


def test_records_inside_a_checkpoint_are_counted_once():
    alignment = alignattn.Alignment("mmd", weight=1.0)
    project = nn.Linear(8, 16)

    def attend(x):
        query, key = project(x).view(2, 5, 2, 2, 4).transpose(1, 3).unbind(2)
        alignment.record(query, key, name="layer")
        return (query.sin() * key).sum()

    x = torch.randn(2, 5, 8)
    output = checkpoint(attend, x, use_reentrant=False)
    (output + alignment.loss()).backward()
    with pytest.raises(NothingCapturedError):
        alignment.loss()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("preset", ["stable", "paper"])  # told by the scale they are brought onto, and looked at
@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_non_finite_queries_name_the_layer(method, preset, value):
    alignment = alignattn.Alignment(method, preset=preset)
    query = torch.randn(2, 2, 4, 8)
    query[0, 0, 0, 0] = value
    alignment.record(torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8), name="encoder.0")
    alignment.record(query, torch.randn(2, 2, 4, 8), name="encoder.1")
    with pytest.raises(NonFiniteError, match=r"queries or keys of encoder\.1\."):
        alignment.loss()


def test_what_is_finite_in_double_precision_is_not_taken_for_infinite():
    """Beyond single precision, and on no common scale."""
    alignment = alignattn.Alignment("mmd", preset="paper")
    query, key = (1e39 * torch.randn(2, 2, 5, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    alignment.record(query, key)
    assert alignment.loss().isfinite()


@pytest.mark.parametrize("method", ["gan", "ot", "ct", "mmd"])
def test_non_finite_values_at_padded_tokens_do_no_harm(method):
    alignment = alignattn.Alignment(method)
    query = torch.randn(2, 2, 4, 8)
    query[:, :, 3] = math.nan
    mask = torch.tensor([[True, True, True, False]] * 2)
    alignment.record(query, torch.randn(2, 2, 4, 8), mask, mask)
    assert alignment.loss().isfinite()


@pytest.mark.parametrize(
    ("query", "key", "masks", "message"),
    [
        ((2, 4, 8), (2, 4, 8), {}, "query must be"),
        ((2, 2, 0, 8), (2, 2, 4, 8), {}, "query must be"),
        ((2, 2, 4, 8), (2, 2, 0, 8), {}, "key must be"),
        ((2, 2, 4, 8), (3, 2, 4, 8), {}, "must agree"),
        ((2, 2, 4, 8), (2, 2, 4, 9), {}, "must agree"),
        ((2, 3, 4, 8), (2, 2, 4, 8), {}, "multiple"),
        ((2, 2, 4, 8), (2, 2, 4, 8), {"query_mask": torch.ones(2, 5, dtype=torch.bool)}, r"\(2, 4\), got \(2, 5\)"),
        ((2, 2, 4, 8), (2, 2, 4, 8), {"key_mask": torch.ones(2, 4)}, "must be boolean"),
    ],
)
def test_records_that_do_not_fit_are_refused(query, key, masks, message):
    alignment = alignattn.Alignment("mmd")
    with pytest.raises(ShapeError, match=message):
        alignment.record(torch.randn(query), torch.randn(key), **masks, name="mine")


def test_record_is_refused_where_it_makes_no_sense(encoder):
    tokens = torch.randn(2, 2, 4, 8)
    with pytest.raises(AlignmentError, match="records the attention of its model"):
        alignattn.align(encoder).record(tokens, tokens)
    with pytest.raises(ConfigError, match="detached input"):
        alignattn.Alignment(generator="projections").record(tokens, tokens)


def test_frozen_projections_are_warned_of(bert, batch):
    for name, parameter in bert.named_parameters():
        parameter.requires_grad_(".value." in name or "classifier" in name)
    alignattn.align(bert)
    with pytest.warns(AlignmentWarning, match="all 3 attached attention modules are frozen"):
        bert(**batch)


def test_training_that_aligns_nothing_is_warned_of():
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in {"layers": 1, "attention_heads": 2, "ffn_dim": 8}.items()
    }
    model = BartForConditionalGeneration(BartConfig(vocab_size=20, d_model=8, max_position_embeddings=16, **sizes))
    tokens = torch.randint(3, 20, (2, 5))
    alignment = alignattn.align(model.train(), layers="*encoder_attn")
    assert "cross-attention, left alone" in alignment.summary()
    with pytest.warns(AlignmentWarning, match="nothing is aligned.*cross=True"):
        model(input_ids=tokens, labels=tokens)
    alignment.detach()
    alignment = alignattn.align(model, layers="*encoder_attn", cross=True)
    model(input_ids=tokens, labels=tokens)
    assert list(alignment.parts) == ["model.decoder.layers.0.encoder_attn"]
