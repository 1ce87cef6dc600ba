"""Models that call scaled_dot_product_attention in all the ways people write it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa

E, H = 16, 4


def helper(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    return _inner_helper(query, key, value, how)


def _inner_helper(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, **how)


class Attention(nn.Module):
    """Subclasses say how the function is reached; `how` is handed to it."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(E, E) for _ in range(4))
        self.how = how

    def heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (H, -1)).transpose(-3, -2)

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        query, key, value = (self.heads(p(tokens)) for p in (self.q_proj, self.k_proj, self.v_proj))
        attended = self.reach(query, key, value, **(self.how | how))
        return self.out(attended.transpose(-3, -2).flatten(-2))


class Direct(Attention):
    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **how)


class ByKeyword(Attention):
    def reach(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        return functional.scaled_dot_product_attention(key=key, value=value, query=query, **how)


class Positional(Attention):
    def reach(self, *args: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*args, attn_mask, 0.0, is_causal)


class Helped(Attention):
    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return helper(*args, **how)


class Aliased(Attention):
    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return sdpa(*args, **how)


class StoredFunction(Attention):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.kernel = F.scaled_dot_product_attention

    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return self.kernel(*args, **how)


class StoredModule(Attention):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.functional = F

    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return self.functional.scaled_dot_product_attention(*args, **how)


class Static(Attention):
    @staticmethod
    def reach(*args: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **how)


class Inherited(Direct):
    pass


WAYS = [Direct, ByKeyword, Positional, Helped, Aliased, StoredFunction, StoredModule, Static, Inherited]


class Grouped(Attention):
    """Two key heads for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(E, E // 2), nn.Linear(E, E // 2)

    def heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (-1, E // H)).transpose(-3, -2)

    def reach(self, *args: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, enable_gqa=True, **how)


class SingleHead(nn.Module):
    """Tokens without an axis for heads: [b, n, e], or [n, e]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(E, 8), nn.Linear(E, 8)

    def forward(self, tokens: Tensor, **how: Any) -> Tensor:
        return F.scaled_dot_product_attention(self.query(tokens), self.key(tokens), tokens, **how)


class Crossing(nn.Module):
    """Self-attention, or cross-attention when it is given a context."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(E, E) for _ in range(3))

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        context = tokens if context is None else context
        pairs = ((self.to_q, tokens), (self.to_k, context), (self.to_v, context))
        query, key, value = (project(t).unflatten(-1, (H, -1)).transpose(1, 2) for project, t in pairs)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Twice(nn.Module):
    """Two attentions a call from one pair of projections, as in differential attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, tokens: Tensor) -> Tensor:
        halves = zip(self.q_proj(tokens).chunk(2, -1), self.k_proj(tokens).chunk(2, -1), strict=True)
        first, second = (F.scaled_dot_product_attention(q[:, None], k[:, None], tokens[:, None]) for q, k in halves)
        return (first - 0.5 * second)[:, 0]


class Block(nn.Module):
    """As in nanoGPT: norm, fused projection, causal attention, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.LayerNorm(E), nn.Linear(E, 24), nn.GELU(), nn.Linear(24, E))

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attn(self.norm(tokens))
        return tokens + self.mlp(tokens)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E, bias=False), nn.Linear(E, E)
        self.n_head = H

    def forward(self, tokens: Tensor) -> Tensor:
        b, n, _ = tokens.shape
        q, k, v = (t.view(b, n, H, E // H).transpose(1, 2) for t in self.c_attn(tokens).split(E, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, n, E))


class NanoGPT(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(40, E)
        self.h = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(E, 40)

    def forward(self, ids: Tensor, *, fail: bool = False) -> Tensor:
        tokens = self.wte(ids)
        for block in self.h:
            tokens = block(tokens)
            if fail:
                raise ValueError("half way")
        return self.head(tokens)


class Root(nn.Module):
    """A model around one attention, whatever it is called with."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attention(*args, **kwargs)
