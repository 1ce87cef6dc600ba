"""Queries and keys as one tensor of tokens, and what a network makes of them as two again.

Where both lie in memory one behind the other, which is seen to, they are one tensor already, and so are their
gradients: nothing is copied, on the way there or back.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from alignattn.matching import scratch


def together(query: Float[Tensor, "l b h n d"], key: Float[Tensor, "l b h m d"]) -> Float[Tensor, "l t d"]:
    """Of each layer the queries, and then the keys."""
    tokens: Tensor = _Together.apply(query, key)
    return tokens


def parted(
    features: Float[Tensor, "l t e"], query: Float[Tensor, "l b h n d"], key: Float[Tensor, "l b h m d"]
) -> tuple[Float[Tensor, "lb h n e"], Float[Tensor, "lb h m e"]]:
    """What a network made of queries and keys together, each for itself."""
    of_query, of_key = _Parted.apply(features, query.shape, key.shape)
    return of_query, of_key


def room_for_both(query: Tensor, key: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Memory for tensors of these shapes, one behind the other."""
    both = scratch.empty((query.numel() + key.numel(),), query, dtype)
    split = both.split((query.numel(), key.numel()))
    return [part.view(side.shape) for part, side in zip(split, (query, key), strict=True)]


def joined(query: Float[Tensor, "l b h n e"], key: Float[Tensor, "l b h m e"]) -> Float[Tensor, "l t e"]:
    """Together, and autograd knows nothing of it; a view where they lie so."""
    sides = query.flatten(1, 3), key.flatten(1, 3)
    first, second = sides
    shape = len(first), first.shape[1] + second.shape[1], first.shape[2]
    if len(first) == 1 and first.is_contiguous() and second.is_contiguous() and _are_adjacent(first, second):
        return first.as_strided(shape, (shape[1] * shape[2], shape[2], 1))
    return torch.cat(sides, 1, out=scratch.empty(shape, first))


def parts(
    tokens: Float[Tensor, "l t e"], shapes: tuple[torch.Size, torch.Size]
) -> tuple[Float[Tensor, "l b h n e"], Float[Tensor, "l b h m e"]]:
    """Views of both, of queries and keys of these shapes."""
    of_query, of_key = tokens.split([shape[1:4].numel() for shape in shapes], 1)
    return of_query.unflatten(1, shapes[0][1:4]), of_key.unflatten(1, shapes[1][1:4])


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        ctx.shapes = query.shape, key.shape
        return joined(query, key)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, ...]:
        query, key = ctx.shapes
        return parts(outer[0], (query, key))


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, query: torch.Size, key: torch.Size) -> tuple[Tensor, ...]:
        ctx.layers = len(features)
        return tuple(side.flatten(0, 1) for side in parts(features, (query, key)))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        of_query, of_key = (side.unflatten(0, (ctx.layers, -1)) for side in outer)
        return together(of_query, of_key), None, None  # which may be differentiated in its turn


def _are_adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether the second begins in memory where the first ends."""
    behind = first.storage_offset() + first.numel() == second.storage_offset()
    return behind and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
