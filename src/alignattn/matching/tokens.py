"""What all matching methods do to queries and keys before their own mathematics.

Shapes are checked once; half precision is computed in fp32 with autocast off (log-sum-exp, distances and means over
hundreds of tokens lose their meaning in eight bits of mantissa); padded tokens are replaced by zeros *before* any
arithmetic, so that even NaN there reaches neither value nor gradient.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from alignattn.errors import ShapeError
from alignattn.matching import scratch

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` with autocast off on the device of its first tensor."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = (a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        device = next(tensors).device.type
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def check_pair(
    query: Tensor, key: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None, **_: object
) -> None:
    """Queries [b, h, n, d] and keys [b, h, m, d], masks bool [b, n] and [b, m]; n and m at least one."""
    for name, tensor in (("query", query), ("key", key)):
        if tensor.ndim != 4:
            raise ShapeError(f"{name} must be [b, h, tokens, d], got shape {tuple(tensor.shape)}.")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {tensor.dtype}.")
        if tensor.shape[2] == 0 or tensor.shape[0] == 0:
            raise ShapeError(f"{name} has no tokens or no samples: shape {tuple(tensor.shape)}.")
    if query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ShapeError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must agree in samples, heads and width "
            "([b, h, n, d] and [b, h, m, d])."
        )
    check_mask("query_mask", query_mask, query)
    check_mask("key_mask", key_mask, key)


def check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """A mask is None or boolean [b, tokens], True where the token is valid."""
    if mask is None:
        return
    expected = (tokens.shape[0], tokens.shape[2])
    if mask.dtype != torch.bool:
        raise ShapeError(f"{name} must be boolean with True = valid, got {mask.dtype}. Use mask.bool().")
    if tuple(mask.shape) != expected:
        raise ShapeError(f"{name} must be [b, tokens] = {expected}, got {tuple(mask.shape)}.")


def working(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 where that is what came in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def upcast(tensor: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In the precision that is computed in."""
    return tensor.to(working(tensor))


