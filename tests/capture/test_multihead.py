"""nn.MultiheadAttention by itself: what is recomputed from its weights is what it uses, however it is called."""

from typing import Any

import pytest
import torch
from references import heads, merged
from tiny import records_of, seeded, traces
from torch import Tensor, nn

from alignattn.capture import AttentionCall, Tap

B, H, N, M, E = 3, 4, 5, 6, 16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": 10, "vdim": 12},
    "kdim, no bias": {"kdim": 10, "bias": False},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "both additions": {"add_bias_kv": True, "add_zero_attn": True},
}
LAYOUTS = ["batch first", "batch second", "unbatched"]
MASKS = ["none", "bool padding", "float padding", "bool attn", "float attn", "attn of each head", "padding and attn"]

CASES = [(kind, layout, "padding and attn") for kind in KINDS for layout in LAYOUTS]
CASES += [("plain", layout, mask) for layout in LAYOUTS for mask in MASKS[:-1]]
CASES += [("both additions", "batch second", mask) for mask in MASKS[:-1]]

every_case = pytest.mark.parametrize(("kind", "layout", "mask"), CASES)
with_and_without_weights = pytest.mark.parametrize("need_weights", [True, False])


class Holder(nn.Module):
    """A model with one attention; cross when it is given other tokens."""

    def __init__(self, kind: str, layout: str) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=layout == "batch first", **KINDS[kind])

    def forward(self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **how: Any) -> Tensor:
        key = query if key is None else key
        return self.attention(query, key, key if value is None else value, **how)[0]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def laid_out(tokens: Tensor, layout: str) -> Tensor:
    """From [b, n, e] to what the module takes; unbatched is the first sample."""
    return {"batch first": tokens, "batch second": tokens.transpose(0, 1), "unbatched": tokens[0]}[layout]


