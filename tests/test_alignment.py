"""align() and Alignment: what a user sees, and what must never change."""

import copy

import pytest
import torch
from torch import nn

import alignattn
from alignattn.errors import AlignmentError, CaptureError, NothingCapturedError
from alignattn.objective import is_nothing

METHODS = ["gan", "ot", "ct", "mmd"]
PRESETS = ["stable", "paper", "released"]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def seeded_step(model, batch, optimizer):
    torch.manual_seed(1)
    optimizer.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    return outputs.loss.item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_gradients_reach_the_query_and_key_projections_of_every_layer(bert, batch, method, preset, generator):
    alignment = alignattn.align(bert, method, preset=preset, generator=generator, add_to_outputs=False)
    bert(**batch)
    alignment.loss().backward()
    reached = gradients(bert)
    for layer in range(3):
        for side in ("query", "key"):
            if side == "query" and preset == "released" and method == "gan":
                continue  # there the queries are detached
            gradient = reached[f"bert.encoder.layer.{layer}.attention.self.{side}.weight"]
            assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_projections_alone_move_when_they_are_the_generator(bert, batch):
    alignment = alignattn.align(bert, "mmd", generator="projections", add_to_outputs=False)
    bert(**batch)
    alignment.loss().backward()
    assert gradients(bert)
    assert all(".self.query." in name or ".self.key." in name for name in gradients(bert))


@pytest.mark.parametrize("method", METHODS)
def test_outputs_loss_carries_the_weighted_term(bert, batch, method):
    bert.eval()  # no dropout, so that both passes agree; the attention modules alone are in training mode
    plain = bert(**batch).loss
    alignment = alignattn.align(bert, method, weight=0.3)
    for site in alignment._tap.sites:
        site.module.train()
        site.module.dropout.p = 0.0
    outputs = bert(**batch)
    expected = plain + 0.3 * torch.stack(list(alignment.parts.values())).mean()
    torch.testing.assert_close(outputs.loss, expected)
    torch.testing.assert_close(outputs[0], expected)
    torch.testing.assert_close(outputs["loss"], expected)


def test_tuples_carry_the_term_only_if_labels_were_given(bert, batch):
    alignment = alignattn.align(bert, "mmd", weight=100.0)
    with_labels = bert(**batch, return_dict=False)
    assert with_labels[0].ndim == 0
    with pytest.raises(CaptureError, match=r"outputs\.loss already"):
        alignment.loss()
    del batch["labels"]
    logits = bert(**batch, return_dict=False)[0]
    assert logits.shape == (3, 2)
    assert alignment.loss().ndim == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", PRESETS)
def test_weight_zero_trains_bit_identically_to_soft(bert, batch, method, preset):
    soft = copy.deepcopy(bert)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (soft, bert)]
    alignattn.align(bert, method, weight=0.0, preset=preset)
    for _ in range(3):
        assert seeded_step(soft, batch, optimizers[0]) == seeded_step(bert, batch, optimizers[1])
    for (name, one), other in zip(soft.named_parameters(), bert.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("weight", [0, 0.0])
def test_zero_is_nothing_however_it_is_written(weight):
    assert is_nothing(alignattn.Alignment("mmd", weight).config.weight_at(0))
    assert not is_nothing(alignattn.Alignment("mmd", weight + 1).config.weight_at(0))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_global_random_state_is_untouched(bert, batch, method, generator):
    before = torch.get_rng_state()
    alignment = alignattn.align(bert, method, generator=generator, add_to_outputs=False)
    assert torch.equal(torch.get_rng_state(), before)
    bert(**batch)
    before = torch.get_rng_state()
    alignment.loss().backward()
    alignment.state_dict()
    assert torch.equal(torch.get_rng_state(), before)


def test_model_stays_the_plain_model(bert, batch):
    plain = copy.deepcopy(bert).eval()
    names, keys = [n for n, _ in bert.named_parameters()], list(bert.state_dict())
    expected = plain(**batch).logits
    alignment = alignattn.align(bert, "ct")
    bert(**batch).loss.backward()
    assert [n for n, _ in bert.named_parameters()] == names
    assert list(bert.state_dict()) == keys
    bert.eval()
    assert torch.equal(bert(**batch).logits, expected)
    with torch.no_grad():
        assert torch.equal(bert(**batch).logits, plain(**batch).logits)
    alignment.detach()
    alignment.detach()  # twice does no harm
    assert torch.equal(bert(**batch).logits, expected)
    for one, other in zip(plain.modules(), bert.modules(), strict=True):
        assert not other._forward_hooks and not other._forward_pre_hooks
        assert vars(one).keys() == vars(other).keys()
    assert {m.config._attn_implementation for m in bert.modules() if hasattr(m, "config")} == {"sdpa"}


def test_a_step_on_queries_and_keys_lowers_the_loss_and_one_on_the_critic_raises_it():
    for method, ascending in (("gan", "discriminator"), ("ct", "critic"), ("ct", "navigator")):
        alignment = alignattn.Alignment(method, weight=1.0, preset="paper", adversary_optimizer=None)
        query = torch.randn(4, 2, 6, 8, requires_grad=True)
        key = (torch.randn(4, 2, 6, 8) + 1).requires_grad_()

        def value(query=query, key=key, alignment=alignment):
            alignment.record(query, key, name="layer")
            return alignment.loss()

        before = value()
        before.backward()
        with torch.no_grad():
            moved = query - 1e-2 * query.grad, key - 1e-2 * key.grad
        assert value(*(t.requires_grad_() for t in moved)) < before
        bank = alignment.matcher.banks[0][ascending]
        with torch.no_grad():
            for parameter in bank.parameters():
                parameter -= 1e-2 * parameter.grad
        assert (value() > before) == (ascending != "navigator"), ascending


@pytest.mark.parametrize("method", METHODS)
def test_gradient_of_the_term_agrees_with_finite_differences(method):
    options = {"ot": {"gradient": "unrolled", "epsilon": 0.2}, "mmd": {"bandwidth": 1.0}}.get(method, {})
    alignment = alignattn.Alignment(method, weight=0.7, preset="paper", **options)
    query = torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)

    def value(query, key):
        alignment._passes.clear()
        alignment.adversary.due = False
        alignment.record(query, key, name="layer")
        return alignment.loss()

    value(query, key)
    alignment.matcher.double()
    assert torch.autograd.gradcheck(value, (query, key))


