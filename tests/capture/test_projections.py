"""generator="projections": the alignment's gradient reaches what makes queries and keys, and nothing before it.

The reference recomputes q and k from the detached input of each attention module, and differentiates the same loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sdpa_models
import tiny
import torch
import torch.nn.functional as F
from references import FAMILIES, heads, linear, rms, rotary
from tiny import Seen, observed, padded_batch, seeded, valid_tokens
from torch import Tensor, nn

import alignattn
from alignattn.errors import CaptureError, UnsupportedModelError
from alignattn.functional import mmd

PLAIN = {"preset": "paper", "reduction": "mean", "generator": "projections"}  # the method as it is written
WEIGHT = 0.3
IDS = torch.arange(12).view(2, 6)
TOKENS = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: dict[str, Any]
    attentions: tuple[str, ...]
    pairs: Callable[[nn.Module, Seen], Pairs]  # q and k of an attention module from its input
    moved: tuple[str, ...]  # the parameters of an attention module that are meant
    valid: Tensor | None = None


def of_family(name: str, *moved: str) -> Case:
    family = FAMILIES[name]
    implementation = "eager" if name in ("mpnet", "deberta") else "sdpa"
    return Case(
        lambda: family.build(implementation),
        padded_batch("right", decoder=family.decoder),
        family.attentions,
        lambda module, seen: [family.project(module, seen.hidden)[:2]],
        moved,
        valid_tokens("right"),
    )


def _qwen3(module: nn.Module, seen: Seen) -> Pairs:
    query, key = heads(linear(seen.hidden, module.q_proj), 4), heads(linear(seen.hidden, module.k_proj), 2)
    return [(rotary(rms(query, module.q_norm)), rotary(rms(key, module.k_norm)))]


def _multihead(module: nn.MultiheadAttention, seen: Seen) -> Pairs:
    projected = (seen.hidden @ module.in_proj_weight.T + module.in_proj_bias).split(16, -1)
    return [(heads(projected[0], 4), heads(projected[1], 4))]


def _nanogpt(module: nn.Module, seen: Seen) -> Pairs:
    projected = linear(seen.hidden, module.c_attn).split(16, -1)
    return [(heads(projected[0], 4), heads(projected[1], 4))]


def _twice(module: nn.Module, seen: Seen) -> Pairs:
    query, key = linear(seen.hidden, module.q_proj), linear(seen.hidden, module.k_proj)
    return [(query[:, None, :, half], key[:, None, :, half]) for half in (slice(0, 8), slice(8, 16))]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return seeded(lambda: nn.TransformerEncoder(layer, 2))


def _with_bias(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.{part}" for name in names for part in ("weight", "bias"))


PADDED = {"src": TOKENS, "src_key_padding_mask": ~valid_tokens("left")}
CASES = {
    "bert": of_family("bert", *_with_bias("query", "key")),
    "gpt2": of_family("gpt2", *_with_bias("c_attn")),
    "llama": of_family("llama", "q_proj.weight", "k_proj.weight"),
    "mpnet": of_family("mpnet", *_with_bias("q", "k")),
    "deberta": of_family("deberta", *_with_bias("query_proj", "key_proj")),
    "qwen3": Case(
        tiny.qwen3,
        padded_batch("right"),
        FAMILIES["llama"].attentions,
        _qwen3,
        ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"),
        valid_tokens("right"),
    ),
    "multihead": Case(
        _encoder,
        PADDED,
        ("layers.0.self_attn", "layers.1.self_attn"),
        _multihead,
        ("in_proj_weight", "in_proj_bias"),
        valid_tokens("left"),
    ),
    "nanogpt": Case(
        lambda: seeded(sdpa_models.NanoGPT), {"ids": IDS}, ("h.0.attn", "h.1.attn"), _nanogpt, ("c_attn.weight",)
    ),
    "two attentions of one pair": Case(
        lambda: seeded(lambda: nn.Sequential(sdpa_models.Twice(), sdpa_models.Twice())),
        {"input": TOKENS},
        ("0", "1"),
        _twice,
        _with_bias("q_proj", "k_proj"),
    ),
}
every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])


def expand_heads(query: Tensor, key: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def reference(case: Case, model: nn.Module, seen: dict[str, Seen]) -> Tensor:
    losses = []
    for name in case.attentions:
        for query, key in case.pairs(model.get_submodule(name), seen[name]):
            key = expand_heads(query, key)
            losses.append(mmd(query, key, query_mask=case.valid, key_mask=case.valid).mean())
    return WEIGHT * sum(losses) / len(losses)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


@every_case
def test_term_and_gradient_are_those_of_q_and_k_from_the_detached_input(case):
    model = case.build().train()
    alignment = alignattn.align(model, "mmd", WEIGHT, **PLAIN)
    with observed(model, list(case.attentions)) as seen:
        model(**case.batch)
    term = alignment.loss()
    term.backward()
    gradients = gradients_of(model)
    alignment.detach()
    model.zero_grad()
    expected = reference(case, model, seen)
    expected.backward()
    torch.testing.assert_close(term, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-3, atol=1e-6)
    assert set(gradients) <= {f"{name}.{part}" for name in case.attentions for part in case.moved}
    assert all(f"{name}.{part}" in gradients for name in case.attentions for part in case.moved if "weight" in part)


@every_case
def test_gradient_adds_to_that_of_the_task(case):
    model = case.build().train()

    def gradients(*, task: bool, align: bool) -> dict[str, Tensor]:
        model.zero_grad()
        alignment = alignattn.align(model, "mmd", WEIGHT, **PLAIN) if align else None
        output = model(**case.batch)
        loss = (output if isinstance(output, Tensor) else output[0]).square().mean() * task
        (loss if alignment is None else loss + alignment.loss()).backward()
        if alignment is not None:
            alignment.detach()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    of_task, of_both = gradients(task=True, align=False), gradients(task=True, align=True)
    alone = gradients(task=False, align=True)
    for name, gradient in of_both.items():
        expected = of_task[name] + alone.get(name, 0)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "qwen3", "deberta"])
def test_gradient_checkpointing_changes_no_gradient(name):
    case = CASES[name]
    model = case.build().train()
    alignment = alignattn.align(model, "mmd", WEIGHT, **PLAIN)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        (model(**case.batch)[0].square().mean() + alignment.loss()).backward()
        found.append(gradients_of(model))
    alignment.detach()
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("method", ["mmd", "ct"])
@every_case
def test_outputs_and_global_random_state_are_the_plain_models(case, method):
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    ends = []
    for aligned in (False, True):
        alignment = alignattn.align(model, method, generator="projections") if aligned else None
        torch.manual_seed(3)
        output = model(**case.batch)
        output = output if isinstance(output, Tensor) else output[0]
        loss = output.square().mean()
        (loss if alignment is None else loss + alignment.loss()).backward()
        ends.append((output.detach(), torch.get_rng_state()))
        if alignment is not None:
            alignment.detach()
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


def test_layer_that_runs_three_times_gets_the_gradient_of_each_call_and_nothing_through_them():
    model = tiny.bert().train()
    model.encoder.layer = nn.ModuleList([model.encoder.layer[0]] * 3)
    attention, inputs = model.encoder.layer[0].attention.self, []
    attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    alignment = alignattn.align(model, "mmd", WEIGHT, **PLAIN)
    model(**padded_batch(None))
    alignment.loss().backward()
    alignment.detach()
    gradients = gradients_of(model)
    model.zero_grad()
    pairs = (FAMILIES["bert"].project(attention, hidden)[:2] for hidden in inputs[:3])
    (WEIGHT * sum(mmd(query, key).mean() for query, key in pairs) / 3).backward()
    torch.testing.assert_close(gradients, gradients_of(model), rtol=1e-3, atol=1e-6)


def test_frozen_projection_is_left_where_it_is():
    model = tiny.bert().train()
    for layer in model.encoder.layer:
        layer.attention.self.key.requires_grad_(False)
    alignment = alignattn.align(model, "mmd", generator="projections")
    model(**padded_batch(None))
    alignment.loss().backward()
    alignment.detach()
    names = {n for n in gradients_of(model) if n.endswith("weight")}
    assert names == {f"encoder.layer.{i}.attention.self.query.weight" for i in range(2)}


class Unhooked(sdpa_models.Attention):
    """Has projections, and uses their weights behind their back."""

    def forward(self, tokens: Tensor) -> Tensor:
        query, key = (F.linear(tokens, p.weight, p.bias)[:, None] for p in (self.q_proj, self.k_proj))
        return F.scaled_dot_product_attention(query, key, tokens[:, None])[:, 0]


def test_projections_that_were_not_called_are_an_error_and_no_leak():
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 16), Unhooked())).train()
    alignment = alignattn.align(model, "mmd", generator="projections")
    model(TOKENS)
    with pytest.raises(CaptureError, match=r"projections of 1 were not called as modules.*generator='model'"):
        alignment.loss()
    alignment.detach()
    alignment = alignattn.align(model, "mmd", generator="model")
    model(TOKENS)
    alignment.loss().backward()
    alignment.detach()
    assert model[0].weight.grad.abs().sum() > 0


def test_projections_that_cannot_be_told_are_refused_without_trace():
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha, self.beta = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.alpha(tokens), self.beta(tokens), tokens)

    model = nn.Sequential(Strange())
    before = tiny.traces(model)
    with pytest.raises(UnsupportedModelError, match=r"0 \(Strange\).*children \(alpha, beta\).*generator='model'"):
        alignattn.align(model, generator="projections")
    assert tiny.traces(model) == before
    alignattn.align(model, generator="model").detach()
