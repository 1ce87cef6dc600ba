"""LoRA on the attention's projections, attached before or after; and weights that are stored in another form."""

import copy

import pytest
import torch
from torch import nn

import alignattn
from alignattn.errors import AlignmentWarning

peft = pytest.importorskip("peft", reason="pip install peft")


@pytest.fixture
def still(bert):
    for module in bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return bert


def adapted(model, *targets):
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config)


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("generator", ["model", "projections"])
@pytest.mark.parametrize("method", ["mmd", "gan"])
def test_attached_before_or_after_the_adapters_feel_the_same_gradient(still, batch, method, generator):
    other = copy.deepcopy(still)
    torch.manual_seed(1)
    after = adapted(still, "query", "key", "value")
    # PEFT's wrapper lengthens the names of layers, and a network's first weights hang on its layer's name: equal ones
    # come from the same model.
    inner = after if method == "mmd" else after.get_base_model()
    alignment = alignattn.align(inner, method, weight=1.0, generator=generator)
    after(**batch).loss.backward()
    felt = grads(after)
    alignment.detach()
    after.zero_grad()
    after(**batch).loss.backward()
    soft = grads(after)
    moved = {name for name in soft if not torch.equal(soft[name], felt[name])}
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in moved if "lora_" in name} >= {"query", "key"}
    assert not any("base_layer" in name for name in felt)  # the frozen weights stay frozen

    alignment = alignattn.align(other, method, weight=1.0, generator=generator)
    torch.manual_seed(1)
    before = adapted(other, "query", "key", "value")
    before(**batch).loss.backward()
    for name, value in felt.items():
        torch.testing.assert_close(grads(before)[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("layers", [None, "*.layer.0.*"])  # no adapter at all stands before the first layer's q and k
def test_lora_on_v_alone_can_change_nothing_and_a_warning_says_so(still, batch, layers):
    model = adapted(still, "value")
    alignment = alignattn.align(model, "mmd", layers=layers)
    with pytest.warns(AlignmentWarning, match=r"frozen"):
        model(**batch).loss.backward()
    alignment.detach()


class Stored(nn.Module):
    """A stand-in for quantised weights: whole numbers and a scale, made floats where they are used."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("numbers", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.numbers.to(x.dtype) * self.scale, self.bias)


def test_quantised_weights_do_not_matter(still, batch):
    """Queries and keys are taken where attention uses them: how weights are stored is the layer's own business."""
    full = copy.deepcopy(still)
    for layer, twin in zip(still.bert.encoder.layer, full.bert.encoder.layer, strict=True):
        for name in ("query", "key"):
            stored = Stored(getattr(layer.attention.self, name))
            setattr(layer.attention.self, name, stored)
            with torch.no_grad():
                getattr(twin.attention.self, name).weight.copy_(stored.numbers.float() * stored.scale)
    losses = []
    for model in (still, full):
        alignment = alignattn.align(model, "mmd", weight=1.0, add_to_outputs=False)
        model(**batch)
        loss = alignment.loss()
        loss.backward()
        losses.append(loss.detach())
        assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0
        alignment.detach()
    torch.testing.assert_close(losses[0], losses[1])