def masks_of(mask: str, layout: str, n: int, m: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The arguments, the bias they mean as [b, h, n, m], and which keys are valid."""
    b = 1 if layout == "unbatched" else B
    lengths = torch.tensor([m - 2, m, m - 1])[:b]
    hidden = torch.arange(m) >= lengths[:, None]  # (b, m)
    causal = torch.arange(m) > torch.arange(n)[:, None] + m - n  # (n, m), every key is seen by some query
    per_head = (random(b * H, n, m, seed=7) > 0.7).index_fill(2, torch.tensor(0), False)
    per_head[:, 0] = False
    arguments: dict[str, Tensor] = {}
    bias = torch.zeros(b, H, n, m)
    if mask in ("bool padding", "padding and attn"):
        arguments["key_padding_mask"] = hidden
    if mask == "float padding":
        arguments["key_padding_mask"] = torch.zeros(b, m).masked_fill(hidden, -torch.inf)
    if "padding" in mask:
        bias = bias.masked_fill(hidden[:, None, None], -torch.inf)
    if mask in ("bool attn", "padding and attn"):
        arguments["attn_mask"] = causal
        bias = bias.masked_fill(causal, -torch.inf)
    if mask == "float attn":
        arguments["attn_mask"] = random(n, m, seed=3)
        bias = bias + arguments["attn_mask"]
    if mask == "attn of each head":
        arguments["attn_mask"] = per_head
        bias = bias.masked_fill(per_head.view(b, H, n, m), -torch.inf)
    if layout == "unbatched" and "key_padding_mask" in arguments:
        arguments["key_padding_mask"] = arguments["key_padding_mask"][0]
    return arguments, bias, ~hidden if "padding" in mask else torch.ones(b, m, dtype=torch.bool)


def weights_of(module: nn.MultiheadAttention) -> list[Tensor]:
    if module.in_proj_weight is not None:
        return [module.in_proj_weight[i * E : (i + 1) * E] for i in range(3)]
    return [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]


def by_hand(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of [b, n, e] inputs, with the tokens that the module adds."""
    biases = [0.0] * 3 if module.in_proj_bias is None else module.in_proj_bias.split(E)
    q, k, v = (t @ w.T + b for t, w, b in zip((query, key, value), weights_of(module), biases, strict=True))
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.repeat(len(k), 1, 1)], 1)
        v = torch.cat([v, module.bias_v.repeat(len(v), 1, 1)], 1)
    q, k, v = heads(q, H), heads(k, H), heads(v, H)
    if module.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros(len(t), H, 1, E // H)], 2) for t in (k, v))
    return q, k, v


def output_by_hand(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias = torch.cat(
        [bias, torch.zeros(*bias.shape[:3], k.shape[2] - bias.shape[3])], 3
    )  # added tokens are seen by all
    weights = torch.exp(q @ k.transpose(2, 3) / (E // H) ** 0.5 + bias)
    attended = weights / weights.sum(-1, keepdim=True) @ v
    product = merged(attended) @ module.out_proj.weight.T
    return product if module.out_proj.bias is None else product + module.out_proj.bias


def inputs_of(kind: str) -> tuple[Tensor, ...]:
    """Query, and for kinds that need other tokens key and value, as [b, n, e]."""
    if "kdim" not in KINDS[kind]:
        return (random(B, N, E),)
    return random(B, N, E), random(B, M, KINDS[kind]["kdim"], seed=1), random(B, M, KINDS[kind].get("vdim", E), seed=2)


@every_case
@with_and_without_weights
def test_attention_of_the_captured_q_and_k_is_the_modules_output(kind, layout, mask, need_weights):
    model = seeded(lambda: Holder(kind, layout)).train()
    tokens = inputs_of(kind)
    samples = slice(0, 1) if layout == "unbatched" else slice(None)
    rest, bias, valid = masks_of(mask, layout, N, N if len(tokens) == 1 else M)
    records = []
    tap = Tap(model, watch=records.append, cross=True)
    output = model(*(laid_out(t, layout) for t in tokens), need_weights=need_weights, **rest)
    tap.remove()
    (record,) = records
    q, k, v = by_hand(model.attention, *(t[samples] for t in (tokens * 3 if len(tokens) == 1 else tokens)))
    torch.testing.assert_close(record.query, q)
    torch.testing.assert_close(record.key, k)
    expected = output_by_hand(model.attention, record.query, record.key, v, bias)
    torch.testing.assert_close(output, laid_out(expected, layout), rtol=1e-4, atol=1e-5)
    added = torch.ones(len(valid), k.shape[2] - valid.shape[1], dtype=torch.bool)
    assert torch.equal(torch.cat([valid, added], 1), all_true(k) if record.key_mask is None else record.key_mask)
    if len(tokens) == 1:
        assert torch.equal(valid, all_true(q) if record.query_mask is None else record.query_mask)


def all_true(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape[0], tokens.shape[2], dtype=torch.bool)


@every_case
def test_stand_in_can_do_what_the_module_would(kind, layout, mask):
    model = seeded(lambda: Holder(kind, layout)).eval()
    tokens = [laid_out(t, layout) for t in inputs_of(kind)]
    rest, _, _ = masks_of(mask, layout, N, N if len(tokens) == 1 else M)
    plain = model(*tokens, **rest)

    def attend(call: AttentionCall) -> Tensor:
        soft = call.attend(call.weights())
        torch.testing.assert_close(soft, call.proceed(), rtol=1e-4, atol=1e-5)
        return soft

    before = traces(model)
    tap = Tap(model, attend=attend, cross=True)
    standing_in = model(*tokens, **rest)
    tap.remove()
    torch.testing.assert_close(standing_in, plain, rtol=1e-4, atol=1e-5)
    assert traces(model) == before


def test_stand_in_decides_the_output_and_leaves_the_weights():
    model = seeded(lambda: Holder("plain", "batch first")).eval()
    tokens, outputs = random(B, N, E), []
    model.attention.register_forward_hook(lambda module, args, output: outputs.append(output))
    model(tokens)
    tap = Tap(model, attend=lambda call: torch.full_like(call.query, 3.0))
    replaced = model(tokens)
    tap.remove()
    expected = model.attention.out_proj(torch.full((B, N, E), 3.0))
    assert torch.equal(replaced, expected) and torch.equal(outputs[1][1], outputs[0][1])


def test_cross_attention_is_left_alone_unless_asked_for():
    model = seeded(lambda: Holder("plain", "batch first")).train()
    query, key = random(B, N, E), random(B, N, E, seed=1)
    assert records_of(model, query, key) == []
    (record,) = records_of(model, query, key, tap={"cross": True})
    assert record.query_mask is None
    stood_in = []
    tap = Tap(model, attend=lambda call: stood_in.append(call) or call.proceed())
    model(query, key)
    assert not stood_in
    model(query)
    tap.remove()
    assert len(stood_in) == 1


@pytest.mark.parametrize("training", [True, False])
def test_the_attention_itself_may_be_the_model(training):
    module = seeded(lambda: nn.MultiheadAttention(E, H, batch_first=True)).train(training)
    before, tokens, records = traces(module), random(B, N, E), []
    tap = Tap(module, watch=records.append)
    module.train()
    module(tokens, tokens, tokens)
    module.eval()
    plain = module(tokens, tokens, tokens)[0]
    module.train()(tokens, tokens, tokens)
    assert len(records) == 2
    tap.remove()
    module.eval()
    assert torch.equal(module(tokens, tokens, tokens)[0], plain)
    assert traces(module.train(training)) == before


def test_record_carries_the_gradient_to_both_halves_of_the_projection():
    model = seeded(lambda: Holder("plain", "batch first")).train()
    (record,) = records_of(model, random(B, N, E))
    (record.query.square().sum() + record.key.square().sum()).backward()
    of_query, of_key, of_value = model.attention.in_proj_weight.grad.split(E)
    assert of_query.abs().sum() > 0 and of_key.abs().sum() > 0 and of_value.abs().sum() == 0
