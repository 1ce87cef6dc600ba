"""Half precision and autocast: the losses compute in fp32 and agree with it; no degenerate input makes NaN."""

import copy
import os

import pytest
import torch

import alignattn

METHODS = ["gan", "ot", "ct", "mmd"]
needs_bf16 = pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" not in os.environ,
    reason="bf16 products kill the process on some CPUs: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, as make test does",
)
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)]


def term_and_gradient(model, method, generator, inputs, **autocast):
    alignment = alignattn.align(model, method, weight=1.0, generator=generator, add_to_outputs=False)
    with torch.autocast("cpu", **autocast):
        model(**inputs)
        loss = alignment.loss()
    model.zero_grad()
    loss.backward()
    gradient = model.bert.encoder.layer[1].attention.self.query.weight.grad.float()
    alignment.detach()
    return loss.detach(), gradient


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("generator", ["model", "projections"])
def test_half_precision_agrees_with_single(bert, batch, dtype, method, generator):
    bert.config.hidden_dropout_prob = bert.config.attention_probs_dropout_prob = 0.0
    for module in bert.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    del batch["labels"]
    exact, exact_gradient = term_and_gradient(bert, method, generator, batch, enabled=False)
    pure = copy.deepcopy(bert).to(dtype)
    forms = {
        "autocast": term_and_gradient(bert, method, generator, batch, dtype=dtype),
        "pure": term_and_gradient(pure, method, generator, batch, enabled=False),
    }
    rounding = 8 * torch.finfo(dtype).eps
    for form, (loss, gradient) in forms.items():
        assert loss.dtype == torch.float32, form
        torch.testing.assert_close(loss, exact, rtol=rounding, atol=rounding)
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact_gradient.flatten(), dim=0)
        assert cosine > 0.97, (form, cosine)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["stable", "paper", "released"])
@pytest.mark.parametrize("case", ["identical", "zero", "huge", "all padding", "one token"])
def test_degenerate_queries_and_keys_make_no_nan(dtype, method, preset, case):
    query, key = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    mask = torch.ones(3, 5, dtype=torch.bool)
    if case == "identical":
        key = query.clone()
    if case == "zero":
        query[:, :, 1:] = 0
        key[0] = 0
    if case == "huge":
        query = query * (1e4 if dtype == torch.float16 else 1e30)
    if case == "all padding":
        mask[1] = False
    if case == "one token":
        mask[1, 1:] = False
    query, key = query.to(dtype).requires_grad_(), key.to(dtype).requires_grad_()
    alignment = alignattn.Alignment(method, weight=1.0, preset=preset)
    alignment.record(query, key, mask, mask)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = alignment.loss()
    loss.backward()
    assert loss.isfinite()
    for tensor in (query, key, *alignment.parameters()):
        assert tensor.grad is None or not tensor.grad.isnan().any()


def test_gradients_that_would_vanish_in_fp16_reach_the_projections(bert, batch):
    """Long queries have short gradients: unscaled, fp16 would round them by seven percent."""
    del batch["labels"]
    bert.eval()
    for layer in bert.bert.encoder.layer:
        layer.attention.self.train()
        layer.attention.self.dropout.p = 0.0
        for projection in (layer.attention.self.query, layer.attention.self.key):
            projection.weight.data *= 1e5
    found = {}
    for dtype in (torch.float32, torch.float16):
        alignment = alignattn.align(bert, "mmd", weight=1.0, layers=0, generator="projections", add_to_outputs=False)
        with torch.autocast("cpu", dtype=torch.float16, enabled=dtype == torch.float16):
            bert(**batch)
        bert.zero_grad()
        (alignment.loss() * 65536).backward()  # as a gradient scaler does
        found[dtype] = bert.bert.encoder.layer[0].attention.self.key.weight.grad / 65536
        alignment.detach()
    off = (found[torch.float16] - found[torch.float32]).norm() / found[torch.float32].norm()
    assert off < 0.01