def blank_padding(tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h n d"]:
    """In working precision, zeros where the mask is False."""
    tokens = upcast(tokens)
    return tokens if mask is None else tokens.masked_fill(~mask[:, None, :, None], 0.0)


def cleared(
    tokens: Float[Tensor, "b h n d"], mask: Bool[Tensor, "b n"] | None, to: Tensor | None = None
) -> Float[Tensor, "b h n d"]:
    """What blank_padding gives, a tensor of its own that may be written into, and of which autograd knows nothing.

    Bits are cleared, which stops NaN as well: masked_fill was measured at seven times that on a CPU. It lies in `to`,
    or in memory that is used again.
    """
    dtype = working(tokens)
    to = scratch.empty(tokens.shape, tokens, dtype) if to is None else to
    if mask is None or tokens.dtype != dtype or torch.compiler.is_compiling():  # which knows no view as where to write
        return clear(to.copy_(tokens), mask)
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    torch.bitwise_and(tokens.view(bits), _bits(mask, bits), out=to.view(bits))
    return to


def clear(tokens: Float[Tensor, "*b h n d"], mask: Bool[Tensor, "*b n"] | None) -> Float[Tensor, "*b h n d"]:
    """The same, in place."""
    if mask is not None:
        bits = torch.int64 if tokens.dtype == torch.float64 else torch.int32
        tokens.view(bits).bitwise_and_(_bits(mask, bits))
    return tokens


def _bits(mask: Bool[Tensor, "*b n"], kind: torch.dtype) -> Int[Tensor, "*b 1 n 1"]:
    """All, or none."""
    return -mask[..., None, :, None].to(kind)


def told_apart(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The second, as a tensor of its own where code is compiled: one that is given twice cannot be traced."""
    return other.view_as(other) if other is not None and other is one and torch.compiler.is_compiling() else other


def masked_mean(values: Float[Tensor, "b h n"], mask: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h"]:
    """Mean over the valid tokens; zero where there are none."""
    if mask is None:
        return values.mean(-1)
    kept = values.masked_fill(~mask[:, None, :], 0.0)
    return kept.sum(-1) / mask.sum(-1).clamp_min(1)[:, None].to(values.dtype)


def samples_with_tokens(
    query_mask: Bool[Tensor, "*b n"] | None, key_mask: Bool[Tensor, "*b m"] | None
) -> Bool[Tensor, "*b"] | None:
    """Which samples have a valid token on both sides; None when nothing is masked and so all have."""
    alive = [mask.any(-1) for mask in (query_mask, key_mask) if mask is not None]
    if not alive:
        return None
    return alive[0] if len(alive) == 1 else alive[0] & alive[1]


def without_empty(
    query_mask: Bool[Tensor, "b n"] | None,
    key_mask: Bool[Tensor, "b m"] | None,
    *sides: tuple[Float[Tensor, "b h _ _"], bool],
) -> tuple[Bool[Tensor, "b n"] | None, Bool[Tensor, "b m"] | None, list[Tensor]]:
    """Padding blanked, and samples without a valid token on both sides made whole samples of zeros.

    Those are then computed like others, with no division by nothing, and set to zero at the end. `sides` are tokens,
    each with whether they are queries.
    """
    alive = samples_with_tokens(query_mask, key_mask)
    blanked = []
    for tokens, are_queries in sides:
        tokens = blank_padding(tokens, query_mask if are_queries else key_mask)
        blanked.append(tokens if alive is None else tokens.masked_fill(~alive[:, None, None, None], 0.0))
    if alive is not None:
        query_mask, key_mask = (None if m is None else m | ~alive[:, None] for m in (query_mask, key_mask))
    return query_mask, key_mask, blanked


def zero_where_empty(losses: Float[Tensor, "b h"], alive: Bool[Tensor, " b"] | None) -> Float[Tensor, "b h"]:
    """Samples without a valid token on both sides contribute nothing."""
    return losses if alive is None else losses.masked_fill(~alive[:, None], 0.0)


def direction(tokens: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Vectors scaled to unit length, with a finite gradient at zero and no overflow.

    |x| is sqrt(|x|² + guard) with a guard of a few roundings of one: a vector far shorter than 1e-3 (in fp32) counts as
    having no direction, instead of a gradient of 1/|x|. Vectors longer than one are first divided by their largest
    entry, which changes no direction and keeps the square finite.
    """
    scale = tokens.detach().abs().amax(-1, keepdim=True).clamp_min(1.0)
    tokens = tokens / scale
    return tokens * _one_over_length(tokens.square(), scale)


def to_direction(tokens: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1"]:
    """The same in place, of which autograd knows nothing; tells |x| as it is counted there."""
    spare = scratch.empty(tokens.shape, tokens)
    scale = torch.abs(tokens, out=spare).amax(-1, keepdim=True).clamp_min(1.0)
    tokens /= scale
    inverse = _one_over_length(torch.square(tokens, out=spare), scale)
    tokens *= inverse
    return scale / inverse


def _one_over_length(squares: Float[Tensor, "*b d"], scale: Float[Tensor, "*b 1"]) -> Float[Tensor, "*b 1"]:
    """Of vectors that were divided by their scale."""
    guard = 8 * torch.finfo(squares.dtype).eps
    return torch.rsqrt(squares.sum(-1, keepdim=True) + guard / scale.square())


def chunks_of(problems: int, elements_per_problem: int, device: torch.device) -> int:
    """How many problems to hold in memory at once as matrices, at least one.

    A CPU wants its matrices in cache; an accelerator wants few launches.
    """
    budget = MATRIX_ELEMENTS.get(device.type, MATRIX_ELEMENTS["cuda"])
    return max(1, min(problems, budget // max(1, elements_per_problem)))


MATRIX_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
