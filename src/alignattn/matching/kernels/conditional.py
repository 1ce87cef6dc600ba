"""Conditional transport and its gradient, whatever features critic and navigator have: placed (placed.py), then
transported (choices.py). The networks that a matcher has by default place theirs themselves (carriers.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from alignattn.matching.kernels.choices import choose, pulls
from alignattn.matching.kernels.placed import GUARD, Placed, parts_of, place, room_for, tokens_there
from alignattn.matching.kernels.tiles import TILE, launch, width_of
from alignattn.matching.kernels.trunk import tokens_of


@triton.jit
def _place(
    critic, navigator, mask, unit_high, unit_low, nav_high, nav_low, inverses, sizes, count, length, heads, e, f, guard,
    ROWS: tl.constexpr, CRITIC: tl.constexpr, NAVIGATOR: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    there = tokens_there(mask, 0, start + tl.arange(0, ROWS), count, length, heads, MASKED)
    place(
        tokens_of(critic, 0, start, count, e, ROWS, CRITIC), tokens_of(navigator, 0, start, count, f, ROWS, NAVIGATOR),
        there, unit_high, unit_low, nav_high, nav_low, inverses, sizes, 0, start, count, e, f, guard,
        ROWS, CRITIC, NAVIGATOR, PARTS,
    )  # fmt: skip


def _placed(critic: Tensor, navigator: Tensor, mask: Tensor | None, products: str) -> Placed:
    (samples, heads, n, e), f = critic.shape, navigator.shape[3]
    to = room_for(samples * heads, n, e, f, products, critic)
    given = critic.contiguous(), navigator.contiguous(), critic if mask is None else mask.contiguous().view(torch.uint8)
    count = samples * heads * n
    launch(
        _place, triton.cdiv(count, TILE), *given, *to.all(), count, n, heads, e, f, GUARD, ROWS=TILE,
        CRITIC=width_of(critic), NAVIGATOR=width_of(navigator), MASKED=mask is not None, PARTS=parts_of(products),
    )  # fmt: skip
    return to


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: str, query_mask: Tensor | None, key_mask: Tensor | None, *given: Tensor) -> Tensor:
        query, query_navigator, key, key_navigator = given
        placed = (
            _placed(query, query_navigator, query_mask, products),
            _placed(key, key_navigator, key_mask, products),
        )
        chosen = choose(*placed, query_mask, key_mask, query.shape[1], products)
        if any(ctx.needs_input_grad[3:]):
            felt = pulls(*placed, chosen, products)
            ctx.save_for_backward(*(of.view(side.shape) for of, side in zip(felt, given, strict=True)))
        return chosen.losses.view(query.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * outer[0][..., None, None] for gradient in ctx.saved_tensors)


def transport(
    products: str,
    critics: tuple[Tensor, Tensor],
    navigators: tuple[Tensor, Tensor],
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """Bidirectional cost [b, h] of each problem, from features [b, h, tokens, _]."""
    sides = (side for pair in zip(critics, navigators, strict=True) for side in pair)
    losses: Tensor = _Transport.apply(products, query_mask, key_mask, *sides)
    return losses
