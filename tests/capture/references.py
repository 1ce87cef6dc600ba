"""Attention written out from the weights of a module, knowing nothing of taps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny
import torch
from torch import Tensor, nn


def heads(tokens: Tensor, count: int) -> Tensor:
    """[b, n, h*d] as [b, h, n, d]."""
    return torch.stack(tokens.chunk(count, -1), 1)


def merged(tokens: Tensor) -> Tensor:
    """[b, h, n, d] as [b, n, h*d]."""
    return torch.cat(list(tokens.unbind(1)), -1)


def linear(tokens: Tensor, module: nn.Module) -> Tensor:
    product = tokens @ module.weight.T
    return product if module.bias is None else product + module.bias


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, allowed: Tensor, bias: Tensor | float = 0.0
) -> Tensor:
    """softmax(q kᵀ · scale + bias) v over allowed [b, 1, n, m]; each key head serves a run of query heads."""
    shared, gathered = query.shape[1] // key.shape[1], query.shape[1] // value.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        logits = query[:, head] @ key[:, head // shared].transpose(1, 2) * scale
        logits = logits + (bias[:, head] if isinstance(bias, Tensor) else bias)
        logits = torch.where(allowed[:, 0], logits, -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True).clamp_min(-1e30))
        weights = weights / weights.sum(-1, keepdim=True)
        outputs.append(weights @ value[:, head // gathered])
    return torch.stack(outputs, 1)


def rotary(tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Pairs (i, i + d/2) as complex numbers, turned by position · 10000^(-2i/d)."""
    half = tokens.shape[-1] // 2
    positions = torch.arange(tokens.shape[2]) if positions is None else positions
    angle = positions[..., None].float() * 10000.0 ** (-torch.arange(half) / half)  # (n, d/2)
    turned = torch.complex(tokens[..., :half], tokens[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def rms(tokens: Tensor, norm: nn.Module) -> Tensor:
    return tokens / torch.sqrt(tokens.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


@dataclass(frozen=True)
class Family:
    build: Callable[..., nn.Module]
    attentions: tuple[str, ...]  # of the self-attentions
    project: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor, Tensor]]  # q, k, v from the module's input
    finish: Callable[[nn.Module, Tensor], Tensor] = lambda _, tokens: tokens  # what the module does after attention
    scale: float = 0.5  # heads are 4 wide
    causal: bool = False
    decoder: bool = False  # takes decoder_input_ids
    bias: Callable[[nn.Module, str, int], Tensor | float] = lambda *_: 0.0


def _separate(*names: str) -> Callable[[nn.Module, Tensor], tuple[Tensor, ...]]:
    def project(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
        return tuple(heads(linear(hidden, getattr(module, name)), 4) for name in names)

    return project


def _gpt2(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    parts = (hidden @ module.c_attn.weight + module.c_attn.bias).split(16, -1)
    return tuple(heads(part, 4) for part in parts)


def _llama(module: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    query, key, value = (
        heads(linear(hidden, getattr(module, f"{s}_proj")), c) for s, c in (("q", 4), ("k", 2), ("v", 2))
    )
    return rotary(query), rotary(key), value


def _t5_bias(model: nn.Module, name: str, length: int) -> Tensor:
    """Only the first block of each stack has the embedding; the buckets of short distances are the distances."""
    side = name.split(".")[0]
    table = model.get_submodule(f"{side}.block.0.layer.0.SelfAttention").relative_attention_bias.weight
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]  # key - query
    assert length <= 8  # buckets: 8 exact ones behind, and for the encoder 16 more for keys ahead
    bucket = -distance if side == "decoder" else distance.abs() + 16 * (distance > 0)
    return table[bucket.clamp_min(0)].permute(2, 0, 1)[None]


T5 = ("encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention")
FAMILIES = {
    "bert": Family(
        tiny.bert,
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"),
        _separate("query", "key", "value"),
    ),
    "gpt2": Family(
        tiny.gpt2, ("h.0.attn", "h.1.attn"), _gpt2, lambda m, t: t @ m.c_proj.weight + m.c_proj.bias, causal=True
    ),
    "llama": Family(
        tiny.llama,
        ("layers.0.self_attn", "layers.1.self_attn"),
        _llama,
        lambda m, t: linear(t, m.o_proj),
        causal=True,
    ),
    "t5 encoder": Family(
        tiny.t5,
        T5,
        _separate("q", "k", "v"),
        lambda m, t: linear(t, m.o),
        scale=1.0,
        decoder=True,
        bias=_t5_bias,
    ),
    "t5 decoder": Family(
        tiny.t5,
        tuple(name.replace("encoder", "decoder") for name in T5),
        _separate("q", "k", "v"),
        lambda m, t: linear(t, m.o),
        scale=1.0,
        decoder=True,
        causal=True,
        bias=_t5_bias,
    ),
    "bart encoder": Family(
        tiny.bart,
        ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn"),
        _separate("q_proj", "k_proj", "v_proj"),
        lambda m, t: linear(t, m.out_proj),
        decoder=True,
    ),
    "bart decoder": Family(
        tiny.bart,
        ("decoder.layers.0.self_attn", "decoder.layers.1.self_attn"),
        _separate("q_proj", "k_proj", "v_proj"),
        lambda m, t: linear(t, m.out_proj),
        decoder=True,
        causal=True,
    ),
    "mpnet": Family(
        tiny.mpnet,
        ("encoder.layer.0.attention.attn", "encoder.layer.1.attention.attn"),
        _separate("q", "k", "v"),
        lambda m, t: linear(t, m.o),
        bias=lambda model, _, length: model.encoder.compute_position_bias(torch.zeros(1, length, 16)),
    ),
    "deberta": Family(
        tiny.deberta,
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"),
        _separate("query_proj", "key_proj", "value_proj"),
    ),
}
INTERFACE = [name for name in FAMILIES if name not in ("mpnet", "deberta")]


def layer_output(
    family: Family, model: nn.Module, name: str, query: Tensor, key: Tensor, seen: Any, keys: Tensor
) -> Tensor:
    """The output of the self-attention module `name`, from given q and k and all else from its weights."""
    module = model.get_submodule(name)
    length = query.shape[2]
    allowed = keys[:, None, None, :].expand(-1, 1, length, -1)
    if family.causal:
        allowed = allowed & torch.ones(length, length, dtype=torch.bool).tril()
    value = family.project(module, seen.hidden)[2]
    bias = family.bias(model, name, length)
    return family.finish(module, merged(softmax_attention(query, key, value, family.scale, allowed, bias)))
