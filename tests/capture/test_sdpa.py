"""Models that call scaled_dot_product_attention themselves."""

import pytest
import sdpa_models as models
import torch
from references import heads, merged, softmax_attention
from sdpa_models import Crossing, Direct, Grouped, NanoGPT, Root, SingleHead
from tiny import observed, records_of, seeded, traces
from torch import Tensor, nn

from alignattn.capture import AttentionCall, Tap

B, N, E, H = 3, 6, 16, 4
TOKENS = torch.randn(B, N, E, generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([4, 6, 3])
VALID = torch.arange(N) < LENGTHS[:, None]
EVERYTHING = torch.ones(B, N, dtype=torch.bool)
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def functions_on_the_stack() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


def project(tokens: Tensor, linear: nn.Linear) -> Tensor:
    return tokens @ linear.weight.T + linear.bias


def as_float(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def rebuilt(module: nn.Module, query: Tensor, key: Tensor, allowed: Tensor, scale: float = 0.5) -> Tensor:
    """The output of an `Attention` from given q and k, and all else from its weights."""
    value = project(TOKENS, module.v_proj)
    value = heads(value, value.shape[-1] // 4)
    return project(merged(softmax_attention(query, key, value, scale, allowed)), module.out)


HOW = {
    "plain": ({}, EVERYTHING[:, None, None].expand(B, 1, N, N), EVERYTHING),
    "is_causal": ({"is_causal": True}, CAUSAL.expand(B, 1, N, N), EVERYTHING),
    "boolean mask": ({"attn_mask": VALID[:, None, None, :]}, VALID[:, None, None].expand(B, 1, N, N), VALID),
    "float mask": ({"attn_mask": as_float(VALID)[:, None, None]}, VALID[:, None, None].expand(B, 1, N, N), VALID),
    "full mask": (
        {"attn_mask": (VALID[:, None, None] & CAUSAL).expand(B, H, N, N)},
        VALID[:, None, None] & CAUSAL,
        VALID,
    ),
    "mask of all samples": ({"attn_mask": CAUSAL}, CAUSAL.expand(B, 1, N, N), EVERYTHING),
    "mask of heads": ({"attn_mask": CAUSAL.expand(H, N, N)}, CAUSAL.expand(B, 1, N, N), EVERYTHING),
}


@pytest.mark.parametrize("kind", models.WAYS)
def test_attention_is_found_however_it_is_written(kind):
    model = seeded(lambda: Root(kind())).train()
    with observed(model, ["attention"]) as seen:
        (record,) = records_of(model, TOKENS)
    assert record.name == "attention"
    torch.testing.assert_close(record.query, heads(project(TOKENS, model.attention.q_proj), H))
    torch.testing.assert_close(record.key, heads(project(TOKENS, model.attention.k_proj), H))
    output = rebuilt(model.attention, record.query, record.key, HOW["plain"][1])
    torch.testing.assert_close(output, seen["attention"].output, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [Direct, Grouped])
def test_attention_of_the_captured_q_and_k_is_the_modules_output(kind, how):
    arguments, allowed, keys = HOW[how]
    model = seeded(lambda: Root(kind())).train()
    with observed(model, ["attention"]) as seen:
        (record,) = records_of(model, TOKENS, **arguments)
    output = rebuilt(model.attention, record.query, record.key, allowed)
    torch.testing.assert_close(output, seen["attention"].output, rtol=1e-4, atol=1e-5)
    for mask in (record.query_mask, record.key_mask):
        assert torch.equal(keys, EVERYTHING if mask is None else mask)


@pytest.mark.parametrize("how", [*HOW, "scale"])
@pytest.mark.parametrize("kind", [Direct, Grouped])
def test_stand_in_can_do_what_the_function_would(kind, how):
    arguments = {"scale": 0.2} if how == "scale" else HOW[how][0]
    model = seeded(lambda: Root(kind())).eval()
    plain = model(TOKENS, **arguments)
    tap = Tap(model, attend=compared)
    standing_in = model(TOKENS, **arguments)
    tap.remove()
    torch.testing.assert_close(standing_in, plain, rtol=1e-4, atol=1e-5)


def compared(call: AttentionCall) -> Tensor:
    soft = call.attend(call.weights())
    torch.testing.assert_close(soft, call.proceed(), rtol=1e-4, atol=1e-5)
    return soft


@pytest.mark.parametrize("lead", [(), (B,)])
@pytest.mark.parametrize("masked", [None, "of each sample", "of all"])
def test_tokens_without_an_axis_for_heads_have_one_head(lead, masked):
    model = seeded(lambda: Root(SingleHead())).train()
    tokens = TOKENS if lead else TOKENS[0]
    mask = {
        None: None,
        "of each sample": VALID[:, None].expand(B, N, N) if lead else VALID[0].expand(N, N),
        "of all": VALID[0].expand(N, N),
    }[masked]
    plain = model(tokens, attn_mask=mask)
    (record,) = records_of(model, tokens, attn_mask=mask)
    torch.testing.assert_close(record.query.squeeze(1), project(tokens.view(-1, N, E), model.attention.query))
    keys = VALID if masked == "of each sample" and lead else VALID[:1].expand(len(record.query), N)
    assert record.key_mask is None if mask is None else torch.equal(record.key_mask, keys)
    tap = Tap(model, attend=compared)
    standing_in = model(tokens, attn_mask=mask)
    tap.remove()
    torch.testing.assert_close(standing_in, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [None, "every window", "windows of a sample", "of all"])
def test_windows_are_samples(masked):
    """[b, w, h, n, d]: each window is a problem of its own."""
    windows, size = 2, 3
    model = seeded(lambda: Root(Direct())).train()
    tokens = TOKENS.view(B, windows, size, E)
    valid = VALID.view(B, windows, size).clone()
    valid[..., 0] = True
    mask = {
        None: None,
        "every window": valid[:, :, None, None].expand(B, windows, 1, size, size),
        "windows of a sample": valid[0][:, None, None].expand(windows, 1, size, size),
        "of all": valid[0, 0].expand(size, size),
    }[masked]
    plain = model(tokens, attn_mask=mask)
    (record,) = records_of(model, tokens, attn_mask=mask)
    expected = heads(project(tokens.view(B * windows, size, E), model.attention.q_proj), H)
    torch.testing.assert_close(record.query, expected)
    keys = {"every window": valid, "windows of a sample": valid[:1], "of all": valid[:1, :1]}.get(masked)
    if keys is not None:
        assert torch.equal(record.key_mask, keys.expand(B, windows, size).reshape(-1, size))
    tap = Tap(model, attend=compared)
    standing_in = model(tokens, attn_mask=mask)
    tap.remove()
    torch.testing.assert_close(standing_in, plain, rtol=1e-4, atol=1e-5)


def test_cross_attention_is_left_alone_unless_asked_for():
    model = seeded(lambda: Root(Crossing())).train()
    context = TOKENS.flip(0)
    assert records_of(model, TOKENS, context) == [] == records_of(model, TOKENS, context=context)
    assert len(records_of(model, TOKENS)) == len(records_of(model, TOKENS, context=None)) == 1
    assert len(records_of(model, TOKENS, context=TOKENS)) == 1  # its own tokens: that is self-attention
    (record,) = records_of(model, TOKENS, context, tap={"cross": True})
    torch.testing.assert_close(record.key, heads(project(context, model.attention.to_k), H))
    assert record.query_mask is None


def test_stand_in_leaves_cross_attention_alone_unless_asked_for():
    model = seeded(lambda: Root(Crossing())).eval()
    context = TOKENS.flip(0)
    plain = model(TOKENS, context)
    tap = Tap(model, attend=lambda call: torch.zeros_like(call.query))
    assert torch.equal(model(TOKENS, context), plain)
    assert torch.equal(model(TOKENS), torch.zeros_like(TOKENS))
    tap.remove()
    tap = Tap(model, attend=lambda call: torch.zeros_like(call.query), cross=True)
    assert torch.equal(model(TOKENS, context), torch.zeros_like(TOKENS))
    tap.remove()


def test_every_block_of_a_nanogpt_is_captured_under_its_name():
    model = seeded(NanoGPT).train()
    ids = torch.arange(12).view(2, 6)
    records = records_of(model, ids)
    assert [record.name for record in records] == ["h.0.attn", "h.1.attn"]
    query, key, _ = (model.h[0].norm(model.wte(ids)) @ model.h[0].attn.c_attn.weight.T).split(E, -1)
    torch.testing.assert_close(records[0].query, heads(query, H))
    torch.testing.assert_close(records[0].key, heads(key, H))


def test_eval_outputs_are_bit_identical_and_no_mode_is_entered():
    model = seeded(NanoGPT).eval()
    ids, depth = torch.arange(12).view(2, 6), []
    model.head.register_forward_hook(lambda *_: depth.append(functions_on_the_stack()))
    plain, before = model(ids), traces(model)
    tap = Tap(model, watch=lambda _: pytest.fail("recorded in eval mode"))
    assert torch.equal(model(ids), plain)
    tap.remove()
    assert torch.equal(model(ids), plain)
    assert depth == [0, 0, 0] and traces(model) == before


@pytest.mark.parametrize("attend", [None, lambda call: call.proceed()])
def test_forward_that_raises_leaves_no_mode_and_works_afterwards(attend):
    model = seeded(NanoGPT).train()
    ids, records = torch.arange(12).view(2, 6), []
    tap = Tap(model, watch=records.append, attend=attend)
    with pytest.raises(ValueError, match="half way"):
        model(ids, fail=True)
    assert functions_on_the_stack() == 0
    records.clear()
    model(ids)
    tap.remove()
    assert [(record.name, record.call) for record in records] == [("h.0.attn", 0), ("h.1.attn", 0)]
    assert functions_on_the_stack() == 0


def test_pre_hook_that_raises_leaves_no_mode():
    model = seeded(NanoGPT).train()
    tap = Tap(model, watch=lambda _: None)
    broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.arange(12).view(2, 6))
    assert functions_on_the_stack() == 0
    broken.remove()
    model(torch.arange(12).view(2, 6))
    tap.remove()


def test_the_attention_itself_may_be_the_model():
    model = seeded(Crossing).train()
    before, records = traces(model), []
    tap = Tap(model, watch=records.append)
    model(TOKENS)
    model(TOKENS, TOKENS.flip(0))
    tap.remove()
    assert len(records) == 1
    assert traces(model) == before


def test_two_attentions_in_one_call_are_two_records():
    model = seeded(lambda: Root(models.Twice())).train()
    records = records_of(model, TOKENS)
    assert [(record.name, record.call) for record in records] == [("attention", 0), ("attention", 1)]
    torch.testing.assert_close(records[1].query[:, 0], project(TOKENS, model.attention.q_proj)[..., E // 2 :])