def test_several_forwards_before_one_loss_are_averaged(encoder):
    alignment = alignattn.align(encoder, "mmd")
    first, second = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    apart = []
    for x in (first, second):
        encoder(x)
        apart.append(alignment.loss())
    encoder(first)
    encoder(second)
    torch.testing.assert_close(alignment.loss(), (apart[0] + apart[1]) / 2)
    with pytest.raises(NothingCapturedError):
        alignment.loss()


def test_sum_is_mean_times_heads_and_layers(encoder):
    x = torch.randn(2, 5, 16)
    values = {}
    for reduction in ("mean", "sum"):
        alignment = alignattn.align(encoder, "ot", reduction=reduction)
        encoder(x)
        values[reduction] = alignment.loss()
        alignment.detach()
    torch.testing.assert_close(values["sum"], values["mean"] * 4 * 2)


def test_empty_samples_count_in_the_mean_over_samples():
    query, key = torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 8)
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[2:] = False
    whole, half = (alignattn.Alignment("mmd", weight=1.0) for _ in range(2))
    whole.record(query, key, mask, mask)
    half.record(query[:2], key[:2], mask[:2], mask[:2])
    torch.testing.assert_close(whole.loss(), half.loss() / 2)


def test_one_batched_call_gives_what_one_call_a_layer_gives():
    records = [(torch.randn(3, 2, 6, 8), torch.randn(3, 2, 6, 8)) for _ in range(4)]
    for method in METHODS:
        together = alignattn.Alignment(method, weight=1.0)
        for i, (query, key) in enumerate(records):
            together.record(query, key, name=f"layer {i}")
        apart = []
        for i, (query, key) in enumerate(records):
            alone = alignattn.Alignment(method, weight=1.0)
            alone.record(query, key, name=f"layer {i}")
            apart.append(alone.loss())
        torch.testing.assert_close(together.loss(), torch.stack(apart).mean())
        assert len(together.matcher.banks) == (1 if method in ("gan", "ct") else 0)


def test_padding_changes_nothing_on_either_side(bert, batch):
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    bert.config.attention_probs_dropout_prob = bert.config.hidden_dropout_prob = 0.0
    positions = torch.arange(7).expand(3, 7)
    shift = torch.tensor([3, 1, 0])[:, None]
    left = {
        "input_ids": torch.stack([row.roll(s.item()) for row, s in zip(batch["input_ids"], shift, strict=True)]),
        "attention_mask": torch.stack([m.roll(s.item()) for m, s in zip(batch["attention_mask"], shift, strict=True)]),
        "position_ids": (positions - shift).clamp_min(0),
    }
    right = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "position_ids": positions}
    other = right | {"input_ids": torch.where(batch["attention_mask"] > 0, batch["input_ids"], 7)}
    results = []
    for inputs in (right, left, other):
        alignment = alignattn.align(bert, "ct", add_to_outputs=False)
        bert(**inputs)
        bert.zero_grad()
        loss = alignment.loss()
        loss.backward()
        results.append((loss.detach(), bert.bert.encoder.layer[2].attention.self.query.weight.grad.clone()))
        alignment.detach()
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


def test_schedule_sets_the_weight_of_each_step(encoder):
    alignment = alignattn.align(encoder, "ot", weight=alignattn.Ramp(2.0, steps=4))
    x = torch.randn(2, 5, 16)
    shares = []
    for _ in range(6):
        encoder(x)
        loss = alignment.loss()
        shares.append((loss / torch.stack(list(alignment.parts.values())).mean()).item())
    assert shares == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.0], rel=1e-5)


