"""torch.nn.MultiheadAttention, and what is built of it.

It keeps its queries and keys in local variables, and with `need_weights=True` it does not even call
scaled_dot_product_attention. So they are computed once more, from its weights, when it is called. Hooks would switch
off the fused eval path of nn.TransformerEncoder and change its result by a rounding: they are there for forward
passes that are recorded and for no others.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from alignattn.capture.attending import Attending
from alignattn.capture.hook import Hook, in_backward
from alignattn.capture.querykey import AttentionCall, Projected, QueryKey, Source, valid_keys
from alignattn.capture.site import Site, Socket
from alignattn.capture.standin import is_kept_for_backward

if TYPE_CHECKING:
    from alignattn.capture.tap import Tap

ARGUMENTS = (
    "query",
    "key",
    "value",
    "key_padding_mask",
    "need_weights",
    "attn_mask",
    "average_attn_weights",
    "is_causal",
)


class MultiheadSocket(Socket):
    """Recomputes queries and keys; stands in by replacing the output."""

    kind = "nn.MultiheadAttention"

    @classmethod
    def find(cls, model: nn.Module) -> list[Site]:
        return [
            Site(name, module, cls.kind, module.num_heads, module.head_dim)
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)
        ]

    def __init__(self, tap: "Tap", sites: Sequence[Site]) -> None:
        super().__init__(tap, sites)
        self.hooked: dict[nn.Module, list[RemovableHandle]] = {}
        self.fast_path: bool | None = None  # as it was, while we have switched it off
        for module in self.sites:
            if module.training or module is tap.model:
                self._hook(module)

    def open(self) -> None:
        every = self.tap.always or self.tap.attend is not None
        for module in self.sites:
            if module.training or every:
                self._hook(module)
            else:  # a frozen part keeps its fused path
                self._unhook(module)
        if not all(module.training for module in self.hooked) and self.fast_path is None:
            # An encoder in eval mode hands its layers nested tensors, which they can take on their fused path alone.
            self.fast_path = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)

    def close(self) -> None:
        if self.fast_path is not None:
            torch.backends.mha.set_fastpath_enabled(self.fast_path)
            self.fast_path = None

    def idle(self) -> None:
        for module in self.sites:
            self._unhook(module)

    def remove(self) -> None:
        for module in self.sites:
            for handle in self.hooked.pop(module, ()):
                handle.remove()

    def _hook(self, module: nn.Module) -> None:
        if module in self.hooked:
            return
        self.hooked[module] = [module.register_forward_pre_hook(Hook(self._before), with_kwargs=True)]
        if self.tap.attend is not None:
            self.hooked[module].append(module.register_forward_hook(Hook(self._after), with_kwargs=True))

    def _unhook(self, module: nn.Module) -> None:
        if module is self.tap.model:  # it is called already when a forward pass opens: too late to come back
            return
        for handle in self.hooked.pop(module, ()):
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        recorded = self.tap.records_from(module)
        again = in_backward() and module.training and torch.is_grad_enabled() and not self.tap.keeps_nothing
        if not recorded and not again:
            return
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        cross = given["key"] is not given["query"]
        if cross and not self.tap.cross:
            return
        inputs = _batched(module, given["query"]), _batched(module, given["key"])
        if self.tap.projections:
            inputs = inputs[0].detach(), inputs[1].detach()
        if not recorded:  # a checkpointed layer must save the same tensors when it is computed again
            _project(module, inputs[0], 0), _project(module, inputs[1], 1)
            return
        if not self.tap.keeps_nothing:
            self._take(module, *inputs, given)
            return
        # The copies are nobody's but ours, and would be kept for the backward: it computes them again.
        once = [given]

        def take(of_query: Tensor, of_key: Tensor) -> None:
            self._take(module, of_query, of_key, once.pop() if once else None)

        checkpoint(take, *inputs, use_reentrant=False, preserve_rng_state=False)

    def _take(
        self, module: nn.MultiheadAttention, of_query: Tensor, of_key: Tensor, given: dict[str, Any] | None
    ) -> None:
        """Hand one call over; without what it was given, and so without masks, where it was handed over before."""
        query, key = _project(module, of_query, 0), _project(module, of_key, 1)
        bias = None if given is None else _bias(given, query, key)
        key_mask = valid_keys(bias, key.shape[0], key.shape[2])
        cross = given is None or given["key"] is not given["query"]
        query_mask = None if cross or key_mask is None else key_mask[:, : query.shape[2]]
        self.tap.take(
            QueryKey(
                query=query,
                key=key,
                query_mask=query_mask,
                key_mask=key_mask,
                name=self.sites[module].name,
                # From a detached input, they are their own twins.
                projected=(Projected(query, query), Projected(key, key)) if self.tap.projections else (),
                query_source=_source(module, of_query, 0),
                key_source=_source(module, of_key, 1),
                attending=Attending(module.head_dim**-0.5, bias) if self.tap.attending else None,
                kept=is_kept_for_backward(),
            )
        )

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert isinstance(module, nn.MultiheadAttention)
        if module not in self.sites or self.tap.attend is None:
            return None
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        if given["key"] is not given["query"] and not self.tap.cross:
            return None
        query, key, value = (_project(module, _batched(module, given[s]), i) for i, s in enumerate(ARGUMENTS[:3]))
        call = AttentionCall(
            module=module,
            query=query,
            key=key,
            value=value,
            scale=module.head_dim**-0.5,
            bias=_bias(given, query, key),
            dropout=module.dropout if module.training else 0.0,
            proceed=lambda: _heads_of_output(module, given, query, key, value),
        )
        merged = self.tap.attend(call).transpose(1, 2).flatten(2)  # (b, n, h*d)
        merged = module.out_proj(merged)
        if given["query"].ndim == 2:
            return merged[0], output[1]
        return (merged if module.batch_first else merged.transpose(0, 1)), output[1]


def _batched(module: nn.MultiheadAttention, tokens: Tensor) -> Tensor:
    """[b, n, e] from whichever order of axes the module is set to, or from one unbatched sequence."""
    if tokens.ndim == 2:
        return tokens[None]
    return tokens if module.batch_first else tokens.transpose(0, 1)


def _project(module: nn.MultiheadAttention, tokens: Tensor, part: int) -> Tensor:
    """Queries, keys or values (part 0, 1, 2) as [b, h, n, d], with the extra tokens that keys and values may have."""
    if module._qkv_same_embed_dim:
        weight = module.in_proj_weight.chunk(3)[part]
    else:
        weight = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)[part]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[part]
    projected = F.linear(tokens, weight, bias)
    extra = (None, module.bias_k, module.bias_v)[part]
    if extra is not None:
        projected = torch.cat([projected, extra.expand(len(projected), 1, -1).to(projected.dtype)], 1)
    heads = projected.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
    return F.pad(heads, (0, 0, 0, 1)) if part and module.add_zero_attn else heads


def _source(module: nn.MultiheadAttention, tokens: Tensor, part: int) -> Source:
    if module._qkv_same_embed_dim:
        return Source(module.in_proj_weight, part * module.embed_dim, tokens.detach())
    return Source((module.q_proj_weight, module.k_proj_weight)[part], 0, tokens.detach())


def _bias(given: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    samples, heads, n, _ = query.shape
    total: Tensor | None = None
    padding, attention = given.get("key_padding_mask"), given.get("attn_mask")
    if padding is not None:
        total = _hidden_as_bias(padding, query).view(samples, 1, 1, -1)
    if attention is not None:
        attention = _hidden_as_bias(attention, query)
        if attention.ndim == 3:
            attention = attention.view(samples, heads, n, -1)
        total = attention if total is None else total + attention
    if total is None:
        return None
    return F.pad(total, (0, key.shape[2] - total.shape[-1]))


def _hidden_as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """These masks are True where attention may *not* go."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _heads_of_output(
    module: nn.MultiheadAttention, given: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Soft attention of the same inputs before the output projection, which hides it from outside."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_bias(given, query, key),
        dropout_p=module.dropout if module.training else 0.0,
    )