def test_summary_names_layers_and_counts_heads(bert):
    alignment = alignattn.align(bert, "gan", layers=[0, -1])
    text = alignment.summary()
    assert "gan" in text and "weight auto (share 0.2) (mean over heads and layers)" in text
    assert "2 attention modules, 8 heads" in text
    assert "bert.encoder.layer.0.attention.self" in text and "layer.1." not in text
    assert "not attached" in alignattn.Alignment("ot").summary()


def test_a_matcher_of_ones_own_serves_as_method(encoder):
    from alignattn.matching.matcher import MatcherConfig

    class MeanDistance(alignattn.Matcher):
        def losses(self, query, key, query_mask, key_mask, names):
            return (query.mean(3) - key.mean(3)).square().sum(-1).flatten(0, 1)

    alignment = alignattn.align(encoder, MeanDistance(MatcherConfig()), weight=0.5)
    encoder(torch.randn(2, 5, 16))
    loss = alignment.loss()
    assert loss > 0 and loss.requires_grad


def test_detached_alignment_serves_another_model(encoder):
    alignment = alignattn.align(encoder, "mmd")
    other = copy.deepcopy(encoder)
    with pytest.raises(AlignmentError, match="attached to TransformerEncoder already"):
        alignment.attach(other)
    alignment.detach()
    alignment.attach(other)
    other(torch.randn(2, 5, 16))
    assert alignment.loss().requires_grad


def test_restarting_positions_without_a_packing_mask_are_one_problem_a_row(bert, batch):
    """BERT attends to the whole row whatever its position_ids: nothing is packed."""
    bert.eval()
    for layer in bert.bert.encoder.layer:
        layer.attention.self.train()
        layer.attention.self.dropout.p = 0.0
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, 7)
    alignment = alignattn.align(bert, "mmd", weight=1.0, layers=0, without_own=False, bandwidth="median")
    bert(input_ids=batch["input_ids"], position_ids=positions)
    hidden = bert.bert.embeddings(input_ids=batch["input_ids"], position_ids=positions)
    attention = bert.bert.encoder.layer[0].attention.self
    query, key = (p(hidden).view(3, 7, 4, 8).transpose(1, 2) for p in (attention.query, attention.key))
    torch.testing.assert_close(alignment.loss(), alignattn.functional.mmd(query, key).mean())


def test_a_model_dropped_without_detach_leaves_nothing_behind():
    import gc
    import weakref

    from transformers import CamembertConfig, CamembertForSequenceClassification
    from transformers.models.camembert import modeling_camembert

    plain = modeling_camembert.ALL_ATTENTION_FUNCTIONS
    config = CamembertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = CamembertForSequenceClassification(config)
    alignattn.align(model, "gan")
    assert modeling_camembert.ALL_ATTENTION_FUNCTIONS is not plain
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert modeling_camembert.ALL_ATTENTION_FUNCTIONS is plain
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    alignattn.align(layer, "gan")
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks


def test_a_value_that_came_with_others_now_and_alone_then_is_averaged_over_all():
    from alignattn.meter import Meter

    meter = Meter()
    meter.add(("loss", "first"), torch.tensor([1.0, 10.0]))
    meter.add(("loss", "first"), torch.tensor([2.0, 20.0]))
    meter.add(("loss", "second"), torch.tensor([6.0, 5.0]))
    assert meter.read() == {"loss": 3.0, "first": 15.0, "second": 5.0}
    assert meter.read() == {}


def test_sums_for_the_logs_follow_a_model_that_is_moved():
    """A device that every build has stands for the accelerator: tests/test_cuda.py trains on one."""
    from alignattn.meter import Meter

    meter = Meter()
    meter.add(("loss",), torch.ones(1))
    meter.add(("loss",), torch.ones(1, device="meta"))
    assert meter._sums[("loss",)].values.device.type == "meta"


def test_sums_that_are_expected_of_a_model_without_memory_can_be_read():
    from alignattn.meter import Meter

    meter = Meter()
    meter.expect(("loss",), torch.device("meta"))
    assert meter.read() == {}
    meter.add(("loss",), torch.ones(1))
    assert meter.read() == {"loss": 1.0}


@pytest.mark.parametrize("generator", ["model", "projections"])
def test_layers_that_are_matched_together_get_what_each_gets_alone(bert, batch, generator):
    """As on an accelerator, where gradients of a stack of layers are delivered together."""
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for together in (True, False):
        model = copy.deepcopy(bert)
        alignment = alignattn.align(
            model, "mmd", weight=1.0, add_to_outputs=False, generator=generator, recentre=False, until_met=False
        )
        if together:
            alignment.matcher.is_separable = lambda: False
        model(**batch)
        alignment.loss().backward()
        named = {name: p.grad for name, p in model.named_parameters() if "query" in name or "key" in name}
        gradients.append({name: grad for name, grad in named.items() if grad is not None})
    stacked, alone = gradients
    assert stacked.keys() == alone.keys() and len(alone) >= 4
    for name, gradient in alone.items():
        assert gradient.abs().max() > 0 or name.endswith("key.bias")
        torch.testing.assert_close(stacked[name], gradient, rtol=1e-4, atol=1e-7)
